"""The known mistakes that make a good drafter draft badly, each as the change to its files that undoes it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fledge.checkpoints import origins
from fledge.checkpoints.drafter_config import LAYER_IDS, named_layers
from fledge.checkpoints.drafter_files import DrafterFiles
from fledge.config import DrafterConfig, ModelConfig, default_aux_layers

SHIFTED = "layers off by one"
COMMON_ROPE_THETAS = (10_000.0, 500_000.0, 1_000_000.0)


@dataclass(frozen=True)
class Change:
    """A change to a drafter's files that undoes one mistake."""

    fault: str  # the mistake that it undoes
    remedy: str  # what the user should do
    files: DrafterFiles  # the changed files
    short: str  # a short name for the progress bar


def changes(files: DrafterFiles, config: DrafterConfig, target: ModelConfig) -> Iterator[Change]:
    """Yields all changes to try, for the more likely mistakes first."""
    yield from _layer_changes(files, config, target)
    yield from _flag_changes(files)
    yield from _map_changes(files, config)
    yield from _rope_changes(files, config, target)
    yield from _sharing_changes(files, config)


def layer_searches(files: DrafterFiles, config: DrafterConfig, target: ModelConfig) -> Iterator[Change]:
    """Yields changes that replace one tap by another layer: every tap with every layer."""
    ids = list(config.aux_layer_ids)
    for place in range(len(ids)):
        for layer in range(target.num_layers + 1):
            candidate = (*ids[:place], layer, *ids[place + 1 :])
            if layer != ids[place] and _ascending(candidate, target):
                yield _with_layers(files, candidate, "wrong layers")


def _layer_changes(files: DrafterFiles, config: DrafterConfig, target: ModelConfig) -> Iterator[Change]:
    top, nested = named_layers(files.config)
    if nested and top and nested != top:
        yield _with_layers(files, tuple(top), "conflicting layers")
        yield _with_layers(files, tuple(nested), "conflicting layers")
    ids = config.aux_layer_ids
    default = default_aux_layers(target.num_layers)
    nearby = {tuple(i + shift for i in ids): SHIFTED for shift in (-1, 1)}
    usual = {tuple(i + shift for i in default): "wrong layers" for shift in (0, -1, 1)}
    for candidate, fault in {**nearby, **{ids: fault for ids, fault in usual.items() if ids not in nearby}}.items():
        if candidate != ids and len(candidate) == len(ids) and _ascending(candidate, target):
            yield _with_layers(files, candidate, fault)


def _flag_changes(files: DrafterFiles) -> Iterator[Change]:
    """Changes of flags. The weights determine fc_norm and norm_before_fc; the other two flags cannot be seen in the file."""
    has_fc_norm = "fc_norm.0.weight" in files.tensors
    has_input_norm = "input_norm.weight" in files.tensors
    by_weights = {"fc_norm": has_fc_norm, "norm_before_fc": has_input_norm}
    wrong = {flag: value for flag, value in by_weights.items() if _flag(files, flag) != value}
    for flag, value in wrong.items():
        yield _with_settings(files, f"{flag} wrong", {flag: value})
    flipped = {"norm_output": not _flag(files, "norm_output")}
    if "fc_norm" in wrong:
        yield _with_settings(files, "fc_norm and norm_output swapped", wrong | flipped)
    yield _with_settings(files, "norm_output wrong", flipped)
    yield _with_settings(
        files, "norm_before_residual wrong", {"norm_before_residual": not _flag(files, "norm_before_residual")}
    )


