"""Hugging Face folders <-> decoders. The network fuses q, k, v and gate, up; the files keep them apart.

Strict both ways: a tensor that is missing, left over or of another shape is an error that names it.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.checkpoints.tensors import ShapesOnly, TensorReader, listed, read_json, write_tensors
from fledge.config import ModelConfig
from fledge.config_checks import token_ids
from fledge.errors import ModelError
from fledge.files import write_json
from fledge.models.decoder import Decoder
from fledge.models.layers import Rotary

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# Buffers that old exporters wrote beside the weights; they are computed, not learned.
HARMLESS = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")
MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def load_config(folder: str | Path) -> ModelConfig:
    """Generation may end at more tokens than config.json says: those of generation_config.json are added."""
    folder = Path(folder)
    config = ModelConfig.from_hf(read_json(folder / "config.json"), name=str(folder))
    if not (folder / "generation_config.json").exists():
        return config
    more = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *more])))


def load_decoder(folder: str | Path, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu") -> Decoder:
    """The network takes the tensors as they are read: no second copy, no initialisation."""
    folder, config = Path(folder), load_config(folder)
    with TensorReader(folder) as reader:
        if "lm_head.weight" not in reader.shapes:
            config = dataclasses.replace(config, tie_embeddings=True)
        check_tensors(reader.shapes, tensor_shapes(config), str(folder))
        decoder = empty_decoder(config)
        for name, _ in list(decoder.named_parameters()):
            parts = [reader.read(part).to(device=device, dtype=dtype) for part in file_names(name)]
            value = parts[0] if len(parts) == 1 else torch.cat(parts)
            owner, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(owner), attribute, nn.Parameter(value.contiguous(), requires_grad=False))
    if config.tie_embeddings:
        decoder.lm_head.weight = decoder.embed_tokens.weight
    # Computed, not loaded, so it must not stay on the meta device.
    decoder.rotary = Rotary(config.head_dim, config.max_positions, config.rope).to(device)
    return decoder.eval()


def empty_decoder(config: ModelConfig) -> Decoder:
    """Of shapes alone, to be filled."""
    with ShapesOnly():
        return Decoder(config)


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Writes a folder that transformers, vLLM and `load_decoder` read. `dtype` None: as the network has it."""
    dtype = dtype or decoder.norm.weight.dtype

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in decoder.named_parameters():  # a tied head is named once, as the embedding
            value = parameter.detach().to(device="cpu", dtype=dtype)
            yield from zip(file_names(name), _split_rows(name, value, decoder.config), strict=True)

    return write_folder(folder, config_to_hf(decoder.config), tensors(), dtype, tokenizer_from=tokenizer_from)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """config.json goes last: a folder that has one is complete."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder, tensors)
    if tokenizer_from is not None:
        for file in TOKENIZER_FILES:
            if (Path(tokenizer_from) / file).exists():
                shutil.copy2(Path(tokenizer_from) / file, folder / file)
    generation = {key: config[key] for key in ("bos_token_id", "eos_token_id") if config.get(key) is not None}
    write_json(folder / "generation_config.json", generation, indent=2)
    write_json(folder / "config.json", {**config, "dtype": str(dtype).removeprefix("torch.")}, indent=2)
    return folder


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `ModelConfig.from_hf`, in the spelling that every version of transformers and vLLM reads."""
    rope, windows = config.rope, config.windows
    hf: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": MODEL_TYPES[config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": None,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if rope.kind != "default":
        keys = {
            "llama3": ("low_freq_factor", "high_freq_factor"),
            "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
        }.get(rope.kind, ())
        values = {key: getattr(rope, key) for key in keys if getattr(rope, key) is not None}
        original = rope.original_max_positions or config.max_positions
        hf["rope_scaling"] = {
            "rope_type": rope.kind,
            "factor": rope.factor,
            "original_max_position_embeddings": original,
            **values,
        }
    if config.architecture == "MistralForCausalLM":
        hf["sliding_window"] = windows[0] if windows else None  # absent would mean 4096 to transformers
    elif config.architecture != "LlamaForCausalLM":
        window = next((window for window in windows if window), None)
        hf["use_sliding_window"], hf["sliding_window"] = window is not None, window
        if window is not None:
            hf["layer_types"] = ["sliding_attention" if w else "full_attention" for w in windows]
            hf["max_window_layers"] = windows.index(window)
    return hf


def file_names(parameter: str) -> list[str]:
    """The tensors in the file that make up one parameter of the network."""
    prefix = "" if parameter.startswith("lm_head.") else "model."
    for fused, parts in FUSED.items():
        if f".{fused}." in parameter:
            return [prefix + parameter.replace(fused, part) for part in parts]
    return [prefix + parameter]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this configuration holds."""
    decoder = empty_decoder(config)
    return {
        part: tuple(rows.shape)
        for name, parameter in decoder.named_parameters()
        for part, rows in zip(file_names(name), _split_rows(name, parameter, config), strict=True)
    }


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises one error that lists missing, unexpected and mis-shaped tensors."""
    # A tied model's file may repeat the head, which is then the embedding.
    ignored = {name for name in found if HARMLESS.search(name)} | {"lm_head.weight"}
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"missing: {listed(missing)}")
    if extra := [name for name in found if name not in expected and name not in ignored]:
        problems.append(f"not expected: {listed(extra)}")
    if wrong := [
        f"{name} is {list(found[name])}, the configuration says {list(shape)}"
        for name, shape in expected.items()
        if name in found and tuple(found[name]) != shape
    ]:
        problems.append(f"wrong shape: {listed(wrong)}")
    if problems:
        raise ModelError(f"{source}: the weights do not fit config.json; " + "; ".join(problems))


def _split_rows(name: str, value: Tensor, config: ModelConfig) -> Sequence[Tensor]:
    if ".qkv_proj." in name:
        kv_rows = config.num_kv_heads * config.head_dim
        return value.split([config.num_heads * config.head_dim, kv_rows, kv_rows])
    return value.chunk(2) if ".gate_up_proj." in name else [value]
