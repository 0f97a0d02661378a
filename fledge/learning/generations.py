"""Generations of a drafter on disk, with the gate's figures. Each is written atomically.

DIR/generation-0003/   drafter files in fp32 and `figures.json`; can be served with `fledge serve --drafter`
DIR/current.json       {"generation": 3}: replaced last; a server killed during a save restarts with the generation before
DIR/history.jsonl      one line per swap, refusal, roll-back or point of the curve
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from fledge import sources
from fledge.checkpoints.eagle3 import save_drafter
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter

_NAME = re.compile(r"generation-(\d+)")
SAMPLES = 64  # places in a weight file that are read for its hash
SAMPLE_BYTES = 4096


class Generations:
    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep
        self._lock: IO[str] | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--learn-dir {folder}: cannot be created ({error})") from None
        self.history = self.folder / "history.jsonl"

    def lock(self) -> Generations:
        """Locks the folder until `close` or until the process ends, since two servers would overwrite each other's generations.
        Removes temporary files of a server that was killed."""
        try:
            self._lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise UserError(f"--learn-dir {self.folder}: cannot be written ({error}); give another folder") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.close()
            raise UserError(f"--learn-dir {self.folder}: in use by another server; give another folder") from None
        for left in self.folder.glob(".generation-*"):
            shutil.rmtree(left, ignore_errors=True)
        for left in self.folder.glob(".current.json.*"):
            left.unlink(missing_ok=True)
        if self.history.is_file() and not (content := self.history.read_bytes()).endswith(b"\n"):  # killed while writing
            os.truncate(self.history, content.rfind(b"\n") + 1)
        return self

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def path(self, number: int) -> Path:
        return self.folder / f"generation-{number:04d}"

    @property
    def current(self) -> int | None:
        """The generation to continue with; None if there is none yet."""
        try:
            number = int(json.loads((self.folder / "current.json").read_text())["generation"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.folder / 'current.json'}: cannot be read ({error}); delete it to start again") from None
        if not self.has(number):
            raise UserError(f"current.json names {self.path(number)}, which is missing; delete current.json to start again")
        return number

    def figures(self, number: int) -> dict[str, Any]:
        """Returns the figures saved with a generation; empty if they cannot be read."""
        try:
            found = json.loads((self.path(number) / "figures.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def newest(self) -> int:
        """The highest generation number in the folder, served or not."""
        return max(self._numbers(), default=0)

    def has(self, number: int) -> bool:
        return (self.path(number) / "config.json").is_file()

    def _numbers(self) -> list[int]:
        return sorted(int(found[1]) for path in self.folder.iterdir() if (found := _NAME.fullmatch(path.name)))

    def save(self, drafter: EagleDrafter, number: int, figures: dict[str, Any], needed: Collection[int] = ()) -> None:
        """Saves a generation, makes it the current one, and deletes old ones except those in `needed`."""
        texts = {"figures.json": json.dumps(figures, indent=2) + "\n"}
        folder = save_drafter(drafter, self.path(number), dtype=torch.float32, texts=texts)
        for path in (*folder.iterdir(), folder, self.folder):  # so that after a power cut current.json names complete files
            _sync(path)
        self.choose(number)
        kept = {0, number, *needed}  # generation 0 is the baseline of all
        for old in [one for one in self._numbers() if one != number][: -self.keep]:
            if old not in kept:
                shutil.rmtree(self.path(old), ignore_errors=True)

    def choose(self, number: int) -> int:
        """Makes this generation the current one or, if its save failed, the last one saved before it; returns its number."""
        saved = [one for one in self._numbers() if one <= number and self.has(one)]
        if not saved:
            raise FileNotFoundError(f"{self.path(number)} and all generations before it are missing")
        content = json.dumps({"generation": saved[-1]}).encode() + b"\n"
        write_atomically(self.folder / "current.json", lambda file: file.write(content))
        return saved[-1]

    def record(self, event: dict[str, Any]) -> None:
        with self.history.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    def events(self) -> list[dict[str, Any]]:
        """Returns the events of the history; an empty list if it cannot be read."""
        try:
            return read_history(self.folder)
        except UserError:
            return []


def _sync(path: Path) -> None:
    """Flushes a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Reads all events, oldest first. An incomplete last line, left by a killed server, is skipped."""
    path = Path(folder) / "history.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); give the folder of --learn-dir") from None
    events = []
    for number, line in enumerate(lines, 1):
        try:
            events.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise UserError(f"{path}, line {number}: is not JSON") from None
    return [event for event in events if isinstance(event, dict) and "event" in event]


@dataclass(frozen=True)
class Origin:
    """The target and drafter to which a learn folder belongs: hashes of parts of their weights, stored with generation 0."""

    target: str
    drafter: str | None  # None: none was named

    def check(self, generations: Generations) -> None:
        """Raises a UserError for a folder of another target, or of another drafter than the one that is given."""
        figures, folder = generations.figures(0), generations.folder
        if "target" not in figures:  # written by an older version
            return
        if figures["target"] != self.target:
            raise UserError(f"--learn-dir {folder} belongs to another target model; give another folder")
        if self.drafter in (None, figures["drafter"]):
            return
        if figures["drafter"] is None:
            raise UserError(f"--learn-dir {folder} was started without a drafter, and one is given now; give another folder")
        raise UserError(f"--learn-dir {folder} was started with another drafter; name that one, or give another folder")


def target_hash(model: str | Decoder) -> str:
    if isinstance(model, Decoder):
        return network_hash(model)
    path, digest = sources.find(model), hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as content:
            for place in range(SAMPLES):
                content.seek(place * size // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


@torch.no_grad()
def network_hash(network: nn.Module) -> str:
    """Returns a hash of the network's weights as loaded, before they are packed."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in network.named_parameters():
        digest.update(f"{name} {tuple(value.shape)}".encode())
        flat = value.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // SAMPLE_BYTES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()
