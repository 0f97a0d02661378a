"""Small GGUF files for tests, written from a decoder in the layout of llama.cpp's converter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from fledge.checkpoints.gguf import NAMES, OWN_NAMES
from fledge.checkpoints.layouts import Layout
from fledge.config import ModelConfig, MoEConfig, RopeConfig
from fledge.models.decoder import Decoder

# Per GGUF architecture: the model class, and settings that the file omits or cannot express for a tiny model.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3moe": ("Qwen3MoeForCausalLM", {"moe": MoEConfig(8, 3, 32, layers=(0, 1, 2, 3))}),
    "gemma3": ("Gemma3ForCausalLM", {
        "num_layers": 7, "windows": (8,) * 5 + (None, 8), "query_scale": 1.0,
        "local_rope": RopeConfig(original_max_positions=512),
    }),
    "phi3": ("Phi3ForCausalLM", {"rope": RopeConfig(1e4, original_max_positions=512)}),
    "phi3-longrope": ("Phi3ForCausalLM", {
        "rope": RopeConfig(1e4, "longrope", 8.0, 64, attention_factor=1.25, short_factor=(1.0, 2.0, 3.0),
                           long_factor=(2.0, 4.0, 6.0)),
    }),
}  # fmt: skip
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "<|im_start|>assistant"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def byte_level_vocabulary(merges: list[str]) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: three special tokens, a user-defined token, all bytes and the merged tokens."""
    marks = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*marks, "<think>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [CONTROL] * len(marks) + [USER_DEFINED] + [NORMAL] * (len(tokens) - len(marks) - 1)
    return tokens, types, merges


def write_gguf(
    path: Path,
    decoder: Decoder,
    arch: str,
    quantisation: str = "F32",
    *,
    others: dict[str, str] | None = None,
    metadata: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
    pre: str | None = "smollm",
    merges: tuple[str, ...] = ("h e", "l l", "he ll", "1 2", "Ġ 1"),
) -> Path:
    """Writes a GGUF file. `metadata`, `tensors`: added or replaced entries (metadata None: removed). `others`: quantisation by
    a part of the tensor's name."""
    config = decoder.config
    writer = gguf.GGUFWriter(path, arch)
    tokens, types, merges = byte_level_vocabulary(list(merges))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config.vocab_size)]
    types += [UNUSED] * (len(tokens) - len(types))
    values: dict[str, Any] = (
        {
            f"{arch}.block_count": config.num_layers,
            f"{arch}.context_length": config.max_positions,
            f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.feed_forward_length": config.intermediate_size,
            f"{arch}.attention.head_count": config.num_heads,
            f"{arch}.attention.head_count_kv": config.num_kv_heads,
            f"{arch}.attention.key_length": config.head_dim,
            f"{arch}.attention.value_length": config.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{arch}.rope.freq_base": config.rope.theta,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }
        | own_metadata(config, arch)
        | (metadata or {})
    )
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    weights = gguf_weights(decoder, arch) | (tensors or {})
    if config.rope.kind == "longrope":
        weights["rope_factors_short.weight"] = np.array(config.rope.short_factor)
        weights["rope_factors_long.weight"] = np.array(config.rope.long_factor)
    for name, value in weights.items():
        its = next((other for part, other in (others or {}).items() if part in name), quantisation)
        kind = gguf.GGMLQuantizationType[its]
        plain = value.ndim == 1 or its == "F32"
        if plain:
            writer.add_tensor(name, value.astype(np.float32))
        else:
            writer.add_tensor(name, gguf.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_weights(decoder: Decoder, arch: str) -> dict[str, np.ndarray]:
    config, layout = decoder.config, Layout(decoder.config)
    weights, experts = {}, {}
    for name, parameter in decoder.named_parameters():
        for hf_name, part in zip(layout.file_names(name), layout.split(name, parameter.detach()), strict=True):
            value = part.numpy()
            if config.unit_norms and hf_name.endswith("norm.weight"):
                value = value + 1  # the converter adds it
            if arch == "llama" and ".q_proj." in hf_name:
                value = _permuted(value, config.num_heads)
            if arch == "llama" and ".k_proj." in hf_name:
                value = _permuted(value, config.num_kv_heads)
            if ".experts." in hf_name:
                _, _, layer, _, _, _, kind, _ = hf_name.split(".")
                experts.setdefault(f"blk.{layer}.ffn_{kind.removesuffix('_proj')}_exps.weight", []).append(value)
            else:
                weights[_gguf_name(hf_name, arch)] = np.ascontiguousarray(value)
    return weights | {name: np.stack(values) for name, values in experts.items()}


def own_metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    """Metadata that the converter writes only for this architecture."""
    if arch == "gemma3":
        window = next(window for window in config.windows if window)
        scaling = {"rope.scaling.type": "linear", "rope.scaling.factor": config.rope.factor}
        values = {"attention.sliding_window": window, **(scaling if config.rope.kind == "linear" else {})}
    elif arch == "phi3":
        values = {"rope.dimension_count": config.rotary_dim}
        if config.rope.kind == "longrope":
            values["rope.scaling.original_context_length"] = config.rope.original_max_positions
            values["rope.scaling.attn_factor"] = config.rope.attention_factor
    elif config.moe is not None:
        moe = config.moe
        values = {"expert_count": moe.num_experts, "expert_used_count": moe.experts_per_token}
        values["expert_feed_forward_length"] = moe.intermediate_size
    else:
        return {}
    return {f"{arch}.{key}": value for key, value in values.items()}


def _gguf_name(name: str, arch: str) -> str:
    prefix = ""
    if name.startswith("model.layers."):
        _, _, layer, name = name.split(".", 3)
        prefix = f"blk.{layer}."
    stem, _, kind = name.rpartition(".")
    theirs = {ours: theirs for theirs, ours in (NAMES | OWN_NAMES.get(arch, {})).items()}
    return f"{prefix}{theirs[stem]}.{kind}"


def _permuted(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorders the rows of each head as llama.cpp's converter does for Llama: 0, half, 1, half + 1, …"""
    heads = value.reshape(num_heads, 2, value.shape[0] // num_heads // 2, *value.shape[1:])
    return heads.swapaxes(1, 2).reshape(value.shape)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
