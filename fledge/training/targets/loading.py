"""Loads the target of a recipe (Fledge's decoder, transformers, or an endpoint), with its sizes and stop tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from fledge import sources
from fledge.checkpoints.ends import fetch_ends, load_ends, load_last_layer, text_config
from fledge.checkpoints.hf import load_config, load_decoder
from fledge.checkpoints.tensors import read_json
from fledge.config import DrafterConfig, MLAConfig, ModelConfig, RopeConfig, is_supported
from fledge.errors import ModelError, first_line
from fledge.models.moe import stack_experts
from fledge.training.distributed import DistributedContext
from fledge.training.drafter import drafter_config, last_layer, last_layer_of_transformers, usable
from fledge.training.recipe import Recipe
from fledge.training.targets.endpoint import EndpointTarget
from fledge.training.targets.target import DecoderTarget, Target, TransformersTarget, load_sharded


@dataclass(frozen=True)
class LoadedTarget:
    target: Target
    config: DrafterConfig  # of the recipe's drafter for this target
    shape: Any  # the target's sizes: a ModelConfig, or an object with its fields
    stop_ids: tuple[int, ...]
    last_layer: dict[str, Any]  # weights (see `drafter.last_layer`)


def find_target(recipe: Recipe) -> Path:
    """Returns the folder of the target's files; for an endpoint, only of those with embedding, norm and head."""
    model = recipe.target.model
    return fetch_ends(model) if recipe.target.endpoint is not None else sources.resolve(model)


def load_target(recipe: Recipe, dist: DistributedContext, folder: Path) -> LoadedTarget:
    """Loads the target. `recipe` must be resolved."""
    device, dtype = torch.device(recipe.run.device), getattr(torch, recipe.target.dtype)
    target: Target
    shape: ModelConfig | _Shape
    if recipe.target.endpoint is not None:
        shape, stop_ids = target_shape(folder)
        config = drafter_config(recipe.drafter, shape)
        target = endpoint = _endpoint(recipe, folder, config, shape.num_layers)
        weights = load_last_layer(folder)
        weights = usable(weights, shape) if isinstance(shape, ModelConfig) else weights
        weights |= {"norm.weight": endpoint.norm.weight.float().cpu()}
    elif recipe.target.backend == "fledge":
        shape = known = load_config(folder)
        config = drafter_config(recipe.drafter, shape)
        if sharded := recipe.run.shard_target and dist.size > 1:
            decoder = load_sharded(lambda: load_decoder(folder, dtype), dist, device)
        else:
            decoder = load_decoder(folder, dtype, device)
            if device.type == "cuda":
                stack_experts(decoder, dtype)
        target = DecoderTarget(decoder, config.aux_layer_ids, compile=recipe.run.compile == "yes", sharded=sharded)
        stop_ids, weights = known.eos_token_ids, last_layer(decoder)
    else:
        model, shape = _transformers_model(folder, dtype, device)
        config = drafter_config(recipe.drafter, shape)
        target = TransformersTarget(model, config.aux_layer_ids)
        eos = model.generation_config.eos_token_id
        stop_ids = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
        weights = last_layer_of_transformers(model)
    return LoadedTarget(target, config, shape, stop_ids, weights)


@dataclass(frozen=True)
class _Shape:
    """The sizes that `drafter_config` needs, for an architecture that Fledge does not support."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: RopeConfig
    mla: MLAConfig | None = None


def _transformers_model(folder: Path, dtype: torch.dtype, device: torch.device) -> tuple[Any, _Shape]:
    from transformers import AutoModelForCausalLM

    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, trust_remote_code=False)
        model = model.to(device)
    except Exception as error:  # transformers raises many types of errors
        raise ModelError(f"{folder}: transformers cannot load it ({first_line(error)})") from error
    text = model.config.get_text_config()
    return model, _shape(text, text.to_dict(), model.get_input_embeddings().weight.shape[0])


def _endpoint(recipe: Recipe, folder: Path, config: DrafterConfig, num_layers: int) -> EndpointTarget:
    asked = recipe.target
    assert asked.endpoint is not None
    ends = load_ends(folder, getattr(torch, asked.dtype), torch.device(recipe.run.device))
    target = EndpointTarget(
        asked.endpoint,
        ends,
        text_config(folder),
        config.aux_layer_ids,
        num_layers,
        model=asked.model,
        storage=asked.endpoint_states,
        requests=asked.endpoint_requests,
    )
    target.require_length(recipe.data.sequence_length)
    return target


def target_shape(folder: Path) -> tuple[ModelConfig | _Shape, tuple[int, ...]]:
    """Reads the target's sizes and stop tokens from its files, for any architecture."""
    content = text_config(folder)
    shape: ModelConfig | _Shape
    if is_supported(content):
        shape = ModelConfig.from_hf(content, name=str(folder))
    else:
        try:
            shape = _shape(SimpleNamespace(**content), content, int(content["vocab_size"]))
        except (AttributeError, KeyError) as error:
            raise ModelError(f"{folder}: config.json lacks one of the model's sizes ({error})") from None
    said = content.get("eos_token_id")
    if (folder / "generation_config.json").exists():
        said = read_json(folder / "generation_config.json").get("eos_token_id", said)
    return shape, tuple(said) if isinstance(said, list) else (() if said is None else (said,))


def _shape(text: Any, content: dict[str, Any], vocab_size: int) -> _Shape:
    try:
        rope = RopeConfig.from_hf(content)
    except ModelError:  # plain RoPE: the drafter's positions need not equal the target's
        rope = RopeConfig()
    heads = text.num_attention_heads
    return _Shape(
        vocab_size=vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        num_layers=text.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        max_positions=getattr(text, "max_position_embeddings", None) or 8192,
        rms_norm_eps=getattr(text, "rms_norm_eps", None) or 1e-5,
        rope=rope,
        mla=_latent_sizes_of(text),
    )


def _latent_sizes_of(text: Any) -> MLAConfig | None:
    sizes: dict[str, Any] = {f.name: getattr(text, f.name, None) for f in fields(MLAConfig)}
    return MLAConfig(**sizes) if all(sizes[name] for name in sizes if name != "q_lora_rank") else None