def _map_changes(files: DrafterFiles, config: DrafterConfig) -> Iterator[Change]:
    d2t, t2d, size = files.tensors.get("d2t"), files.tensors.get("t2d"), config.draft_vocab_size
    if t2d is not None and int(t2d.to(torch.bool).sum()) == size:
        rebuilt = origins.rebuilt_d2t(t2d)
        if d2t is None:
            yield _with_map(files, "d2t missing", "rebuild d2t from t2d: `fledge import` does", rebuilt)
        elif not torch.equal(d2t.to(torch.int64), rebuilt):
            absolute = torch.equal(d2t.to(torch.int64), rebuilt + torch.arange(size))
            fault = "d2t holds ids instead of offsets" if absolute else "d2t wrong"
            yield _with_map(files, fault, "replace d2t by the one that t2d implies", rebuilt)
    if d2t is not None and d2t.shape == (size,):
        if not bool((d2t == torch.arange(size)).all()):
            offsets = d2t.to(torch.int64) - torch.arange(size)
            yield _with_map(files, "d2t holds ids instead of offsets", "subtract 0, 1, 2, … from d2t", offsets)
        yield _with_map(files, "d2t wrong", "set d2t to zero: the draft vocabulary is the first tokens", torch.zeros_like(d2t))
    elif d2t is None and size < config.vocab_size:
        zero = torch.zeros(size, dtype=torch.int64)
        yield _with_map(files, "d2t missing", "set d2t to zero: the draft vocabulary is the first tokens", zero)


def _rope_changes(files: DrafterFiles, config: DrafterConfig, target: ModelConfig) -> Iterator[Change]:
    """Changes of the rope settings: trainers copy the target's, but a config.json written by hand may lack them."""
    theirs = target.rope.to_hf()
    if config.rope.to_hf() != theirs:
        said = " and ".join(f"{key} to {json.dumps(value)}" for key, value in theirs.items())
        yield _with_settings(files, "rope wrong", {**theirs, "rope_parameters": None}, f"set {said}, as the target has it")
    for theta in COMMON_ROPE_THETAS:
        if theta not in (config.rope.theta, target.rope.theta):
            settings = {"rope_theta": theta, "rope_parameters": None}
            yield _with_settings(files, "rope wrong", settings, f"set rope_theta to {theta:g}")


def _sharing_changes(files: DrafterFiles, config: DrafterConfig) -> Iterator[Change]:
    if config.hidden_size != config.target_hidden_size:
        return
    if config.own_embedding:
        remedy = "remove embed_tokens.weight, so that the target's embedding is shared"
        yield Change("embedding wrong", remedy, _without(files, "embed_tokens.weight"), "the target's embedding")
    if config.own_head and config.draft_vocab_size == config.vocab_size:
        remedy = "remove lm_head.weight, so that the target's head is shared"
        yield Change("head wrong", remedy, _without(files, "lm_head.weight"), "the target's head")


def _flag(files: DrafterFiles, name: str) -> bool:
    nested = (files.config.get("eagle_config") or {}).get(name)
    top = files.config.get(name)
    return bool(nested if top is None else top)


def _with_settings(files: DrafterFiles, fault: str, settings: dict[str, Any], remedy: str = "", short: str = "") -> Change:
    nested = {key: value for key, value in (files.config.get("eagle_config") or {}).items() if key not in settings}
    config = {**files.config, **settings, "eagle_config": nested}
    said = ", ".join(f'"{key}": {str(value).lower()}' for key, value in settings.items())
    remedy = remedy or f"set {said} at the top level of config.json"
    return Change(fault, remedy, replace(files, config=config), short or ", ".join(settings))


def _with_layers(files: DrafterFiles, ids: tuple[int, ...], fault: str) -> Change:
    settings = {LAYER_IDS: list(ids), "num_aux_hidden_states": len(ids)}
    remedy = f"set {LAYER_IDS} to {list(ids)}: `fledge import --layers` does"
    return _with_settings(files, fault, settings, remedy, f"layers {list(ids)}")


def _with_map(files: DrafterFiles, fault: str, remedy: str, d2t: torch.Tensor) -> Change:
    tensors = {name: tensor for name, tensor in files.tensors.items() if name != "t2d"}
    return Change(fault, remedy, replace(files, tensors={**tensors, "d2t": d2t}), "another d2t")


def _without(files: DrafterFiles, name: str) -> DrafterFiles:
    return replace(files, tensors={key: tensor for key, tensor in files.tensors.items() if key != name})


def _ascending(ids: tuple[int, ...], target: ModelConfig) -> bool:
    return list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] <= target.num_layers
