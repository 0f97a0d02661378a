"""Target states on disk: the target runs once over the data; afterwards training needs only its embedding and head.

A folder holds, for each process, `states-R.bin` (one row per token: all taps and the last hidden state, bf16 or fp32) and
`index-R.jsonl` (the position of each document). A document is identified by its tokens, so that it is found in any packing. A
line of the index is written after its rows, so that an interrupted run loses at most one document.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.training.data.packing import PackedLoader
from fledge.training.distributed import DistributedContext
from fledge.training.targets.target import Document, Target, TargetStates, documents
from fledge.training.ttt import TrainBatch

PROBES, PROBE_BYTES = 16, 1 << 16  # places, and bytes per place, that are hashed in each of the target's weight files
ROWS_AHEAD = 8  # rows prefetched from the target while earlier ones are written


class StatesOnDisk(Target):
    """Replaces the target in training. Missing documents are run through the target until `release_target` is called."""

    def __init__(self, target: Target, taps: int, folder: Path, identity: dict[str, Any], rank: int = 0) -> None:
        """`identity`: what the states depend on (model, layers, type). A folder with another identity is an error."""
        self.head, self.embedding, self.lm_head = target.head, target.embedding, target.lm_head
        self.vocab_size, self.hidden_size = target.vocab_size, target.hidden_size
        self.target: Target | None = target
        self.folder, self.rank, self.num_taps = folder, rank, taps
        self.dtype = target.head.weight.dtype
        self.width = (taps + 1) * target.hidden_size
        folder.mkdir(parents=True, exist_ok=True)
        _check_identity(folder / f"identity-{rank}.json", identity)
        self.reload()

    def reload(self) -> None:
        """Reads all processes' indices."""
        self._where: dict[str, tuple[Path, int, int]] = {}
        self._files: dict[Path, np.ndarray] = {}
        for index in sorted(self.folder.glob("index-*.jsonl")):
            rows = index.with_name(index.name.replace("index-", "states-")).with_suffix(".bin")
            for line in index.read_text().splitlines():
                try:
                    key, first, length = json.loads(line)
                except ValueError:  # incomplete line of a killed run
                    continue
                self._where[key] = (rows, first, length)

    def reserve(self, num_positions: int) -> None:
        if self.target is not None:
            self.target.reserve(num_positions)

    def without_compiler(self) -> None:
        if self.target is not None:
            self.target.without_compiler()

    def release_target(self) -> None:
        assert self.target is not None
        self.target.close()
        self.target = None

    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        found = list(documents(batch))
        if any(document.key not in self._where for document in found):
            return self._run(batch, found)
        rows: np.ndarray = np.zeros((batch.tokens_BT.numel(), self.width), _numpy_type(self.dtype))
        for key, first, tokens in found:
            file, at, _ = self._where[key]
            rows[first : first + len(tokens)] = self._open(file)[at : at + len(tokens)]
        states = torch.from_numpy(rows).view(self.dtype).to(batch.tokens_BT.device, non_blocking=True)
        *taps, hidden = states.split(self.hidden_size, -1)
        return TargetStates(list(taps), hidden)

    def _run(self, batch: TrainBatch, found: list[Document]) -> TargetStates:
        if self.target is None:
            raise UserError(f"{self.folder}: the states of some documents are missing; run again to compute them")
        states = self.target.states(batch)
        rows = torch.cat([*states.taps, states.hidden_ND], -1).to(self.dtype).cpu().contiguous()
        path = self.folder / f"states-{self.rank}.bin"
        row_bytes = self.width * self.dtype.itemsize
        with path.open("ab") as file, path.with_name(f"index-{self.rank}.jsonl").open("a") as index:
            if torn := file.tell() % row_bytes:
                file.write(b"\0" * (row_bytes - torn))
            for key, first, tokens in found:
                if key in self._where:
                    continue
                at, length = file.tell() // row_bytes, len(tokens)
                file.write(rows[first : first + length].view(torch.uint8).numpy().tobytes())
                file.flush()
                index.write(json.dumps([key, at, length]) + "\n")
                self._where[key] = (path, at, length)
        self._files.pop(path, None)
        return states

    def _open(self, path: Path) -> np.ndarray:
        if path not in self._files:
            self._files[path] = np.memmap(path, _numpy_type(self.dtype), "r").reshape(-1, self.width)
        return self._files[path]

    def fill(self, loader: PackedLoader, plan: Any, device: torch.device, dist: DistributedContext) -> Iterator[float]:
        """Runs the target over this process's share of the loader's documents; yields the fraction done, 0 to 1."""
        target = self.target
        assert target is not None
        one_row = PackedLoader(loader.samples, loader.sequence_length, 1, loader.seed)
        total = one_row.batches_per_epoch
        coming: deque[tuple[int, TrainBatch | None]] = deque()
        for done in range(0, total, dist.size):
            rows = [next(one_row) for _ in range(min(dist.size, total - done))]
            # A process without a row of its own at the end takes another's, because a sharded target needs all processes.
            batch = plan(rows[min(dist.rank, len(rows) - 1)])
            missing = dist.rank < len(rows) and any(document.key not in self._where for document in documents(batch))
            if missing:
                target.prefetch(batch)
            if target.requires_collective:
                missing = bool(dist.sum(torch.tensor(int(missing))) > 0)
            coming.append((done + len(rows), batch if missing else None))
            if len(coming) > ROWS_AHEAD:
                yield self._settle(*coming.popleft(), device, total)
        while coming:
            yield self._settle(*coming.popleft(), device, total)

    def _settle(self, done: int, missing: TrainBatch | None, device: torch.device, total: int) -> float:
        if missing is not None:
            self._run(missing.to(device), list(documents(missing)))
        return done / total


def _numpy_type(dtype: torch.dtype) -> type:
    """Returns an integer type of the same size, because numpy has no bfloat16."""
    return {2: np.int16, 4: np.int32}[dtype.itemsize]


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    if path.exists():
        found = json.loads(path.read_text())
        if different := [key for key in identity if found.get(key) != identity[key]]:
            raise UserError(
                f"{path.parent}: holds states of another target ({', '.join(different)} differ); use another folder"
            )
    else:
        write_atomically(path, lambda file: file.write(json.dumps(identity).encode()))


def weights_fingerprint(folder: Path) -> str:
    """Returns a hash of the sizes of the target's weight files and of a few places in each, which further training changes.
    Hashing a large target completely would take minutes, and file dates change with every copy."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".gguf")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for place in range(PROBES):
                file.seek(size * place // PROBES)
                digest.update(file.read(PROBE_BYTES))
    return digest.hexdigest()
