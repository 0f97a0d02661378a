"""Checkpoints of a run, written atomically. Also the check whether a run may resume with changed settings, and the export."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fledge import __version__
from fledge.checkpoints import provenance
from fledge.checkpoints.drafter_config import drafter_config_from_hf
from fledge.checkpoints.eagle3 import save_drafter
from fledge.errors import UserError, first_line
from fledge.files import write_atomically
from fledge.models.drafter import EagleDrafter
from fledge.training.recipe import Recipe, build_recipe, flat_settings
from fledge.training.targets.target import Target

_NAME = re.compile(r"step-(\d+)\.pt")


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    path = folder / f"step-{step:08d}.pt"
    write_atomically(path, lambda file: torch.save(state | {"step": step}, file))
    for old in checkpoints(folder)[:-keep]:
        old.unlink()
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Returns the checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name))


def latest_checkpoints(folders: Sequence[Path]) -> list[Path]:
    """Returns each run's checkpoint at the newest step that all runs have; empty if no run has any checkpoint."""
    found = [{path.name: path for path in checkpoints(folder / "checkpoints")} for folder in folders]
    common = set.intersection(*(set(paths) for paths in found))
    if not common and any(found):
        raise UserError(
            f"{', '.join(map(str, folders))}: these arms have no checkpoint of the same step; train them again in another "
            "output folder"
        )
    return [paths[max(common)] for paths in found] if common else []


def remove_leftovers(folder: Path) -> None:
    """Deletes temporary files of a run that was killed while it wrote a checkpoint."""
    for path in folder.glob(".step-*.pt.*"):
        path.unlink(missing_ok=True)


def load_checkpoint(path: Path, *, lazily: bool = False) -> dict[str, Any]:
    """Loads a checkpoint's state. `lazily`: tensors are memory-mapped and read only when they are used."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily)
    except Exception as error:  # a damaged archive raises many kinds
        raise UserError(
            f"{path}: cannot be read ({first_line(error)}); delete it to resume from the previous checkpoint"
        ) from None


# Settings that may change on resume: length, intervals, paths, and ways to save memory that give the same numbers.
_FREE = {
    *("output", "evaluation"),
    *("run.steps", "run.epochs", "run.max_seconds", "run.patience", "run.log_every", "run.save_every", "run.evaluate_every"),
    *("run.save_seconds", "run.evaluate_seconds"),
    *("run.keep", "run.device", "run.compile", "run.shard_target", "run.hidden_states", "run.hidden_states_folder"),
    *("target.endpoint", "target.endpoint_states", "target.endpoint_requests"),
    # The contents of these files are compared when they are loaded.
    *("data.train", "data.held_out", "data.decontaminate", "data.cache", "data.vocabulary"),
    "data.micro_batch_size",
    *("objective.chunk_rows", "objective.recompute"),
}
# Settings that the error message of a diverged run tells the user to change.
_REMEDIES = {
    *("optimizer.learning_rate", "optimizer.muon_learning_rate", "optimizer.warmup", "optimizer.max_grad_norm", "target.dtype"),
}
_LEAST = {"output": "-", "target": {"model": "-"}, "data": {"train": ["-"]}, "run": {"steps": 1}}


def earlier_settings(output: str) -> dict[str, Any] | None:
    """Returns the recipe of the run in the output folder, as a mapping; None if there is no checkpoint yet."""
    found = checkpoints(Path(output) / "checkpoints")
    if not found:
        return None
    return load_checkpoint(found[-1], lazily=True)["recipe"]


def check_settings(recipe: Recipe, before: Mapping[str, Any], log: Callable[[str], None]) -> None:
    """Raises a UserError if settings differ from those of the run in the output folder. Runs before anything is loaded."""
    refused, logged = changed_settings(before, recipe)
    if refused:
        raise UserError(
            f"{recipe.output}: holds a run with other settings ({'; '.join(refused)}); put them back, or use another output "
            "folder"
        )
    for change in logged:
        log(f"changed setting: {change}")


def changed_settings(before: Mapping[str, Any], recipe: Recipe) -> tuple[list[str], list[str]]:
    """Describes the changes since `before`, a recipe as a mapping: (refused ones, allowed ones that are logged)."""
    was, now = flat_settings(before), flat_settings(recipe.to_dict())
    usual = flat_settings(build_recipe(_LEAST).to_dict())
    free = _FREE | {"data.held_out_samples"} if recipe.data.held_out else _FREE
    refused: list[str] = []
    logged: list[str] = []
    for key, value in now.items():
        old = was.get(key, usual[key])  # a setting that is newer than the run had its usual value
        if free.isdisjoint((key, key.partition(".")[0])) and _within(old, before["output"]) != _within(value, recipe.output):
            (logged if key in _REMEDIES else refused).append(f"{key} was {json.dumps(old)}, now {json.dumps(value)}")
    return refused, logged


def _within(value: Any, output: str) -> Any:
    """Makes a path inside the output folder (of the toy model) relative, so that moving the folder is no change."""
    return value.removeprefix(output.rstrip("/") + "/") if isinstance(value, str) else value


# --- drafters -----------------------------------------------------------------------------------------------------------


def served_copy(drafter: EagleDrafter, target: Target, dtype: torch.dtype) -> EagleDrafter:
    """The drafter as it would be served: in the compute type, without gradients."""
    with torch.device("meta"):
        copy = EagleDrafter(drafter.config)
    state = {n: v.detach().to(dtype) if v.is_floating_point() else v for n, v in drafter.state_dict().items()}
    copy.load_state_dict(state, assign=True)
    copy.rotary = drafter.rotary
    return copy.share(target.embedding, target.lm_head).eval().requires_grad_(False)


def export(drafter: EagleDrafter, folder: Path, dtype: torch.dtype, facts: dict[str, Any]) -> None:
    """Writes a drafter in the raw EAGLE layout, with a `provenance.json` that records its training."""
    record = {"fledge": __version__, "torch": torch.__version__, **facts}
    save_drafter(drafter, folder, dtype=dtype, texts={provenance.FILE: json.dumps(record, indent=2) + "\n"})


def find_best(path: str | Path) -> Path | None:
    """Returns the best drafter in a run's folder; None if it is not a run's folder or nothing has been evaluated yet."""
    best = Path(path) / "best"
    return best if (best / "config.json").is_file() else None


def find_checkpoint(path: str | Path) -> Path | None:
    """Returns the training checkpoint at a path: the file itself, or the newest one of a folder; None if there is none."""
    path = Path(path)
    if path.is_file() and path.suffix == ".pt":
        return path
    found = [*checkpoints(path), *checkpoints(path / "checkpoints")]
    return found[-1] if found else None


def export_checkpoint(path: Path, folder: Path) -> None:
    """Writes the drafter of a training checkpoint in the raw EAGLE layout."""
    state = load_checkpoint(path, lazily=True)
    if not {"recipe", "config", "drafter", "step"} <= state.keys():
        raise UserError(f"{path}: is not a checkpoint of fledge train")
    weights = state["drafter"]
    config = drafter_config_from_hf(state["config"])
    config = replace(config, own_head="lm_head.weight" in weights, own_embedding="embed_tokens.weight" in weights)
    drafter = EagleDrafter(config)
    drafter.load_state_dict(weights)
    dtype = getattr(torch, state["recipe"]["run"]["compute_dtype"])
    record = {"step": state["step"], "tokens": state["tokens"], **state["provenance"], "recipe": state["recipe"]}
    export(drafter, folder, dtype, record)
