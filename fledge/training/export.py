"""A drafter in training, as others will load it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge import __version__, sources
from fledge.checkpoints.eagle3 import drafter_config_from_hf, save_drafter
from fledge.checkpoints.hf import load_config
from fledge.config import DrafterConfig
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


def find_checkpoint(path: str | Path) -> Path | None:
    """The training checkpoint that a path means: a file, or the newest of a run's folder. None: it is no such thing."""
    path = Path(path)
    if path.is_file() and path.suffix == ".pt":
        return path
    found = [*checkpoints(path), *checkpoints(path / "checkpoints")]
    return found[-1] if found else None


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the drafter of a training checkpoint in the raw EAGLE layout."""
    state = load_checkpoint(path, lazily=True)
    if not {"recipe", "drafter", "step"} <= state.keys():
        raise UserError(f"{path}: is no checkpoint of fledge train, or of a version that did not keep its recipe")
    drafter = EagleDrafter(_config(state, path))
    drafter.load_state_dict(state["drafter"])
    dtype = getattr(torch, state["recipe"]["run"]["compute_dtype"])
    record = {"step": state["step"], "tokens": state["tokens"], **state.get("provenance", {}), "recipe": state["recipe"]}
    export(drafter, folder, dtype, record)


def _config(state: dict[str, Any], path: Path) -> DrafterConfig:
    if "config" in state:
        config, weights = drafter_config_from_hf(state["config"]), state["drafter"]
        return replace(config, own_head="lm_head.weight" in weights, own_embedding="embed_tokens.weight" in weights)
    # An earlier version's, which says it in its recipe and the target's configuration.
    from fledge.training.drafter import drafter_config
    from fledge.training.recipe import DrafterRecipe

    model = state["recipe"]["target"]["model"]
    try:
        target = load_config(sources.resolve(model))
    except UserError as error:
        raise UserError(f"{path}: its target {model} is needed to read it ({error})") from None
    return drafter_config(DrafterRecipe(**state["recipe"]["drafter"]), target)
