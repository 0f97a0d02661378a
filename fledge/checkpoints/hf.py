"""Loads decoders from Hugging Face folders and saves them. Differences between files and network are in `layouts`.

Strict in both directions: a missing, unexpected or wrongly shaped tensor is an error that names it.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.checkpoints.layouts import Layout
from fledge.checkpoints.quantization_config import Scheme, read_scheme
from fledge.checkpoints.quantized import PackedLinears, PackedTensors, may_keep
from fledge.checkpoints.tensors import ShapesOnly, TensorReader, listed, read_json, write_tensors
from fledge.config import ModelConfig, text_part
from fledge.config_checks import mapping, token_ids
from fledge.errors import ModelError
from fledge.families import FAMILIES
from fledge.files import write_json
from fledge.models.decoder import Decoder
from fledge.models.layers import ExactNorm
from fledge.progress import track

log = logging.getLogger("fledge.checkpoints")
# Computed buffers that old exporters wrote with the weights; they are not needed.
HARMLESS = re.compile(r"\.(rotary_emb\.(inv_freq|cos_cached|sin_cached)|masked_bias)$")
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def load_config(folder: str | Path) -> ModelConfig:
    """The configuration of a folder. End tokens of generation_config.json are added to those of config.json."""
    folder = Path(folder)
    config = ModelConfig.from_hf(read_json(folder / "config.json"), name=str(folder))
    if not (folder / "generation_config.json").exists():
        return config
    more = token_ids(read_json(folder / "generation_config.json").get("eos_token_id"))
    return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys([*config.eos_token_ids, *more])))


def load_decoder(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    *,
    keep: Collection[str] = (),
    place: Callable[[str, nn.Module], nn.Module] | None = None,
) -> Decoder:
    """Loads a decoder. Its parameters are the tensors that were read: no second copy, no initialisation.

    `keep`: formats of quantised linears that stay quantised (`quantized.KEPT`); others become plain weights.

    `place`: called with the name and module of each linear as soon as it is read; returns the module to use in its place. The
    next linear can then use the memory that it freed.
    """
    folder, config = Path(folder), load_config(folder)
    scheme = load_scheme(folder)
    with TensorReader(folder, text_name) as reader:
        packed = None if scheme is None else PackedTensors(reader, scheme)
        config = _with_head(config, reader, packed)
        expected, found = tensor_shapes(config), reader.shapes
        if packed is not None:
            expected = packed.expected(expected)
            found = {name: shape for name, shape in found.items() if name in expected or not packed.ignored(name)}
        check_tensors(found, expected, str(folder))
        decoder, layout, shapes = empty_decoder(config), Layout(config), tensor_shapes(config)
        linears = PackedLinears(decoder, keep, dtype, device)

        def read(name: str) -> None:
            names = layout.file_names(name)
            if packed is not None and all(packed.has(part) for part in names):
                linears.add(name, [packed.read(part, shapes[part]) for part in names], layout.head_order(name))
                return
            kept = torch.float32 if layout.is_exact(name) else dtype
            parts = [
                packed.read(part, shapes[part]).dequantize(kept).to(device)
                if packed is not None and packed.has(part)
                else reader.read(part).to(device=device, dtype=kept)
                for part in names
            ]
            value = layout.join(name, parts)
            owner, _, attribute = name.rpartition(".")
            setattr(decoder.get_submodule(owner), attribute, nn.Parameter(value.contiguous(), requires_grad=False))

        # Modules with their own parameters; not a tied head, whose weight is the embedding's.
        sizes = {name: parameter.numel() * dtype.itemsize for name, parameter in decoder.named_parameters()}
        owners: dict[str, list[str]] = {}
        for name in sizes:
            owners.setdefault(name.rpartition(".")[0], []).append(name)
        for owner in track(owners, "loading weights", "bytes", lambda owner: sum(sizes[name] for name in owners[owner])):
            for name in owners[owner]:
                read(name)
            parent, _, attribute = owner.rpartition(".")
            linear = decoder.get_submodule(owner)
            if isinstance(linear, nn.Linear):
                finished = linears.finished(owner, linear)
                setattr(decoder.get_submodule(parent), attribute, finished if place is None else place(owner, finished))
    if scheme is not None:
        log.info("%s: %s; %s", folder, scheme.description, linears.summary())
    return complete(decoder, dtype, device)


def kept_bits(
    folder: str | Path, config: ModelConfig, keep: Collection[str], device: str | torch.device
) -> dict[str, float] | None:
    """Bits per weight of the linears that `load_decoder` would keep quantised, from names and shapes of the file's tensors;
    None: the checkpoint is plain. Linears that turn out to have no exact form will take more."""
    if (scheme := load_scheme(folder)) is None:
        return None
    with TensorReader(Path(folder), text_name) as reader:
        packed, layout, found = PackedTensors(reader, scheme), Layout(config), {}
        for name, module in empty_decoder(config).named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if may_keep(name, scheme.format, keep, torch.device(device), has_order=scheme.act_order):
                parts = layout.file_names(f"{name}.weight")
                if all(map(packed.has, parts)):
                    found[name] = packed.bits(parts[0], module.in_features)
        return found


def _with_head(config: ModelConfig, reader: TensorReader, packed: PackedTensors | None) -> ModelConfig:
    """The configuration with `tie_embeddings` as in the file's tensors; refused if config.json contradicts them."""
    head, embedding, folder = "lm_head.weight", "model.embed_tokens.weight", reader.folder
    if packed is not None and packed.has(head):  # a quantised head cannot be the embedding
        return dataclasses.replace(config, tie_embeddings=False)
    if head not in reader.shapes:
        whole = read_json(folder / "config.json")
        # In a vision-language model, transformers 5 reads the outer flag, and other versions that of `text_config`.
        said = [part.get("tie_word_embeddings") for part in (whole, mapping(whole, "text_config"))]
        if False in said and True not in said:
            raise ModelError(f"{folder}: {head} is missing, and tie_word_embeddings is false; fetch the model again")
        return dataclasses.replace(config, tie_embeddings=True)
    if config.tie_embeddings and embedding in reader.shapes and not torch.equal(reader.read(head), reader.read(embedding)):
        raise ModelError(
            f"{folder}: tie_word_embeddings is true, but {head} is not the embedding; set it to false in config.json to use "
            "that head, or remove the head from the file"
        )
    return config


