"""Weight-only, group-wise quantisation: linears whose weights are read in 8 or 4 bits; activations keep their type.

A weight [O, I] is cut into groups of G neighbouring inputs of one output row (G divides I). Kernels read:

    codes    8 bits: int8  [O, I]       value = code * scale
             FP8:    float8_e4m3fn [O, I], the same; only on a GPU
             4 bits: uint8 [O, I / 2]   two codes per byte along I: the low nibble is the even input, the high nibble the odd
    scales   fp16 [O, I / G]            may be negative; fp32 with FP8, where G may be all inputs
    offsets  fp16 or fp32 [O, I / G],   4 bits only; fp32 where a checkpoint has zero points, which fp16 would round
             or None
                                        None:  value = (nibble - 8) * scale
                                        given: value = nibble * scale + offset

All contiguous. Values are defined in fp32. The reference rounds them to the activations' type; kernels apply scales and offsets
to fp32 sums. These are GGUF's groups: at G = 32, Q8_0 is `8 bits`, Q4_0 `4 bits, no offsets`, Q4_1 `4 bits, offsets`, bit for
bit. Rows may be permuted and concatenated freely, since groups lie within a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.errors import UserError
from fledge.kernels.formats.fp8 import Fp8Weight, quantize_fp8

# Inputs per scale, as in GGUF: 8.5 bits per weight with 8-bit codes, 5.0 with 4-bit codes and offsets.
GROUP_SIZE = 32
# By the value of --quantization: bits of the layers' linears and of the head. The head chooses the token, so it keeps 8 bits.
# It is a separate copy: a tied embedding is not quantised, because its rows are looked up.
BITS = {"int8": (8, 8), "int4": (4, 8), "fp8": (8, 8)}
# A router chooses experts. It is not quantised: it is small, and a wrong expert costs more than a rounded weight.
ROUTER = "mlp.gate"


@dataclass(frozen=True)
class QuantizedWeight:
    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    bits: int
    group_size: int

    @property
    def format(self) -> str:
        return "fp8" if self.codes.is_floating_point() else f"int{self.bits}"

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.scales, self.offsets) if part is not None)


def quantize(weight_OI: Tensor, bits: int, group_size: int = GROUP_SIZE, *, offsets: bool = True) -> QuantizedWeight:
    """Quantises a weight, rounding to nearest. A group's extremes have codes of their own, so a weight that was quantised in
    the same groups before is recovered exactly. `offsets` (4 bits): a scale and an offset per group, not only a scale."""
    if bits == 8:
        scales, lowest, codes = rounded(weight_OI, 8, group_size)
        return QuantizedWeight(codes.flatten(1), scales, None, 8, group_size)
    if offsets:
        scales, lowest, codes = rounded(weight_OI, bits, group_size)
    else:
        # The number furthest from zero gets code -8, whatever its sign, so that all sixteen codes are used.
        groups = weight_OI.detach().float().unflatten(1, (-1, group_size))
        furthest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))[..., 0]
        lowest, scales = None, _fp16(furthest / -8)
        codes = _codes(groups, scales, -8, 7) + 8
    nibbles = codes.to(torch.uint8).flatten(1)
    packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return QuantizedWeight(packed, scales, lowest, 4, group_size)


def rounded(weight_OI: Tensor, bits: int, group_size: int = GROUP_SIZE) -> tuple[Tensor, Tensor | None, Tensor]:
    """Rounds to nearest; returns scales, lowest values (below 8 bits) and codes [O, groups, group_size], one byte each."""
    groups = weight_OI.detach().float().unflatten(1, (-1, group_size))
    if bits == 8:
        scales = _fp16(groups.abs().amax(-1) / 127)
        return scales, None, _codes(groups, scales, -127, 127).to(torch.int8)
    lowest, highest = _fp16(groups.amin(-1)), (1 << bits) - 1
    scales = _fp16((groups.amax(-1) - lowest) / highest)
    return scales, lowest, _codes(groups - lowest.float()[..., None], scales, 0, highest).to(torch.uint8)


def _fp16(x: Tensor) -> Tensor:
    return x.clamp(-65504, 65504).half()


def _codes(groups: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    steps = scales.float()[..., None]
    return (groups / torch.where(steps == 0, 1.0, steps)).round().clamp(lowest, highest)


def kept_fp8(weight: Fp8Weight) -> QuantizedWeight | None:
    """Returns the same weight in the kernels' layout, or None if they do not support its groups (a partial last block)."""
    inputs, group_size = weight.codes_OI.shape[1], weight.group_size
    if inputs % group_size or group_size % GROUP_SIZE:
        return None
    return QuantizedWeight(weight.codes_OI.contiguous(), weight.scales_OG.contiguous(), None, 8, group_size)


def unpacked(weight: QuantizedWeight) -> Tensor:
    """Returns the codes [O, I] in int8 or FP8; for 4 bits, the numbers that the scale multiplies."""
    if weight.bits == 8:
        return weight.codes
    nibbles = torch.stack([weight.codes & 15, weight.codes >> 4], -1).flatten(1).to(torch.int8)
    return nibbles if weight.offsets is not None else nibbles - 8


