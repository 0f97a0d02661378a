"""Integer weights as packed by checkpoints: AWQ, GPTQ and compressed-tensors, converted to a format that our kernels read.

A weight is (q - zero) * scale, with a zero and a scale per group of inputs of an output. O outputs, I inputs, G groups:

    AWQ (gemm)          qweight int32 [I, O/8]     eight outputs per word, nibble k is output AWQ_ORDER[k] of the eight
                        qzeros  int32 [G, O/8]     the same
                        scales  fp16  [G, O]
    GPTQ                qweight int32 [I/8, O]     eight inputs per word, the first in the lowest bits
                        qzeros  int32 [G, O/8]     eight outputs per word, the first in the lowest bits; less 1, not in gptq_v2
                        scales  fp16  [G, O]
                        g_idx   int32 [I]          the group of each input; out of order with act-order (desc_act)
    compressed-tensors  weight_packed     int32 [O, I/8]   eight inputs per word, each plus 8 (8 bits: four, plus 128)
                        weight_zero_point int32 [O/8, G]   eight outputs per word, each plus 8; absent: 0
                        weight_scale            [O, G]
                        weight_g_idx      int32 [I]        as in GPTQ
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.quantization import QuantizedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Most inputs that may share a scale: on a CPU a group's sums are 32-bit integers.
LARGEST_GROUP = 256


@dataclass(frozen=True)
class IntWeight:
    """An unpacked integer weight, its columns sorted by group."""

    codes_OI: Tensor  # int16: q
    zeros_OG: Tensor  # int16
    scales_OG: Tensor  # fp16, bf16 or fp32
    bits: int
    order_I: Tensor | None = None  # the input that each column reads; None: in order

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [O, I] with columns in the order of the inputs; the reference for every format."""
        groups = self.codes_OI.unflatten(1, (self.scales_OG.shape[1], -1))
        values = ((groups - self.zeros_OG[..., None]).float() * self.scales_OG.float()[..., None]).flatten(1)
        if self.order_I is not None:
            values = torch.empty_like(values).index_copy_(1, self.order_I, values)
        return values.to(dtype)

    def rows(self, order: Tensor) -> IntWeight:
        parts = (part[order] for part in (self.codes_OI, self.zeros_OG, self.scales_OG))
        return IntWeight(*parts, self.bits, self.order_I)

    def exact(self) -> QuantizedWeight | None:
        """The same weight in a format that our kernels read, columns ordered as here; None if no format holds it exactly."""
        scales = self.scales_OG.half()
        if not torch.equal(scales.float(), self.scales_OG.float()):
            return None
        inputs, groups = self.codes_OI.shape[1], scales.shape[1]
        size = inputs // groups
        split = next((n for n in range(1, size + 1) if size % n == 0 and size // n <= LARGEST_GROUP), size)
        if size // split % 8:
            return None
        scales, zeros = (part.repeat_interleave(split, 1) for part in (scales, self.zeros_OG))
        if self.bits == 8:
            codes = self.codes_OI.unflatten(1, (groups, -1)) - self.zeros_OG[..., None]
            if int(codes.min()) < -127 or int(codes.max()) > 127:
                return None
            return QuantizedWeight(codes.flatten(1).to(torch.int8), scales, None, 8, size // split)
        nibbles = self.codes_OI.to(torch.uint8)
        packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
        is_symmetric = bool((zeros == 8).all())
        # A product of 4 and 11 significant bits is exact in fp32, not in fp16.
        offsets = None if is_symmetric else -zeros.float() * scales.float()
        return QuantizedWeight(packed, scales, offsets, 4, size // split)


def unpack_words(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpacks int32 words to int16, `32 / bits` numbers per word along `dim`, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    dim = dim % words.dim()
    parts = (words.unsqueeze(dim + 1) >> shifts.view(-1, *[1] * (words.dim() - dim - 1))) & (1 << bits) - 1
    return parts.flatten(dim, dim + 1).to(torch.int16)


def read_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> IntWeight:
    places = torch.tensor(AWQ_ORDER).argsort()  # the index of the nibble that holds each of eight outputs

    def outputs_first(words: Tensor) -> Tensor:
        nibbles = unpack_words(words, 4, 1).unflatten(1, (-1, 8))[:, :, places]
        return nibbles.flatten(1).t().contiguous()

    return IntWeight(outputs_first(qweight), outputs_first(qzeros), scales.t().contiguous(), 4)


def read_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None, bits: int, *, zeros_less_one: bool
) -> IntWeight:
    """Reads a GPTQ weight. `zeros_less_one`: zeros are stored minus 1, as in all versions except gptq_v2."""
    codes = unpack_words(qweight, bits, 0).t().contiguous()
    zeros = unpack_words(qzeros, bits, 1).t().contiguous() + int(zeros_less_one)
    codes, order = in_group_order(codes, g_idx, scales.shape[0])
    return IntWeight(codes, zeros, scales.t().contiguous(), bits, order)


def read_compressed(
    packed: Tensor, scale: Tensor, zero_point: Tensor | None, g_idx: Tensor | None, num_inputs: int, bits: int
) -> IntWeight:
    offset = 1 << (bits - 1)
    codes = unpack_words(packed, bits, 1)[:, :num_inputs].contiguous()
    if zero_point is None:
        zeros = torch.full(scale.shape, offset, dtype=torch.int16)
    else:
        zeros = unpack_words(zero_point, bits, 0)[: scale.shape[0]].contiguous()
    codes, order = in_group_order(codes, g_idx, scale.shape[1])
    if bits == 8:  # centred at 0, as in our 8-bit format
        codes, zeros = codes - offset, zeros - offset
    return IntWeight(codes, zeros, scale, bits, order)


def in_group_order(codes_OI: Tensor, g_idx: Tensor | None, num_groups: int) -> tuple[Tensor, Tensor | None]:
    """Sorts columns by their group; returns them and the input that each reads (None: in order)."""
    if g_idx is None:
        return codes_OI, None
    usual = torch.arange(len(g_idx), device=g_idx.device) // (len(g_idx) // num_groups)
    if torch.equal(g_idx.long(), usual):
        return codes_OI, None
    order = g_idx.long().argsort(stable=True)
    return codes_OI[:, order].contiguous(), order
