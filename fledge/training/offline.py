"""Target states on disk: the target runs once over the data, and training needs no more of it than embedding and head.

A folder holds, for each process, `states-R.bin` (one row per token: all taps and the last hidden state, bf16 or fp32) and
`index-R.jsonl` (which document lies where). A document is known by its tokens, so that it is found however it is packed; a line
of the index is written after its rows, so that an interrupted run loses no more than one document.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.errors import UserError
from fledge.training.packing import PackedLoader
from fledge.training.target import Target, TargetStates
from fledge.training.ttt import TrainBatch


class StatesOnDisk:
    """Stands for a target in training. Documents that are not there yet are run through the target, while it is at hand."""

    def __init__(self, target: Target, taps: int, folder: Path, identity: dict[str, Any], rank: int = 0) -> None:
        """`identity`: what the states depend on (model, layers, type); other states in the folder are refused."""
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
                except ValueError:  # cut short by a kill
                    continue
                self._where[key] = (rows, first, length)

    def reserve(self, num_positions: int) -> None:
        if self.target is not None:
            self.target.reserve(num_positions)

    def without_compiler(self) -> None:
        if self.target is not None:
            self.target.without_compiler()

    def release_target(self) -> None:
        self.target = None

    def states(self, batch: TrainBatch, *, once: bool = False) -> TargetStates:
        tokens = batch.tokens_BT.cpu().numpy()
        documents = list(_documents(batch.start_BT.cpu(), tokens))
        if any(key not in self._where for key, _, _ in documents):
            return self._run(batch, documents)
        rows = np.zeros((tokens.size, self.width), _numpy_type(self.dtype))
        for key, first, length in documents:
            file, at, _ = self._where[key]
            rows[first : first + length] = self._open(file)[at : at + length]
        states = torch.from_numpy(rows).view(self.dtype).to(batch.tokens_BT.device, non_blocking=True)
        *taps, hidden = states.split(self.hidden_size, -1)
        return TargetStates(list(taps), hidden)

    def _run(self, batch: TrainBatch, documents: list[tuple[str, int, int]]) -> TargetStates:
        if self.target is None:
            raise UserError(f"{self.folder}: the states of some documents are missing; run again to have them computed")
        states = self.target.states(batch)
        rows = torch.cat([*states.taps, states.hidden_ND], -1).to(self.dtype).cpu().contiguous()
        path = self.folder / f"states-{self.rank}.bin"
        row_bytes = self.width * self.dtype.itemsize
        with path.open("ab") as file, path.with_name(f"index-{self.rank}.jsonl").open("a") as index:
            if torn := file.tell() % row_bytes:
                file.write(b"\0" * (row_bytes - torn))
            for key, first, length in documents:
                if key in self._where:
                    continue
                at = file.tell() // row_bytes
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

    def fill(self, loader: PackedLoader, plan: Any, device: torch.device, rank: int, world_size: int) -> Iterator[float]:
        """Runs the target over every document of the loader's data, this process's share of it; yields how much is done."""
        one_row = PackedLoader(loader.samples, loader.sequence_length, 1, loader.seed)
        total = one_row.batches_per_epoch
        for number in range(total):
            batch = next(one_row)
            if number % world_size == rank:
                planned = plan(batch)
                tokens = planned.tokens_BT.numpy()
                if any(key not in self._where for key, _, _ in _documents(planned.start_BT, tokens)):
                    self._run(planned.to(device), list(_documents(planned.start_BT, tokens)))
            yield (number + 1) / total


def _documents(start_BT: Tensor, tokens_BT: np.ndarray) -> Iterator[tuple[str, int, int]]:
    """(key, flat index of the first token, length) of each document; padding (zeros) is none."""
    length = start_BT.shape[1]
    begins = (start_BT == torch.arange(length)).flatten().nonzero().flatten().tolist()
    flat = tokens_BT.reshape(-1)
    for begin, end in zip(begins, [*begins[1:], len(flat)], strict=True):
        if flat[begin:end].any():
            yield hashlib.blake2b(flat[begin:end].tobytes(), digest_size=16).hexdigest(), begin, end - begin


def _numpy_type(dtype: torch.dtype) -> type:
    """numpy has no bfloat16; 16 bits are 16 bits."""
    return {2: np.int16, 4: np.int32}[dtype.itemsize]


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    if path.exists():
        found = json.loads(path.read_text())
        if found != identity:
            different = ", ".join(k for k in identity if found.get(k) != identity[k])
            raise UserError(f"{path.parent}: holds states of another target ({different} differ); use another folder")
    else:
        path.write_text(json.dumps(identity))
