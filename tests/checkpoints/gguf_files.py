"""Small GGUF files for tests, written from a decoder the way llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from fledge.checkpoints.gguf import NAMES
from fledge.checkpoints.hf import file_names
from fledge.models.decoder import Decoder

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
TEMPLATE += "<|im_start|>assistant"
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def byte_level_vocabulary(merges: list[str]) -> tuple[list[str], list[int], list[str]]:
    """Three marks, a user-defined token, every byte, and what the merges make: tokens, their types, merges."""
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
    """`metadata` and `tensors`: more of them, or others in their place (None takes a key away). `others`: quantisation of
    tensors that have a part of their name."""
    config = decoder.config
    writer = gguf.GGUFWriter(path, arch)
    tokens, types, merges = byte_level_vocabulary(list(merges))
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config.vocab_size)]
    types += [UNUSED] * (len(tokens) - len(types))
    values: dict[str, Any] = {
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
    } | (metadata or {})
    for key, value in values.items():
        if value is not None:
            _add(writer, key, value)
    weights = gguf_weights(decoder, permute=arch == "llama") | (tensors or {})
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


def gguf_weights(decoder: Decoder, *, permute: bool) -> dict[str, np.ndarray]:
    config = decoder.config
    kv_rows = config.num_kv_heads * config.head_dim
    weights = {}
    for name, parameter in decoder.named_parameters():
        value = parameter.detach().numpy()
        if "qkv_proj" in name:
            rows = config.num_heads * config.head_dim
            parts = [value[:rows], value[rows : rows + kv_rows], value[rows + kv_rows :]]
            if permute:
                parts[0] = _permuted(parts[0], config.num_heads)
                parts[1] = _permuted(parts[1], config.num_kv_heads)
        elif "gate_up_proj" in name:
            parts = np.split(value, 2)
        else:
            parts = [value]
        for hf_name, part in zip(file_names(name), parts, strict=True):
            weights[_gguf_name(hf_name)] = np.ascontiguousarray(part)
    return weights


def _gguf_name(name: str) -> str:
    prefix = ""
    if name.startswith("model.layers."):
        _, _, layer, name = name.split(".", 3)
        prefix = f"blk.{layer}."
    stem, _, kind = name.rpartition(".")
    theirs = {ours: theirs for theirs, ours in NAMES.items()}
    return f"{prefix}{theirs[stem]}.{kind}"


def _permuted(value: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a head as llama.cpp's converter orders them for Llama: 0, half, 1, half + 1, …"""
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
