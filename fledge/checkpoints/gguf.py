"""GGUF files -> decoders that compute with the file's own blocks (CPU), or Hugging Face folders with dequantised weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fledge import sources
from fledge.checkpoints import hf
from fledge.checkpoints.gguf_file import GgufFile, GgufTensor, open_gguf
from fledge.checkpoints.gguf_tokenizer import write_tokenizer
from fledge.config import ModelConfig, RopeConfig
from fledge.config_checks import shown, token_ids
from fledge.errors import ModelError
from fledge.kernels.formats.gguf_blocks import Blocks
from fledge.kernels.linear.packed import GgufEmbedding, GgufLinear
from fledge.models.decoder import Decoder
from fledge.models.layers import RMSNorm, Rotary
from fledge.progress import track

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
MOST_PARAMETERS_IN_FLOAT32 = 1_000_000_000
LARGEST_SIZE = 1 << 20  # of a layer: products of three still fit 64 bits
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


def load_decoder(file: GgufFile) -> Decoder:
    """For the CPU: linears and embedding as the file has them, norms and biases in fp32. Needs the C kernels."""
    config = read_config(file)
    tensors = _tensors_by_hf_name(file, config)

    def blocks(name: str) -> Blocks:
        found = tensors[name].blocks
        return found.rows(_rotary_order(name, found.outputs, config)) if _is_permuted(file, name) else found

    def vector(name: str) -> Tensor:
        value = tensors[name].blocks.dequantised().flatten()
        return value[torch.from_numpy(_rotary_order(name, len(value), config))] if _is_permuted(file, name) else value

    decoder = hf.empty_decoder(config)
    for name, module in track(list(decoder.named_modules()), "loading weights", "modules"):
        if isinstance(module, nn.Linear):
            parts = hf.file_names(f"{name}.weight")
            if name == "lm_head" and config.tie_embeddings:
                parts = hf.file_names("embed_tokens.weight")
            biases = hf.file_names(f"{name}.bias")
            bias = None if module.bias is None else torch.cat([vector(part) for part in biases])
            replacement: nn.Module = GgufLinear([blocks(part) for part in parts], bias)
        elif isinstance(module, nn.Embedding):
            replacement = GgufEmbedding(blocks(*hf.file_names(f"{name}.weight")))
        elif isinstance(module, RMSNorm):
            (part,) = hf.file_names(f"{name}.weight")
            module.weight = nn.Parameter(vector(part), requires_grad=False)
            continue
        else:
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(owner), attribute, replacement)
    decoder.set_rotary()
    file.release()
    return decoder.eval()


def convert(path: str | Path, folder: str | Path) -> Path:
    """Writes `folder` from a file. Not atomic: give a temporary folder and move it when this returns."""
    file, folder = GgufFile(path), Path(folder)
    config = read_config(file)
    tensors = _tensors_by_hf_name(file, config)
    num_parameters = sum(tensor.blocks.outputs * tensor.blocks.inputs for tensor in tensors.values())
    dtype = torch.float32 if num_parameters <= MOST_PARAMETERS_IN_FLOAT32 else torch.float16

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in track(tensors.items(), f"converting {file.path.name} (once)", "tensors"):
            value = tensor.blocks.dequantised().view(tensor.shape)
            if _is_permuted(file, name):
                value = value[torch.from_numpy(_rotary_order(name, len(value), config))]
            yield name, value.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file.metadata, folder, str(path))
    # Without a version transformers takes any tokenizer for one of Mistral's with a wrong pattern, and warns of it.
    written = hf.config_to_hf(config) | {"transformers_version": version("transformers")}
    return hf.write_folder(folder, written, weights(), dtype)


def _tensors_by_hf_name(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """Strict: what is missing, left over or of another shape is an error that names it."""
    tensors = {hf_name(name): tensor for name, tensor in file.tensors.items() if name != ROPE_FACTORS}
    hf.check_tensors({name: tensor.shape for name, tensor in tensors.items()}, hf.tensor_shapes(config), str(file.path))
    return tensors


def target_config(model: str) -> ModelConfig:
    """The configuration of any model that can be named. Of a GGUF file the header is read, and nothing is converted."""
    found = sources.find(model)
    return read_config(open_gguf(found)) if found.is_file() else hf.load_config(found)


def read_config(file: GgufFile) -> ModelConfig:
    try:
        return _read_config(file)
    except ModelError:
        raise
    except (ArithmeticError, TypeError, ValueError) as error:  # texts where numbers belong, and the like
        raise ModelError(f"{file.path}: damaged or truncated GGUF ({error}); fetch it again") from None


def _read_config(file: GgufFile) -> ModelConfig:
    metadata, tensors, source = file.metadata, file.tensors, str(file.path)
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"{source}: GGUF architecture {shown(arch)} is not supported; supported: {known}")
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
    if size("rope.dimension_count", head_dim) != head_dim or size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{source}: heads that are rotated in part or of unequal key and value size are not supported")
    window = int(get("attention.sliding_window", 0)) or None
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return ModelConfig(
        # A window sets Mistral apart from Llama; otherwise they are the same network.
        architecture="MistralForCausalLM" if arch == "llama" and window else ARCHITECTURES[arch],
        vocab_size=tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=size("attention.head_count_kv", num_heads),
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


def read_rope(metadata: dict[str, Any], arch: str, head_dim: int, factors: GgufTensor | None, source: str) -> RopeConfig:
    def get(key: str, default: Any = None) -> Any:
        value = metadata.get(f"{arch}.rope.{key}", default)
        return value if value is None or key == "scaling.type" else plain_number(value, f"{arch}.rope.{key}", source)

    theta, context = float(get("freq_base", 10000.0)), int(metadata[f"{arch}.context_length"])
    RopeConfig(theta, original_max_positions=context).check()
    if factors is not None:
        return _llama3_rope(theta, context, head_dim, factors.blocks.dequantised().flatten(), source)
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
    if len(factors) != head_dim // 2:
        raise ModelError(f"{source}: {ROPE_FACTORS} has {len(factors)} factors for heads of {head_dim}")
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


def _is_permuted(file: GgufFile, name: str) -> bool:
    """Of llama files alone: their rotary pairs lie side by side in a head; ours are half a head apart."""
    return file.metadata["general.architecture"] == "llama" and re.search(r"\.[qk]_proj\.", name) is not None


def _rotary_order(name: str, num_rows: int, config: ModelConfig) -> np.ndarray:
    """The file's row for each of ours."""
    num_heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
