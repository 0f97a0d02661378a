"""Where a run stands, on disk: written whole or not at all."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.errors import UserError
from fledge.training.samples import write_atomically

_NAME = re.compile(r"step-(\d+)\.pt")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, lambda file: torch.save(state | {"step": step, "random": random_state()}, file))
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name))


def remove_leftovers(folder: Path) -> None:
    """What a run that was killed while it wrote left behind: as large as a checkpoint, and never read."""
    for path in folder.glob(".step-*.pt.*"):
        path.unlink(missing_ok=True)


def load_checkpoint(path: Path, *, lazily: bool = False) -> dict[str, Any]:
    """`lazily`: tensors are read only when they are used."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # a damaged archive raises many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{path}: cannot be read ({reason}); delete it to resume from the checkpoint before") from None


def random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()
    state = {"python": random.getstate(), "numpy": (kind, keys.tolist(), *rest), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
