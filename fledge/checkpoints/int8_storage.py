"""Stores a drafter's matrices in 8 bits: half the size of bf16, for drafters that ship inside a package.

    NAME         int8 [O, I]       codes, symmetric; rounded as in `kernels.quantization`
    NAME_scale   fp16 [O, I / 32]  one scale per group of 32 adjacent inputs

A weight is code * scale, rounded to config.json's `torch_dtype`, everywhere: Fledge serves and `fledge export` writes the same
bits. Norms, biases, vocabulary maps, and matrices whose number of inputs is not a multiple of 32 are stored unchanged.
`quantization_config` names a method that no other server knows, so that other servers refuse the folder instead of reading
codes as weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fledge.config_checks import shown
from fledge.errors import ModelError
from fledge.kernels.quantization import GROUP_SIZE, QuantizedWeight, dequantize, quantize

METHOD = "fledge-int8"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SCALE = "_scale"


def is_stored(config: Mapping[str, Any]) -> bool:
    settings = config.get("quantization_config")
    return isinstance(settings, Mapping) and settings.get("quant_method") == METHOD


def store(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and tensors of a plain drafter -> those of the same drafter in 8 bits."""
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.shape[1] % GROUP_SIZE == 0:
            weight = quantize(tensor, 8)
            stored |= {name: weight.codes, name + SCALE: weight.scales}
        else:
            stored[name] = tensor
    return {**config, "quantization_config": {"quant_method": METHOD, "group_size": GROUP_SIZE}}, stored


def restore(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse of `store`: plain weights in the type that config.json names."""
    if (dtype := DTYPES.get(str(config.get("torch_dtype")))) is None:
        raise ModelError(f"8-bit drafter: torch_dtype {shown(config.get('torch_dtype'))} must be one of {', '.join(DTYPES)}")
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(SCALE) and name.removesuffix(SCALE) in tensors:
            continue
        plain[name] = _restored(name, tensor, tensors.get(name + SCALE), dtype) if tensor.dtype == torch.int8 else tensor
    return {key: value for key, value in config.items() if key != "quantization_config"}, plain


def _restored(name: str, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
    if scales is None:
        raise ModelError(f"8-bit drafter: {name} has no {name + SCALE} beside it; fetch the drafter again")
    if codes.ndim != 2 or scales.dtype != torch.float16 or scales.shape != (codes.shape[0], codes.shape[1] // GROUP_SIZE):
        found, wanted = list(scales.shape), f"float16, one for {GROUP_SIZE} inputs of {list(codes.shape)}"
        raise ModelError(f"8-bit drafter: {name + SCALE} is {scales.dtype} {found} and must be {wanted}")
    return dequantize(QuantizedWeight(codes, scales, None, 8, GROUP_SIZE), dtype)
