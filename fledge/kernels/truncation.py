"""Top-k, min-p and top-p as one floor per row: the lowest logit that may still be drawn."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.triton_support import jit, next_power_of_2, tl

MOST_LANES = 8192  # most logits of a row that a program reads at once


class TruncationParams(NamedTuple):
    """Truncation parameters of B sequences. As in `speculation.distribution`, top-p applies to what top-k and min-p keep."""

    top_ps_B: Tensor  # 1: all
    top_ks_B: Tensor  # 0: all
    min_ps_B: Tensor  # 0: all

    def repeated(self, times: int) -> TruncationParams:
        return TruncationParams(*(x.repeat_interleave(times) for x in self))


def floor_reference(logits_BV: Tensor, temperatures_B: Tensor, truncation: TruncationParams) -> Tensor:
    """The lowest logit / temperature of each row that is kept; ties with it are kept too. -inf for rows without truncation."""
    ordered = scaled_logits(logits_BV, temperatures_B).sort(-1, descending=True).values
    place = torch.arange(ordered.shape[-1], device=ordered.device)
    last_of_k = torch.where(truncation.top_ks_B > 0, truncation.top_ks_B, len(place)).clamp(max=len(place)).long()[:, None] - 1
    kept = (ordered >= ordered.gather(-1, last_of_k)) & (ordered - ordered[:, :1] >= truncation.min_ps_B.log()[:, None])
    probabilities = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    num_kept = (kept & (before < truncation.top_ps_B[:, None])).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, num_kept - 1)[:, 0].masked_fill(keeps_all(temperatures_B, truncation), -torch.inf)


def keeps_all(temperatures_B: Tensor, truncation: TruncationParams) -> Tensor:
    cuts_nothing = (truncation.top_ps_B >= 1) & (truncation.top_ks_B <= 0) & (truncation.min_ps_B <= 0)
    return cuts_nothing | (temperatures_B <= 0)


def scaled_logits(logits_BV: Tensor, temperatures_B: Tensor) -> Tensor:
    return logits_BV.float() * torch.where(temperatures_B > 0, 1.0 / temperatures_B, 1.0)[:, None]


def floor_triton(logits_NV: Tensor, temperatures_B: Tensor, truncation: TruncationParams, num_new: int = 1) -> Tensor:
    """The same by bisecting the logits' bit patterns instead of sorting: for 16-bit logits 8 to 16 passes over a row, which
    stays in the device's cache, find the floor exactly; for 32-bit logits up to 32."""
    num_rows, vocab_size = logits_NV.shape
    floors = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    if num_rows:
        block = min(next_power_of_2(vocab_size), MOST_LANES)
        _floor[(num_rows,)](
            logits_NV,
            temperatures_B,
            *truncation,
            floors,
            logits_NV.stride(0),
            NEW=num_new,
            VOCAB=vocab_size,
            LOG_VOCAB=math.log(vocab_size),
            BLOCK=block,
            num_warps=16 if block == MOST_LANES else 4,
        )
    return floors


@jit
def _key(x):
    """Maps floats of 16 or 32 bits to integers of the same order."""
    if x.dtype.primitive_bitwidth == 32:
        bits = x.to(tl.int32, bitcast=True)
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    else:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32)
        key = bits ^ ((bits >> 31) & 0x7FFF)
    return key


@jit
def _number(key, dtype: tl.constexpr):
    """The float of a key, as float32."""
    bits = key.to(tl.int32)
    if dtype.primitive_bitwidth == 32:
        number = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    else:
        number = (bits ^ ((bits >> 31) & 0x7FFF)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return number


@jit
def _floor(
    logits_ptr,
    temperatures_ptr,
    top_ps_ptr,
    top_ks_ptr,
    min_ps_ptr,
    floors_ptr,
    logits_stride,
    NEW: tl.constexpr,
    VOCAB: tl.constexpr,
    LOG_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row // NEW)
    top_p = tl.load(top_ps_ptr + row // NEW)
    top_k = tl.load(top_ks_ptr + row // NEW)
    min_p = tl.load(min_ps_ptr + row // NEW)
    floor = tl.full([], float("-inf"), tl.float32)
    if (temperature > 0) & ((top_p < 1) | (top_k > 0) | (min_p > 0)):
        scale = 1.0 / temperature
        dtype: tl.constexpr = logits_ptr.dtype.element_ty
        lane = tl.arange(0, BLOCK)
        logits = logits_ptr + row * logits_stride
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        least = tl.full([BLOCK], float("inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf")).to(tl.float32)
            peaks = tl.maximum(peaks, x)
            least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
        peak = tl.max(peaks, axis=0)
        high_of_all = _key(peak.to(dtype)).to(tl.int64)
        # min-p keeps logits whose difference from the largest, over temperature, is at least this.
        cut = tl.log(min_p)
        least_key = _key(tl.min(least, axis=0).to(dtype)).to(tl.int64)
        if top_k > 0:  # the highest key that is reached by at least top_k ids
            low, high = least_key, high_of_all
            while low < high:
                middle = low + (high - low + 1) // 2
                counts = tl.zeros([BLOCK], tl.int32)
                for start in range(0, VOCAB, BLOCK):
                    x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf"))
                    counts += (_key(x) >= middle).to(tl.int32)
                enough = tl.sum(counts, axis=0) >= top_k
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            least_key = low
        sums = tl.zeros([BLOCK], tl.float32)
        lowest = tl.full([BLOCK], float("inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf"))
            below = (x.to(tl.float32) - peak) * scale
            kept = (_key(x) >= least_key) & (below >= cut)
            sums += tl.where(kept, tl.exp(below), 0.0)
            lowest = tl.minimum(lowest, tl.where(kept, x.to(tl.float32) * scale, float("inf")))
        floor = tl.min(lowest, axis=0)
        if top_p < 1:  # the highest key such that the ids at or above it have enough probability
            wanted = top_p * tl.sum(sums, axis=0)
            # All ids below this logit together have a probability below 1 - top_p, so the search can start here.
            small = peak + (tl.log(tl.maximum(1.0 - top_p, 1e-7)) - LOG_VOCAB) * temperature
            low, high = tl.maximum(least_key, _key(small.to(dtype)).to(tl.int64) - 1), high_of_all
            while low < high:
                middle = low + (high - low + 1) // 2
                sums = tl.zeros([BLOCK], tl.float32)
                for start in range(0, VOCAB, BLOCK):
                    x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf"))
                    below = (x.to(tl.float32) - peak) * scale
                    sums += tl.where((_key(x) >= middle) & (below >= cut), tl.exp(below), 0.0)
                enough = tl.sum(sums, axis=0) >= wanted
                low = tl.where(enough, middle, low)
                high = tl.where(enough, high, middle - 1)
            # The result is the logit of an id: the highest key between two ids' logits is the upper one's own.
            floor = tl.maximum(floor, _number(low, dtype) * scale)
    tl.store(floors_ptr + row, floor)
