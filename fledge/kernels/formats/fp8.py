"""Weights in FP8 (e4m3), with a scale per tensor, per output, or per block of 128 outputs and 128 inputs.

In memory, for kernels: codes float8_e4m3fn [O, I] and scales fp32 [O, I / G], one per group of G inputs. A scale per tensor or
per output is one group of all inputs; a block's scale is repeated for each of its outputs. value = code * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 448.0  # the largest number in e4m3


def reads_fp8(device: torch.device) -> bool:
    """Whether the device's kernels can read FP8: GPUs from Ada (8.9) on can convert it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


@dataclass(frozen=True)
class Fp8Weight:
    codes_OI: Tensor
    scales_OG: Tensor
    group_size: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        scales = self.scales_OG.repeat_interleave(self.group_size, 1)[:, : self.codes_OI.shape[1]]
        return (self.codes_OI.float() * scales).to(dtype)

    def rows(self, order: Tensor) -> Fp8Weight:
        # Some versions of torch cannot index float8.
        codes = self.codes_OI.view(torch.uint8)[order].view(self.codes_OI.dtype)
        return Fp8Weight(codes, self.scales_OG[order], self.group_size)


def read_fp8(codes_OI: Tensor, scales: Tensor, block: tuple[int, int] | None) -> Fp8Weight:
    """Reads a checkpoint's FP8 weight. `scales`: [] or [1], [O] or [O, 1]; with `block` (outputs, inputs)
    [O / block, I / block], where the last blocks may be partial."""
    outputs, inputs = codes_OI.shape
    scales = scales.float()
    if block is not None:
        return Fp8Weight(codes_OI, scales.repeat_interleave(block[0], 0)[:outputs].contiguous(), block[1])
    return Fp8Weight(codes_OI, scales.reshape(-1, 1).expand(outputs, 1).contiguous(), inputs)


def quantize_fp8(weight_OI: Tensor) -> Fp8Weight:
    """Quantises a weight to FP8, rounding to nearest, with one scale per output."""
    scales = (weight_OI.float().abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-12)
    return Fp8Weight((weight_OI.float() / scales).to(torch.float8_e4m3fn), scales, weight_OI.shape[1])
