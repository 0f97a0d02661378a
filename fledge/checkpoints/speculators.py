"""Reads and writes the speculators layout.

config.json has the draft layer's settings in `transformer_layer_config`, the flags at top level, and the verifier's name.
Tensors are those of the raw layout, with `layers.0` instead of `midlayer`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints import drafter_layout
from fledge.checkpoints.drafter_config import FLAGS, LAYER_IDS, layer_config_to_hf, model_type
from fledge.checkpoints.drafter_files import write_drafter_files
from fledge.errors import ModelError
from fledge.models.drafter import EagleDrafter

# `transformer_layer_config.model_type` -> architecture of the raw layout
_ARCHITECTURES = {"llama": "LlamaForCausalLMEagle3", "qwen3": "Eagle3Qwen3ForCausalLM"}
# Copies of the verifier's weights that some versions write into the file.
_VERIFIER_TENSORS = ("verifier_norm.weight", "verifier_lm_head.weight")


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def raw_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a speculators config.json under the raw layout's keys."""
    kind, layer = config.get("speculators_model_type"), config.get("transformer_layer_config")
    if kind != "eagle3":
        raise ModelError(f"speculators model type {kind!r} is not supported; supported: eagle3")
    if not isinstance(layer, Mapping):
        raise ModelError("config.json is of the speculators layout but lacks transformer_layer_config")
    layer_type = layer.get("model_type", "llama")
    if layer_type not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ModelError(f"speculators draft layers of type {layer_type!r} are not supported; supported: {known}")
    raw = {**layer, "architectures": [_ARCHITECTURES[layer_type]], "eagle_config": None}
    raw["draft_vocab_size"] = config.get("draft_vocab_size")
    # if missing: true in this layout, false in the raw one
    raw["norm_before_residual"] = config.get("norm_before_residual", True)
    for key in ("fc_norm", "norm_output", "norm_before_fc", LAYER_IDS, "target_hidden_size"):
        if config.get(key) is not None:
            raw[key] = config[key]
    return raw


def raw_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in _VERIFIER_TENSORS}


def save_speculators(
    drafter: EagleDrafter,
    folder: str | Path,
    verifier: str,
    *,
    verifier_architecture: str = "LlamaForCausalLM",
    speculative_tokens: int = 3,
    dtype: torch.dtype | None = None,
    texts: dict[str, str] | None = None,
) -> Path:
    """Writes a drafter in the speculators layout. `verifier`: the target's name or path, from which vLLM loads the target."""
    config = drafter.config
    if config.mla is not None:
        raise ModelError("the speculators layout has no latent attention (MLA): export to vllm or sglang instead")
    dtype = dtype or drafter.fc.weight.dtype
    layer = {
        "model_type": model_type(config),
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "vocab_size": config.vocab_size,
        **layer_config_to_hf(config),
        # vLLM reads the number of tapped states here; if missing it assumes three
        "num_aux_hidden_states": len(config.aux_layer_ids),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    settings = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        **{flag: getattr(config, flag) for flag in FLAGS},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: list(config.aux_layer_ids),
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier, "architectures": [verifier_architecture]},
        },
    }
    tensors = {
        name.replace("midlayer.", "layers.0.", 1): tensor for name, tensor in drafter_layout.to_file(drafter, dtype).items()
    }
    return write_drafter_files(folder, settings, tensors, texts)
