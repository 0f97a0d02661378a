"""GGUF files -> Hugging Face folders: weights dequantised once, configuration and tokenizer from the file alone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from fledge.checkpoints import hf
from fledge.checkpoints.gguf_header import check_header
from fledge.checkpoints.gguf_tokenizer import check_tokenizer, write_tokenizer
from fledge.config import ModelConfig, RopeConfig
from fledge.config_checks import LARGEST, shown, token_ids
from fledge.errors import ModelError
from fledge.models.layers import Rotary

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
QUANTISATIONS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
MOST_PARAMETERS_IN_FLOAT32 = 1_000_000_000
ROPE_FACTORS = "rope_freqs.weight"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(file: str | Path, folder: str | Path) -> Path:
    """Writes `folder` from `file`. Not atomic: give a temporary folder and move it when this returns."""
    file, folder = Path(file), Path(folder)
    metadata, tensors = _open(file)
    config = read_config(metadata, tensors, str(file))
    check_tokenizer(metadata, str(file))
    if strange := sorted({tensor.tensor_type.name for tensor in tensors.values()} - set(QUANTISATIONS)):
        known = ", ".join(QUANTISATIONS)
        raise ModelError(f"{file}: quantisation {', '.join(strange)} is not supported; supported: {known}")
    by_hf_name = {hf_name(name): tensor for name, tensor in tensors.items() if name != ROPE_FACTORS}
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in by_hf_name.items()}
    hf.check_tensors(shapes, hf.tensor_shapes(config), str(file))

    num_parameters = sum(int(tensor.n_elements) for tensor in tensors.values())
    dtype = torch.float32 if num_parameters <= MOST_PARAMETERS_IN_FLOAT32 else torch.float16
    permuted = metadata["general.architecture"] == "llama"

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in by_hf_name.items():
            value = dequantise(tensor)
            if permuted and (match := re.search(r"\.([qk])_proj\.", name)):
                value = unpermute(value, config.num_heads if match[1] == "q" else config.num_kv_heads)
            yield name, value.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(metadata, folder, str(file))
    return hf.write_folder(folder, hf.config_to_hf(config), weights(), dtype)


def read_config(metadata: dict[str, Any], tensors: dict[str, Any], source: str) -> ModelConfig:
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{source}: GGUF architecture {arch!r} is not supported; supported: {known}")
    if plain_number(metadata.get("split.count", 1), "split.count", source) > 1:
        raise ModelError(f"{source}: one part of a split GGUF; join the parts first (llama-gguf-split --merge)")
    if metadata.get(f"{arch}.expert_count"):
        raise ModelError(f"{source}: mixture-of-experts models are not supported")

    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.{key}", default)
        if value is None:
            raise ModelError(f"{source}: {arch}.{key} is missing from the file")
        if isinstance(value, list):
            raise ModelError(f"{source}: {arch}.{key} differs by layer, which is not supported")
        return plain_number(value, f"{arch}.{key}", source)

    if "token_embd.weight" not in tensors:
        raise ModelError(f"{source}: token_embd.weight is missing from the file")
    vocab_size = int(tensors["token_embd.weight"].shape[-1])
    num_layers, num_heads = int(get("block_count")), int(get("attention.head_count"))
    hidden_size = int(get("embedding_length"))
    if num_heads < 1 or not 1 <= num_layers <= LARGEST["num_layers"]:  # before anything is as long as they say
        raise ModelError(f"{source}: {num_layers} layers of {num_heads} heads are not a model")
    head_dim = int(get("attention.key_length", hidden_size // num_heads))
    rotated = int(get("rope.dimension_count", head_dim))
    if rotated != head_dim or int(get("attention.value_length", head_dim)) != head_dim:
        raise ModelError(f"{source}: heads that are rotated in part or of unequal key and value size are not supported")
    window = int(get("attention.sliding_window", 0)) or None
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        # A window sets Mistral apart from Llama; otherwise they are the same network.
        architecture="MistralForCausalLM" if arch == "llama" and window else ARCHITECTURES[arch],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=int(get("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(get("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        max_positions=int(get("context_length")),
        # The file holds a float32 of what was written as a short decimal.
        rms_norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        rope=read_rope(metadata, arch, head_dim, tensors.get(ROPE_FACTORS), source),
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_down.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        tie_embeddings="output.weight" not in tensors,
        windows=(window,) * num_layers,
        eos_token_ids=token_ids(list(dict.fromkeys(end for end in ends if end is not None)), "tokenizer.ggml.eos_token_id"),
        bos_token_id=next(iter(token_ids(metadata.get("tokenizer.ggml.bos_token_id"), "tokenizer.ggml.bos_token_id")), None),
    )


def plain_number(value: Any, key: str, source: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(f"{source}: {key} must be a number, not {shown(value)}")
    return value


def read_rope(metadata: dict[str, Any], arch: str, head_dim: int, factors: Any, source: str) -> RopeConfig:
    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.rope.{key}", default)
        return value if value is None or key == "scaling.type" else plain_number(value, f"{arch}.rope.{key}", source)

    theta, context = float(get("freq_base", 10000.0)), int(metadata[f"{arch}.context_length"])
    RopeConfig(theta, original_max_positions=context).check()
    if factors is not None:
        return _llama3_rope(theta, context, head_dim, dequantise(factors), source)
    kind = get("scaling.type", "none")
    if kind == "none":
        if factor := get("scale_linear"):  # the key before there were kinds
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
    """The file has a divisor per frequency, not the rule it came from: take the published rule that gives them."""
    plain = RopeConfig(theta, original_max_positions=context)
    if torch.equal(factors, torch.ones_like(factors)):
        return plain
    rope = RopeConfig(theta, "llama3", float(factors.max()), 8192, low_freq_factor=1.0, high_freq_factor=4.0)
    wanted = Rotary(head_dim, context, plain).inverse_frequencies / factors
    if not torch.allclose(Rotary(head_dim, context, rope).inverse_frequencies, wanted, rtol=1e-4, atol=0):
        raise ModelError(f"{source}: its {ROPE_FACTORS} are not those of Llama 3 scaling, which alone is supported")
    return rope


def hf_name(name: str) -> str:
    """Names that are not known pass as they are; the check against the configuration then lists them."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in NAMES:
        return name
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{NAMES[match[2]]}.{match[3]}"


def dequantise(tensor: gguf.ReaderTensor) -> Tensor:
    values = gguf.dequantize(tensor.data, tensor.tensor_type)
    shape = tuple(int(size) for size in reversed(tensor.shape))
    return torch.from_numpy(np.array(values, dtype=np.float32).reshape(shape))


def unpermute(value: Tensor, num_heads: int) -> Tensor:
    """Of llama files alone: their rotary pairs lie side by side in a head; ours are half a head apart."""
    rows = value.unflatten(0, (num_heads, -1, 2))
    return rows.transpose(1, 2).flatten(0, 2).contiguous()


def _open(file: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """Key-value pairs and tensors (mapped, not read) of the file."""
    with file.open("rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise ModelError(f"{file}: not a GGUF file (it begins with {magic!r})")
    try:
        check_header(file)
        reader = gguf.GGUFReader(file)
        metadata = {key: field.contents() for key, field in reader.fields.items()}
        return metadata, {tensor.name: tensor for tensor in reader.tensors}
    except ModelError:
        raise
    except Exception as error:  # the reader trusts the file: whatever it stumbles over, the file is damaged
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file}: damaged or truncated GGUF ({reason}); fetch it again") from None
