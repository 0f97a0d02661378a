"""Recognises which trainer wrote a checkpoint and translates it to the raw layout.

| origin      | recognised by                      | differences                                                |
|-------------|------------------------------------|------------------------------------------------------------|
| speculators | `speculators_model_type`           | own config.json; norm_before_residual is true if missing   |
| SafeAILab   | architecture LlamaForCausalLM      | pickled weights, `midlayer`, no layer ids: (2, L//2, L-3)  |
| TorchSpec   | `_torchspec_version`               | embedding included; layer ids count outputs                |
| NeMo        | names begin with `model.`          | `model.layers.0`, embedding included                       |
| SpecForge   | layer ids inside `eagle_config`    | layer ids count outputs: their 1 is our 2                  |
| AngelSlim   | Eagle3LlamaForCausalLM, `midlayer` | embedding and vocabulary maps included, no layer ids       |

There are two conventions for layer ids. Ours (and vLLM's): i is the residual stream after i layers. Theirs: i is the output of
layer i counted from zero, so one less for the same state. Nobody taps the state after the first layer, so a first id of 1 means
their convention (SGLang decides the same way). It is applied only to origins that are known to count outputs.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints import speculators
from fledge.checkpoints.drafter_config import LAYER_IDS, named_layers
from fledge.checkpoints.drafter_files import DrafterFiles
from fledge.config_checks import architecture_of, mapping
from fledge.errors import ModelError

# Computed buffers, which are not needed.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_PREFIXES = ("draft_model.", "model.")
_RENAMED = {
    "draft_id_to_target_id": "d2t",
    # SGLang's names before EAGLE 3.1 had them
    "aux_norm_low.weight": "fc_norm.0.weight",
    "aux_norm_mid.weight": "fc_norm.1.weight",
    "aux_norm_high.weight": "fc_norm.2.weight",
}
_COUNT_OUTPUTS = ("SpecForge", "TorchSpec", "NeMo")


def canonical(files: DrafterFiles) -> DrafterFiles:
    """The checkpoint with the raw layout's names and keys; its `notes` say what was translated."""
    config, notes = dict(files.config), list(files.notes)
    origin = recognise(config, files.tensors)
    if origin == "speculators":
        config = speculators.raw_config(config)
        tensors = _renamed(speculators.raw_tensors(files.tensors), notes)
        return replace(files, config=config, tensors=tensors, origin=origin, notes=notes)
    tensors = _renamed(files.tensors, notes)
    if origin == "SafeAILab" or config.get("architectures") == ["LlamaEagle3DraftModel"]:
        config["architectures"] = ["LlamaForCausalLMEagle3"]
    _rename_flag(config, notes)
    if origin in _COUNT_OUTPUTS:
        _shift_layer_ids(config, notes, origin)
    return replace(files, config=config, tensors=tensors, origin=origin, notes=notes)


def recognise(config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """The origin of a checkpoint, as in the table above; `raw` if none matches."""
    architecture = architecture_of(config)
    eagle_config = mapping(config, "eagle_config")
    if speculators.is_speculators(config):
        return "speculators"
    if "_torchspec_version" in config:
        return "TorchSpec"
    if any(name.startswith(_PREFIXES) for name in tensors):
        return "NeMo"
    if architecture == "LlamaForCausalLM" and "fc.weight" in tensors and "midlayer.hidden_norm.weight" in tensors:
        return "SafeAILab"
    if eagle_config.get(LAYER_IDS) and not config.get(LAYER_IDS):
        return "SpecForge"
    if architecture == "Eagle3LlamaForCausalLM" and "midlayer.hidden_norm.weight" in tensors and "t2d" in tensors:
        return "AngelSlim"
    return "raw"


def _renamed(tensors: dict[str, Tensor], notes: list[str]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    clashes = []
    for name, tensor in tensors.items():
        if _HARMLESS.search(name):
            continue
        fresh = name
        for prefix in _PREFIXES:
            fresh = fresh.removeprefix(prefix)
        fresh = _RENAMED.get(fresh, fresh)
        if fresh.startswith("layers.0."):
            fresh = "midlayer." + fresh.removeprefix("layers.0.")
        if fresh in result:
            clashes.append(name)
        result[fresh] = tensor
    if clashes:
        raise ModelError(f"tensors that occur twice under different names: {', '.join(clashes[:8])}")
    if any(name.startswith(_PREFIXES) for name in tensors):
        notes.append("tensor names had a prefix (model. or draft_model.), which vLLM does not load")
    return result


def _rename_flag(config: dict[str, Any], notes: list[str]) -> None:
    """Renames `use_aux_norm`, SGLang's name of fc_norm before EAGLE 3.1."""
    for place in (config, config.get("eagle_config") or {}):
        if place.get("use_aux_norm") is None:
            continue
        old = bool(place["use_aux_norm"])
        if config.get("fc_norm") is not None and bool(config["fc_norm"]) != old:
            raise ModelError(f"use_aux_norm is {old} and fc_norm {config['fc_norm']}: two names of one flag; keep fc_norm")
        config["fc_norm"] = old
        notes.append("use_aux_norm read as fc_norm")


def _shift_layer_ids(config: dict[str, Any], notes: list[str], origin: str) -> None:
    top, nested = named_layers(config)
    if top and nested and top != nested:
        return  # a conflict, which `parse_config` reports
    ids = top or nested
    if ids[:1] != [1]:
        return
    shifted = [i + 1 for i in ids]
    config[LAYER_IDS] = shifted
    config["eagle_config"] = {**mapping(config, "eagle_config"), LAYER_IDS: shifted}
    notes.append(f"layer ids {ids} of {origin} count layer outputs; read as {shifted} (after i layers)")


def rebuilt_d2t(t2d: Tensor) -> Tensor:
    """d2t from the mask t2d: every known trainer numbers its draft ids in the order of the target's ids."""
    targets = t2d.to(torch.bool).nonzero().flatten()
    return targets - torch.arange(len(targets))