def load_scheme(folder: str | Path) -> Scheme | None:
    """How a folder's weights are quantised; None: they are plain."""
    folder = Path(folder)
    config, apart = text_part(read_json(folder / "config.json")), folder / "hf_quant_config.json"
    if not config.get("quantization_config") and apart.exists():  # modelopt writes this file
        config["quantization_config"] = {"quant_method": "modelopt", **mapping(read_json(apart), "quantization")}
    try:
        return read_scheme(config)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from None


def complete(decoder: Decoder, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """Finishes a loaded decoder: ties the head and computes the buffers that are still on the meta device."""
    if decoder.config.tie_embeddings and isinstance(decoder.lm_head, nn.Linear):
        decoder.lm_head.weight = decoder.embed_tokens.weight
    for module in decoder.modules():
        if isinstance(module, ExactNorm):
            module.like = torch.empty(0, dtype=dtype, device=device)
    decoder.set_rotary(device=device)
    return decoder.eval()


def empty_decoder(config: ModelConfig) -> Decoder:
    """A decoder whose parameters have shapes but no memory, to be filled."""
    with ShapesOnly():
        return Decoder(config)


def save_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Writes a folder that transformers, vLLM and `load_decoder` read. `dtype` None: the network's."""
    dtype, layout = dtype or decoder.dtype, Layout(decoder.config)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in decoder.named_parameters():  # a tied head is named once, as the embedding
            parts = layout.split(name, parameter.detach().cpu())
            yield from ((file, part.to(dtype)) for file, part in zip(layout.file_names(name), parts, strict=True))

    return write_folder(folder, config_to_hf(decoder.config), tensors(), dtype, tokenizer_from=tokenizer_from)


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    *,
    tokenizer_from: str | Path | None = None,
) -> Path:
    """Writes a model folder. config.json is written last: a folder that has one is complete."""
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
    kind, moe = FAMILIES[config.architecture].model_type, config.moe
    rope = dataclasses.replace(config.rope, original_max_positions=config.rope.original_max_positions or config.max_positions)
    window = next((window for window in config.windows if window), None)
    layer_types = ["sliding_attention" if window else "full_attention" for window in config.windows]
    hf: dict[str, Any] = {
        "architectures": [config.architecture],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "gelu_pytorch_tanh" if kind == "gemma" else "silu",
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.rms_norm_eps,
        **rope.to_hf(),
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
    }
    if kind.startswith("qwen"):
        hf |= {"use_sliding_window": window is not None, "sliding_window": window}
        if window is not None:
            hf |= {"layer_types": layer_types, "max_window_layers": config.windows.index(window)}
    elif kind not in ("llama", "gemma3_text"):
        # If missing, transformers assumes a window of 4096, and a padding token that may be outside a small vocabulary.
        hf |= {"sliding_window": window, "pad_token_id": None}
    if kind == "ministral":
        hf["layer_types"] = layer_types
    if kind in ("seed_oss", "glm", "glm4"):
        hf |= {"attention_bias": config.qkv_bias, "attention_out_bias": config.output_bias}
    if kind == "smollm3":
        hf["use_sliding_window"] = window is not None
        hf["no_rope_layers"] = [int(layer not in config.unrotated) for layer in range(config.num_layers)]
    if moe is not None:
        hf["num_experts_per_tok"] = moe.experts_per_token
        if kind == "mixtral":
            return hf | {"num_local_experts": moe.num_experts, "intermediate_size": moe.intermediate_size}
        plain = [layer for layer in range(config.num_layers) if layer not in moe.layers]
        hf |= {"num_experts": moe.num_experts, "moe_intermediate_size": moe.intermediate_size}
        hf |= {"norm_topk_prob": moe.normalise, "mlp_only_layers": plain, "decoder_sparse_step": 1}
        if moe.shared_intermediate_size:
            hf |= {"shared_expert_intermediate_size": moe.shared_intermediate_size, "qkv_bias": config.qkv_bias}
    if config.local_rope is not None:
        hf |= {"hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": config.local_rope.theta}
        hf |= {"query_pre_attn_scalar": round(config.head_dim / config.query_scale**2), "sliding_window": window or 4096}
        hf["layer_types"] = layer_types
    if config.rotated is not None:
        hf["partial_rotary_factor"] = config.rotated / config.head_dim
    if config.rope.kind == "longrope":
        hf["original_max_position_embeddings"] = config.rope.original_max_positions
    return hf


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in a checkpoint of this configuration."""
    decoder, layout = empty_decoder(config), Layout(config)
    return {
        part: tuple(rows.shape)
        for name, parameter in decoder.named_parameters()
        for part, rows in zip(layout.file_names(name), layout.split(name, parameter), strict=True)
    }


# Vision-language models: prefixes of the language model's tensors, in two spellings, and the parts that are not read.
TEXT_PREFIXES = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
IMAGE_PARTS = re.compile(r"^(model\.)?(vision_tower|multi_modal_projector|visual)\.")


def text_name(name: str) -> str | None:
    """The usual name of a language model's tensor; None: it belongs to another part of the model."""
    if IMAGE_PARTS.match(name):
        return None
    for theirs, ours in TEXT_PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def check_tensors(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Raises one error that lists missing, unexpected and mis-shaped tensors."""
    # The file of a tied model may also store the head, which is then equal to the embedding.
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
