"""The fixed order of attention's sums. Every kernel here gives a query row the same bits: alone or in a batch, in a decode
step, in a verified chain, in a chunk or in a whole prompt, and whether its keys come from this pass or from the cache.

    keys     | 16 | 16 | … | 16 | 16 | 16 | …      groups and splits are counted from position 0
             |<----- split 0 ----->|<- split 1 …

Within a split, weights times values (and times 1, for the softmax's denominator) are accumulated by tensor cores in groups of
16 keys, in order, in one fp32 accumulator. The splits' sums are added up in order, from the first.

How many keys a kernel processes at a time does not matter: the number subtracted from the scores (`best`) is an integer, so
every rescaling is by a power of two, which is exact. This requires scores rounded to a grid (2^-12 in units of log2, 2^-14 with
fp32; it changes a weight by at most 6e-5 of itself, while rounding it to bf16 changes it by up to 2e-3): score minus `best` is
then exact, and another `best` changes only the exponent of exp2. A key that a row does not see has weight 0 and adds exactly 0.

This holds for bf16 and fp32. In fp16 a weight below 2^-14 loses bits, so equal results would need the same `best` in all
kernels, which is not given.

The module ends with the reads of the paged cache that the kernels share.
"""

from __future__ import annotations

import torch

from fledge.kernels.triton_support import jit, tl

SPLIT = 512  # keys per split; fixed, because another number would change the order of sums
GROUP_KEYS = 16  # keys that the tensor core adds at once; blocks start at multiples of it


def score_shift(dtype: torch.dtype) -> float:
    """The number added to a score to round it to the grid: near it, the spacing of fp32 numbers is the grid's step."""
    return 768.0 if dtype == torch.float32 else 3072.0


@jit
def shifted_scores(q, k, scale_log2, SHIFT: tl.constexpr):
    """Scores in units of log2, on the grid, plus SHIFT."""
    return tl.fma(tl.dot(q, tl.trans(k), input_precision="ieee"), scale_log2, SHIFT)


@jit
def power_of_2(exponent):
    """2 to the power of an integer from -inf to 0, exactly; 0 below -126."""
    return ((tl.maximum(exponent, -127.0).to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@jit
def finite(best):
    """`best`, or 0 for a row that has seen no key yet and so has no finite maximum to subtract."""
    return tl.where(best == float("-inf"), 0.0, best)


@jit
def best_of(scores):
    """The smallest integer that no score of a row exceeds."""
    return tl.ceil(tl.max(scores, axis=1))


@jit
def weighted(weights, v, total, out):
    """Adds a block of keys to the denominator (all columns of `total` are equal) and to the sum of values."""
    ones = tl.full([v.shape[0], total.shape[1]], 1.0, v.dtype)
    total = tl.dot(weights, ones, total, input_precision="ieee")
    return total, tl.dot(weights, v, out, input_precision="ieee")


@jit
def attend_block(scores, v, best, total, out):
    """Adds the next block of keys of a split."""
    new_best = tl.maximum(best, best_of(scores))
    safe_best = finite(new_best)
    weights = tl.exp2(scores - safe_best[:, None]).to(v.dtype)
    shrink = power_of_2(best - safe_best)[:, None]
    total, out = weighted(weights, v, total * shrink, out * shrink)
    return new_best, total, out


@jit
def add_split(all_best, all_total, all_out, best, total, out):
    """Adds the next split to the sum of the splits so far. Both factors are powers of two, so only the sum is rounded."""
    new_best = tl.maximum(all_best, best)
    safe_best = finite(new_best)
    old, new = power_of_2(all_best - safe_best)[:, None], power_of_2(best - safe_best)[:, None]
    return new_best, all_total * old + total * new, all_out * old + out * new


@jit
def normalised(total, out):
    """Divides by the softmax's denominator; a row that saw no key gives 0."""
    return out * (1.0 / tl.where(total == 0.0, 1.0, total))


@jit
def head_scale(squares, eps, SIZE: tl.constexpr):
    """The factor of heads' RMS norm. The sum of squares is in fp64, so that its order has no effect after rounding to fp32."""
    return 1.0 / tl.sqrt(tl.fma(squares.to(tl.float32), 1.0 / SIZE, eps))


@jit
def rotated(x, other, cos, sin, weight, other_weight, eps, SIZE: tl.constexpr, HAS_NORMS: tl.constexpr, dtype: tl.constexpr):
    """Rotated heads, normed first if HAS_NORMS. `other`: lanes half a head away. The table's sines include the sign."""
    x, other = x.to(tl.float32), other.to(tl.float32)
    if HAS_NORMS:
        scale = head_scale(tl.sum((x * x).to(tl.float64), axis=1), eps, SIZE)[:, None]
        x = (x * scale * weight[None, :]).to(dtype).to(tl.float32)
        other = (other * scale * other_weight[None, :]).to(dtype).to(tl.float32)
    return tl.fma(other, sin, x * cos).to(dtype)


@jit
def page_numbers(pages, first, last, PAGE: tl.constexpr, PER_SPLIT: tl.constexpr):
    """The page numbers of the split that contains `first`, up to `last`. Loaded at once, so that a block's keys need not wait
    for the load of a page number."""
    COUNT: tl.constexpr = PER_SPLIT // PAGE if PER_SPLIT > PAGE else 1
    page = first // PER_SPLIT * PER_SPLIT // PAGE + tl.arange(0, COUNT)
    return tl.load(pages + page, mask=page * PAGE < last, other=0)


@jit
def cache_block(
    keys_base,
    values_base,
    pages,
    numbers,
    block,
    last,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    PER_SPLIT: tl.constexpr,
):
    """Loads keys and values [KEYS, LANES] from position `block` on, a multiple of KEYS; if MASKED, those from `last` on are 0.

    `numbers`: the `page_numbers` of its split, used if `ALIGNED` below.
    """
    ALIGNED: tl.constexpr = PAGE % KEYS == 0 and (PER_SPLIT % PAGE == 0 or PAGE % PER_SPLIT == 0)
    lane = tl.arange(0, LANES)
    key = block + tl.arange(0, KEYS)
    if ALIGNED:
        # A block is within one page.
        COUNT: tl.constexpr = PER_SPLIT // PAGE if PER_SPLIT > PAGE else 1
        page = tl.sum(tl.where(tl.arange(0, COUNT) == block % PER_SPLIT // PAGE, numbers, 0), axis=0)
        slot = page.to(tl.int64) * PAGE + block % PAGE + tl.arange(0, KEYS)
    else:
        page = tl.load(pages + key // PAGE, mask=key < last if MASKED else None, other=0 if MASKED else None)
        slot = page.to(tl.int64) * PAGE + key % PAGE
    offsets = slot[:, None] * SIZE + lane[None, :]
    if MASKED or SIZE < LANES:
        mask = (lane < SIZE)[None, :]
        if MASKED:
            mask = (key < last)[:, None] & mask
        k, v = tl.load(keys_base + offsets, mask=mask, other=0.0), tl.load(values_base + offsets, mask=mask, other=0.0)
    else:
        k, v = tl.load(keys_base + offsets), tl.load(values_base + offsets)
    return k, v
