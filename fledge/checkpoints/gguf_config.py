"""Reads the model configuration from a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fledge.checkpoints.gguf_file import GgufFile, GgufTensor
from fledge.config import ModelConfig, MoEConfig, RopeConfig
from fledge.config_checks import shown, token_ids
from fledge.errors import ModelError
from fledge.models.layers import Rotary

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}
LARGEST_SIZE = 1 << 20  # largest size of a layer; products of three still fit 64 bits
ROPE_FACTORS = "rope_freqs.weight"
LONGROPE = ("rope_factors_short.weight", "rope_factors_long.weight")


def read_config(file: GgufFile) -> ModelConfig:
    try:
        return _read_config(file)
    except ModelError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # values of the wrong type
        raise ModelError(f"{file.path}: damaged or truncated GGUF ({error}); fetch it again") from None


def _read_config(file: GgufFile) -> ModelConfig:
    metadata, tensors, source = file.metadata, file.tensors, str(file.path)
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{source}: GGUF architecture {shown(arch)} is not supported; supported: {known}")
    if plain_number(metadata.get("split.count", 1), "split.count", source) > 1:
        raise ModelError(f"{source}: one part of a split GGUF; join the parts first (llama-gguf-split --merge)")
    if metadata.get(f"{arch}.expert_count") and arch != "qwen3moe":
        raise ModelError(f"{source}: experts ({arch}.expert_count) are supported in the architecture qwen3moe only")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{source}: {arch}.{key} is missing from the file")
        if isinstance(value, list):
            raise ModelError(f"{source}: {arch}.{key} differs by layer, which is not supported")
        return plain_number(value, f"{arch}.{key}", source)

    def size(key: str, default: Any = None) -> int:
        value = get(key, default)
        if not isinstance(value, int) or not 0 < value <= LARGEST_SIZE:
            raise ModelError(f"{source}: damaged or truncated GGUF ({arch}.{key} is {value!r}); fetch it again")
        return value

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{source}: token_embd.weight is missing from the file")
    num_layers, num_heads = size("block_count"), size("attention.head_count")
    if num_layers > len(tensors):
        raise ModelError(f"{source}: {arch}.block_count is {num_layers}, and the file has {len(tensors)} tensors")
    hidden_size = size("embedding_length")
    head_dim = size("attention.key_length", hidden_size // num_heads)
    rotated = size("rope.dimension_count", head_dim)
    if (rotated != head_dim and arch != "phi3") or size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{source}: partially rotated heads and different key and value sizes are not supported")
    window = int(get("attention.sliding_window", 0)) or None
    own: dict[str, Any] = {"windows": (window,) * num_layers}
    if arch == "gemma3":
        local = RopeConfig(float(get("rope.freq_base_swa", 10000.0)), original_max_positions=int(get("context_length")))
        local.check()
        own = _gemma3(num_layers, num_heads, hidden_size, head_dim, window, source) | {"local_rope": local}
    elif arch == "phi3":
        own |= {"fused_files": ("qkv_proj", "gate_up_proj"), "rotated": rotated}
    elif arch == "qwen3moe":
        own["moe"] = MoEConfig(
            size("expert_count"), size("expert_used_count"), size("expert_feed_forward_length"), layers=tuple(range(num_layers))
        )
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        # Mistral is Llama with a sliding window.
        architecture="MistralForCausalLM" if arch == "llama" and window else ARCHITECTURES[arch],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length", own["moe"].intermediate_size if "moe" in own else None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_positions=int(get("context_length")),
        # The file has a float32 of a value that was a short decimal: rounding gives that decimal back.
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        rope=read_rope(metadata, arch, rotated, tensors, source),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_embeddings="output.weight" not in tensors,
        **own,
        eos_token_ids=token_ids(list(dict.fromkeys(end for end in ends if end is not None)), "tokenizer.ggml.eos_token_id"),
        bos_token_id=next(iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")), None),
    )


def _gemma3(
    num_layers: int, num_heads: int, hidden_size: int, head_dim: int, window: int | None, source: str
) -> dict[str, Any]:
    """Gemma 3 fields that GGUF does not store, as in llama.cpp: every sixth layer has full attention; 27B (62 layers) scales
    scores by hidden size / heads, the others by head size."""
    if window is None:
        raise ModelError(f"{source}: gemma3.attention.sliding_window is missing from the file")
    return {
        "windows": tuple(None if (layer + 1) % 6 == 0 else window for layer in range(num_layers)),
        "query_scale": (head_dim * num_heads / hidden_size) ** 0.5 if num_layers == 62 else 1.0,
        "activation": "gelu_tanh",
        "sandwich_norms": True,
        "unit_norms": True,
        "embedding_scale": hidden_size**0.5,
    }


def plain_number(value: Any, key: str, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(f"{source}: {key} must be a number, not {shown(value)}")
    return value


def read_rope(
    metadata: Mapping[str, Any], arch: str, head_dim: int, tensors: Mapping[str, GgufTensor], source: str
) -> RopeConfig:
    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.rope.{key}", default)
        return value if value is None or key == "scaling.type" else plain_number(value, f"{arch}.rope.{key}", source)

    theta, context = float(get("freq_base", 10000.0)), int(metadata[f"{arch}.context_length"])
    RopeConfig(theta, original_max_positions=context).check()
    found = {name: tensors[name].blocks.dequantised().flatten() for name in (ROPE_FACTORS, *LONGROPE) if name in tensors}
    if arch == "phi3" and found.keys() >= set(LONGROPE):
        short, long = (tuple(found[name].tolist()) for name in LONGROPE)
        if {len(short), len(long)} != {head_dim // 2}:
            raise ModelError(
                f"{source}: {' and '.join(LONGROPE)} must have {head_dim // 2} factors for {head_dim} rotated numbers"
            )
        original = int(get("scaling.original_context_length", context))
        factor, magnitude = context / original, float(get("scaling.attn_factor", 1.0))
        rope = RopeConfig(theta, "longrope", factor, original, attention_factor=magnitude, short_factor=short, long_factor=long)
        rope.check()
        return rope
    if ROPE_FACTORS in found:
        return _llama3_rope(theta, context, head_dim, found[ROPE_FACTORS], source)
    kind = get("scaling.type", "none")
    if kind == "none":
        if factor := get("scale_linear"):  # the key in files older than `scaling.type`
            return RopeConfig(theta, "linear", float(factor), context)
        return RopeConfig(theta, original_max_positions=context)
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; supported: none, linear, yarn, llama3")
    factor, magnitude = float(get("scaling.factor", 1.0)), get("scaling.attn_factor", get("scaling.yarn_attn_factor"))
    rope = RopeConfig(
        theta,
        kind,
        factor,
        original_max_positions=int(get("scaling.original_context_length", context)),
        beta_fast=float(get("scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("scaling.yarn_beta_slow", 1.0)),
        # GGUF's attention factor multiplies YaRN's own; Hugging Face's replaces it.
        attention_factor=float(magnitude * (0.1 * np.log(factor) + 1.0)) if magnitude not in (None, 1.0) else None,
    )
    rope.check()
    return rope


def _llama3_rope(theta: float, context: int, head_dim: int, factors: Tensor, source: str) -> RopeConfig:
    """Finds the Llama 3 scaling that gives the file's divisors: GGUF stores a divisor per frequency, not the parameters."""
    plain = RopeConfig(theta, original_max_positions=context)
    if len(factors) != head_dim // 2:
        raise ModelError(f"{source}: {ROPE_FACTORS} has {len(factors)} factors for heads of {head_dim}")
    if torch.equal(factors, torch.ones_like(factors)):
        return plain
    rope = RopeConfig(theta, "llama3", float(factors.max()), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    wanted = Rotary(head_dim, context, plain).inverse_frequencies / factors
    if not torch.allclose(Rotary(head_dim, context, rope).inverse_frequencies, wanted, rtol=1e-4, atol=0):
        raise ModelError(f"{source}: {ROPE_FACTORS} do not match Llama 3 scaling; no other factors are supported")
    return rope
