"""Writes quantised checkpoints in the layouts of their makers (AWQ, GPTQ, compressed-tensors, FP8), for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fledge.checkpoints.hf import save_decoder
from fledge.models.decoder import Decoder

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # order used by AutoAWQ's gemm packer


class Grouped(NamedTuple):
    """A weight quantised by groups of inputs: value = (code - zero) * scale."""

    codes_OI: Tensor
    zeros_OG: Tensor
    scales_OG: Tensor
    g_idx: Tensor

    def values(self) -> Tensor:
        zeros, scales = (part[:, self.g_idx] for part in (self.zeros_OG, self.scales_OG.float()))
        return (self.codes_OI - zeros).float() * scales


def grouped(
    weight_OI: Tensor, bits: int, group: int, *, symmetric: bool, act_order: bool = False, dtype: torch.dtype = torch.float16
) -> Grouped:
    """Quantises a weight. `act_order`: the inputs of a group are at random positions."""
    inputs, levels = weight_OI.shape[1], (1 << bits) - 1
    num_groups = inputs // group
    g_idx = torch.arange(inputs) // group
    if act_order:
        g_idx = g_idx[torch.randperm(inputs, generator=torch.Generator().manual_seed(inputs))]
    zeros = torch.empty(weight_OI.shape[0], num_groups, dtype=torch.long)
    scales = torch.empty(weight_OI.shape[0], num_groups, dtype=dtype)
    codes = torch.empty(weight_OI.shape, dtype=torch.long)
    for number in range(num_groups):
        columns = weight_OI[:, g_idx == number].float()
        if symmetric:
            zeros[:, number] = 1 << (bits - 1)
            scales[:, number] = (columns.abs().amax(1) / ((1 << (bits - 1)) - 1)).to(dtype)
        else:
            low, high = columns.amin(1).clamp(max=0), columns.amax(1).clamp(min=0)
            scales[:, number] = ((high - low) / levels).to(dtype)
            zeros[:, number] = (-low / scales[:, number].float()).round().clamp(1, levels)  # GPTQ v1 cannot store 0
        rounded = (columns / scales[:, number].float()[:, None]).round().long() + zeros[:, number][:, None]
        codes[:, g_idx == number] = rounded.clamp(0, levels)
    return Grouped(codes, zeros, scales, g_idx)


def words_of(values: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Packs values into int32 words along the last dimension: value `order[i]` of each word is at bit i * bits."""
    per_word = 32 // bits
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // per_word, dtype=torch.int64)
    for place, source in enumerate(order or range(per_word)):
        words |= values[..., source::per_word] << (place * bits)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq_tensors(weight: Grouped) -> dict[str, Tensor]:
    return {
        "qweight": words_of(weight.codes_OI.t(), 4, AWQ_ORDER),
        "qzeros": words_of(weight.zeros_OG.t(), 4, AWQ_ORDER),
        "scales": weight.scales_OG.t(),
    }


def gptq_tensors(weight: Grouped, bits: int = 4, *, v2: bool = False) -> dict[str, Tensor]:
    return {
        "qweight": words_of(weight.codes_OI, bits).t(),
        "qzeros": words_of(weight.zeros_OG.t() - (0 if v2 else 1), bits),
        "scales": weight.scales_OG.t(),
        "g_idx": weight.g_idx.to(torch.int32),
    }


