"""Loads GGUF files as decoders that compute with the file's own blocks (CPU), or converts them to Hugging Face folders."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fledge import sources
from fledge.checkpoints import hf
from fledge.checkpoints.gguf_config import LONGROPE, ROPE_FACTORS
from fledge.checkpoints.gguf_config import read_config as read_config
from fledge.checkpoints.gguf_file import GgufFile, GgufTensor, open_gguf
from fledge.checkpoints.gguf_tokenizer import write_tokenizer
from fledge.checkpoints.layouts import NORM, Layout
from fledge.config import ModelConfig
from fledge.kernels.formats.gguf_blocks import Blocks
from fledge.kernels.linear.packed import GgufEmbedding, GgufLinear
from fledge.models.decoder import Decoder
from fledge.models.layers import RMSNorm
from fledge.progress import track

MOST_PARAMETERS_IN_FLOAT32 = 1_000_000_000
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
# Names of one architecture, which add to `NAMES` or replace entries of it.
OWN_NAMES = {
    "gemma3": {
        "ffn_norm": "pre_feedforward_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "qwen3moe": {"ffn_gate_inp": "mlp.gate"},
}
# All experts are in one tensor: [experts, outputs, inputs].
EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")


def load_decoder(file: GgufFile) -> Decoder:
    """Loads a decoder for the CPU: linears and embedding keep the file's blocks, norms and biases are fp32. Needs C kernels."""
    config = read_config(file)
    tensors, layout = _tensors_by_hf_name(file, config), Layout(config)

    def blocks(name: str) -> Blocks:
        found = tensors[name].blocks
        return found.rows(_rotary_order(name, found.outputs, config)) if _is_permuted(file, name) else found

    def vector(name: str) -> Tensor:
        value = tensors[name].blocks.dequantised().flatten()
        return value[torch.from_numpy(_rotary_order(name, len(value), config))] if _is_permuted(file, name) else value

    decoder = hf.empty_decoder(config)
    for name, module in track(list(decoder.named_modules()), "loading weights", "modules"):
        weight = f"{name}.weight"
        if isinstance(module, nn.Linear):
            parts = layout.file_names("embed_tokens.weight" if name == "lm_head" and config.tie_embeddings else weight)
            bias = None if module.bias is None else torch.cat([vector(part) for part in layout.file_names(f"{name}.bias")])
            rows = [blocks(part) for part in parts]
            if (order := layout.head_order(weight)) is not None:
                (whole,) = rows
                rows, bias = [whole.rows(order.numpy())], None if bias is None else bias[order]
            replacement: nn.Module = GgufLinear(rows, bias)
        elif isinstance(module, nn.Embedding):
            replacement = GgufEmbedding(blocks(*layout.file_names(weight)))
        elif isinstance(module, RMSNorm):
            value = vector(*layout.file_names(weight))
            module.weight = nn.Parameter(value * config.query_scale if name.endswith("q_norm") else value, requires_grad=False)
            continue
        else:
            continue
        owner, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(owner), attribute, replacement)
    file.release()
    return hf.complete(decoder, torch.float32, "cpu")


def convert(path: str | Path, folder: str | Path) -> Path:
    """Converts a file to a Hugging Face folder with dequantised weights. Not atomic: pass a temporary folder and rename it."""
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
            if config.unit_norms and NORM.search(name):  # GGUF stores the full weight, Hugging Face the weight minus one
                value = value - 1
            yield name, value.to(dtype)

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(file.metadata, folder, str(path))
    # Without a version, transformers assumes a Mistral tokenizer with a wrong pattern, and warns.
    written = hf.config_to_hf(config) | {"transformers_version": version("transformers")}
    return hf.write_folder(folder, written, weights(), dtype)


def _tensors_by_hf_name(file: GgufFile, config: ModelConfig) -> dict[str, GgufTensor]:
    """The file's tensors under Hugging Face names. Missing, unexpected or wrongly shaped tensors are an error."""
    tensors: dict[str, GgufTensor] = {}
    for name, tensor in file.tensors.items():
        if name in (ROPE_FACTORS, *LONGROPE):
            continue
        if (match := EXPERTS.fullmatch(name)) is None or config.moe is None or len(tensor.shape) != 3:
            tensors[hf_name(name, file.metadata["general.architecture"])] = tensor
            continue
        outputs = tensor.shape[1]
        for expert in range(min(tensor.shape[0], config.moe.num_experts + 1)):  # one too many is reported as unexpected
            part = GgufTensor(tensor.shape[1:], tensor.blocks.rows(slice(expert * outputs, (expert + 1) * outputs)))
            tensors[f"model.layers.{match[1]}.mlp.experts.{expert}.{match[2]}_proj.weight"] = part
    hf.check_tensors({name: tensor.shape for name, tensor in tensors.items()}, hf.tensor_shapes(config), str(file.path))
    return tensors


def target_config(model: str) -> ModelConfig:
    """The configuration of a model, by any name that `find` accepts. Reads only the header of a GGUF file."""
    found = sources.find(model)
    return read_config(open_gguf(found)) if found.is_file() else hf.load_config(found)


def hf_name(name: str, arch: str = "llama") -> str:
    """The Hugging Face name of a GGUF tensor. Unknown names are returned unchanged; `check_tensors` then reports them."""
    match, names = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name), NAMES | OWN_NAMES.get(arch, {})
    if match is None or match[2] not in names:
        return name
    layer = f"model.layers.{match[1]}." if match[1] is not None else ""
    return f"{layer}{names[match[2]]}.{match[3]}"


def _is_permuted(file: GgufFile, name: str) -> bool:
    """Whether rows must be reordered: in llama files rotary pairs are adjacent, in the network half a head apart."""
    return file.metadata["general.architecture"] == "llama" and re.search(r"\.[qk]_proj\.", name) is not None


def _rotary_order(name: str, num_rows: int, config: ModelConfig) -> np.ndarray:
    """For each row of the network the row in the file."""
    num_heads = config.num_heads if ".q_proj." in name else config.num_kv_heads
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
