"""A drafter in training, as others will load it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge import __version__
from fledge.checkpoints.eagle3 import drafter_config_from_hf, save_drafter
from fledge.errors import UserError
from fledge.models.drafter import EagleDrafter
from fledge.training.checkpoint import checkpoints, load_checkpoint
from fledge.training.targets.target import Target


def served_copy(drafter: EagleDrafter, target: Target, dtype: torch.dtype) -> EagleDrafter:
    """The drafter as it would be served: in the compute type, without gradients."""
    with torch.device("meta"):
        copy = EagleDrafter(drafter.config)
    state = {n: v.detach().to(dtype) if v.is_floating_point() else v for n, v in drafter.state_dict().items()}
    copy.load_state_dict(state, assign=True)
    copy.rotary = drafter.rotary
    return copy.share(target.embedding, target.lm_head).eval().requires_grad_(False)


def export(drafter: EagleDrafter, folder: Path, dtype: torch.dtype, provenance: dict[str, Any]) -> None:
    """The raw EAGLE layout, with a `provenance.json` that says where it comes from."""
    record = {"fledge": __version__, "torch": torch.__version__, **provenance}
    save_drafter(drafter, folder, dtype=dtype, texts={"provenance.json": json.dumps(record, indent=2) + "\n"})


def find_best(path: str | Path) -> Path | None:
    """The best drafter of a run's folder, as training selected it. None: it is no such folder, or nothing was evaluated yet."""
    best = Path(path) / "best"
    return best if (best / "config.json").is_file() else None


def find_checkpoint(path: str | Path) -> Path | None:
    """The training checkpoint that a path means: a file, or the newest of a folder. None: it is no such thing."""
    path = Path(path)
    if path.is_file() and path.suffix == ".pt":
        return path
    found = [*checkpoints(path), *checkpoints(path / "checkpoints")]
    return found[-1] if found else None


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the drafter of a training checkpoint in the raw EAGLE layout."""
    state = load_checkpoint(path, lazily=True)
    if not {"recipe", "config", "drafter", "step"} <= state.keys():
        raise UserError(f"{path}: is no checkpoint of fledge train")
    weights = state["drafter"]
    config = drafter_config_from_hf(state["config"])
    config = replace(config, own_head="lm_head.weight" in weights, own_embedding="embed_tokens.weight" in weights)
    drafter = EagleDrafter(config)
    drafter.load_state_dict(weights)
    dtype = getattr(torch, state["recipe"]["run"]["compute_dtype"])
    record = {"step": state["step"], "tokens": state["tokens"], **state["provenance"], "recipe": state["recipe"]}
    export(drafter, folder, dtype, record)