def compressed_tensors(weight: Grouped, bits: int = 4, *, symmetric: bool, act_order: bool) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": words_of(weight.codes_OI, bits),
        "weight_scale": weight.scales_OG,
        "weight_shape": torch.tensor(weight.codes_OI.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(weight.zeros_OG.t(), bits).t()
    if act_order:
        tensors["weight_g_idx"] = weight.g_idx.to(torch.int32)
    return tensors


def fp8_tensors(weight_OI: Tensor, kind: str, name: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of an FP8 weight, and its dequantised values. `kind`: scales per tensor, channel or block."""
    outputs, inputs = weight_OI.shape
    if kind == "block":
        scales = torch.empty(-(-outputs // 128), -(-inputs // 128))
        codes = torch.empty(weight_OI.shape, dtype=torch.float8_e4m3fn)
        values = torch.empty(weight_OI.shape)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = weight_OI[block].abs().max() / 448
                part = (weight_OI[block] / scales[i, j]).to(torch.float8_e4m3fn)
                codes.view(torch.uint8)[block] = part.view(torch.uint8)
                values[block] = part.float() * scales[i, j]
        return {"weight": codes, name: scales}, values
    scales = weight_OI.abs().amax(1, keepdim=True) / 448 if kind == "channel" else (weight_OI.abs().max() / 448).reshape(1)
    codes = (weight_OI / scales).to(torch.float8_e4m3fn)
    return {"weight": codes, name: scales}, codes.float() * scales


def _ct(bits: int, symmetric: bool, **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": 128} | weights
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "quantization_status": "compressed", "kv_cache_scheme": None}  # fmt: skip


CT_FP8 = _ct(8, True, type="float", strategy="channel") | {"format": "float-quantized"}
CT_INT8 = _ct(8, True, strategy="channel") | {"format": "int-quantized"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
# quantization_config by test name.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq-asymmetric": GPTQ | {"sym": False},
    "gptq-v2": GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"},
    "gptq-act-order": GPTQ | {"desc_act": True},
    "gptq-8": GPTQ | {"bits": 8},
    "awq-64": AWQ | {"group_size": 64},
    "gptq-32-act-order": GPTQ | {"group_size": 32, "desc_act": True},
    "gptq-whole-rows": GPTQ | {"group_size": -1},
    "ct-int4": _ct(4, True),
    "ct-int4-asymmetric": _ct(4, False),
    "ct-int4-act-order": _ct(4, True, actorder="group"),
    "ct-int4-32-asymmetric": _ct(4, False, group_size=32),
    "ct-int4-channel": _ct(4, True, strategy="channel", group_size=None),
    "ct-int8": CT_INT8,
    "ct-fp8": CT_FP8,
    "fp8-tensor": FP8 | {"activation_scheme": "static"},
    "fp8-block": FP8 | {"weight_block_size": [128, 128]},
}


def packed_linear(name: str, weight_OI: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of one linear in the layout `CHECKPOINTS[name]`, and its dequantised values."""
    config = CHECKPOINTS[name]
    if name == "ct-fp8":
        return fp8_tensors(weight_OI, "channel", "weight_scale")
    if name == "fp8-block":
        return fp8_tensors(weight_OI, "block", "weight_scale_inv")
    if name == "fp8-tensor":
        tensors, values = fp8_tensors(weight_OI, "tensor", "weight_scale")
        return tensors | {"input_scale": torch.tensor([0.5])}, values
    if name == "ct-int8":
        scales = (weight_OI.abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
        codes = (weight_OI / scales.float()).round().clamp(-127, 127).to(torch.int8)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales.float()
    act_order = "act-order" in name
    symmetric = not name.startswith("awq") and "asymmetric" not in name and name != "gptq-v2"
    bits = 8 if name == "gptq-8" else 4
    dtype = torch.bfloat16 if name.startswith("ct") else torch.float16
    said = config["config_groups"]["group_0"]["weights"] if name.startswith("ct") else config
    group = said["group_size"] if (said["group_size"] or -1) > 0 else weight_OI.shape[1]
    weight = grouped(weight_OI, bits, group, symmetric=symmetric, act_order=act_order, dtype=dtype)
    if name.startswith("awq"):
        return awq_tensors(weight), weight.values()
    if name.startswith("gptq"):
        return gptq_tensors(weight, bits, v2=config["checkpoint_format"] == "gptq_v2"), weight.values()
    return compressed_tensors(weight, bits, symmetric=symmetric, act_order=act_order), weight.values()


def write_quantised(decoder: Decoder, folder: Path, name: str, *, also: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """Writes a quantised checkpoint and its dequantised twin. Router and head stay unquantised unless `also` names them."""
    plain, packed = (save_decoder(decoder, folder / part) for part in ("twin", name))
    tensors, values = load_file(packed / "model.safetensors"), load_file(plain / "model.safetensors")
    for weight in list(tensors):
        is_linear = weight.endswith(("_proj.weight", *also)) or ".experts." in weight
        if is_linear:
            parts, values[weight] = packed_linear(name, tensors.pop(weight))
            tensors |= {weight.removesuffix("weight") + part: value.contiguous() for part, value in parts.items()}
    save_file(tensors, packed / "model.safetensors")
    save_file({key: value.contiguous() for key, value in values.items()}, plain / "model.safetensors")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": CHECKPOINTS[name]}))
    return packed, plain