def dequantize(weight: QuantizedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    values = unpacked(weight).float().unflatten(1, (-1, weight.group_size)) * weight.scales.float()[..., None]
    if weight.offsets is not None:
        values = values + weight.offsets.float()[..., None]
    return values.flatten(1).to(dtype)


def smallest_exact_format(weight_OI: Tensor) -> QuantizedWeight:
    """Returns the weight in the smallest format that holds it exactly (GGUF's Q4_0, Q4_1 or Q8_0), else in 8 bits."""
    few = weight_OI[::29]  # a sample shows quickly that a format is not exact
    for offsets in (False, True):
        if is_exact(quantize(few, 4, offsets=offsets), few):
            weight = quantize(weight_OI, 4, offsets=offsets)
            if is_exact(weight, weight_OI):
                return weight
    return quantize(weight_OI, 8)


def is_exact(weight: QuantizedWeight, original_OI: Tensor) -> bool:
    """Whether values are equal up to rounding to fp16 (large GGUF files are unpacked to it): far below half a 4-bit step."""
    groups = original_OI.detach().float().unflatten(1, (-1, weight.group_size))
    return bool(((dequantize(weight).view_as(groups) - groups).abs() <= groups.abs().amax(-1, keepdim=True) * 2**-9).all())


class QuantizedLinear(nn.Module):
    """Replaces an `nn.Linear`. `forward` is the reference for kernels that read `codes`, `scales` and `offsets`."""

    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, order_I: Tensor | None = None) -> None:
        """`order_I`: the input that each column of the weight reads (GPTQ's act-order); None: in order."""
        super().__init__()
        self.bits, self.group_size = weight.bits, weight.group_size
        self.out_features, self.in_features = weight.scales.shape[0], weight.scales.shape[1] * weight.group_size
        self.register_buffer("codes", weight.codes)
        self.register_buffer("scales", weight.scales)
        self.register_buffer("offsets", weight.offsets)
        self.register_buffer("bias", None if bias is None else bias.detach())
        self.register_buffer("order", order_I)

    @property
    def quantized(self) -> QuantizedWeight:
        return QuantizedWeight(self.codes, self.scales, self.offsets, self.bits, self.group_size)

    @property
    def num_bytes(self) -> int:
        return self.quantized.num_bytes

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.order is None else x[..., self.order]
        return F.linear(x, dequantize(self.quantized, x.dtype), self.bias)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        """Moves to the network's device but converts only the bias to its type: scales in bf16 would change the weights."""
        kept = {name: getattr(self, name) for name in ("codes", "scales", "offsets")}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            if buffer is not None:
                setattr(self, name, buffer.to(getattr(self, name).device))
        return self


def stacked_weights(linears: Sequence[QuantizedLinear]) -> QuantizedWeight | None:
    """Stacks weights of one format and shape along a new first dimension; None if they differ or inputs are reordered."""
    parts, first = [linear.quantized for linear in linears], linears[0].quantized
    kinds = {(part.format, part.group_size, part.codes.shape) for part in parts}
    if len(kinds) > 1 or first.group_size % GROUP_SIZE or any(linear.order is not None for linear in linears):
        return None
    offsets = None
    if any(part.offsets is not None for part in parts):  # for those without, -8 * scale: the same values in fp32
        wide = [-8 * part.scales.float() if part.offsets is None else part.offsets.float() for part in parts]
        offsets = torch.stack(wide)
    # Some versions of torch cannot stack float8.
    codes = torch.stack([part.codes.view(torch.uint8) for part in parts]).view(first.codes.dtype)
    scales = torch.stack([part.scales for part in parts])
    return QuantizedWeight(codes, scales, offsets, first.bits, first.group_size)


def quantize_linears(network: nn.Module, quantization: str, device: str | torch.device | None = None) -> None:
    """Quantises every linear of a network except routers, in place, and moves it to `device`."""
    linears = [(name, module) for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in linears:
        owner, _, attribute = name.rpartition(".")
        setattr(network.get_submodule(owner), attribute, quantized_linear(name, linear, quantization, device))


def quantized_linear(
    name: str, linear: nn.Linear, quantization: str, device: str | torch.device | None = None
) -> nn.Linear | QuantizedLinear:
    """Returns a linear of a target, quantised and moved to `device`; a router is returned unchanged."""
    if name.endswith(ROUTER):
        return linear
    if linear.in_features % GROUP_SIZE:
        raise UserError(
            f"--quantization {quantization} needs linears whose inputs are a multiple of {GROUP_SIZE}; {name} has "
            f"{linear.in_features}. Leave the option out"
        )
    weight = linear.weight.to(device)
    is_head = name == "lm_head"
    if quantization == "fp8":
        quantized = kept_fp8(quantize_fp8(weight))
        assert quantized is not None
    else:
        quantized = smallest_exact_format(weight) if quantization == "gguf" else quantize(weight, BITS[quantization][is_head])
    return QuantizedLinear(quantized, None if linear.bias is None else linear.bias.to(device))
