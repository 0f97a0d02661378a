"""Log-probabilities of chosen tokens and of the likeliest ones, from raw logits.

Two stages: each block of the vocabulary finds its largest logits, largest first, and its sum of exponentials; then each row
merges its blocks. A logit and its id are one 64-bit key, so that one maximum gives both and ties go to the lower id.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.triton_support import (
    INT_MAX,
    by_device,
    constant,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    tl,
    wait_for_inputs,
)

MAX_LOGPROBS = 20
BLOCK = 2048


class TokenLogprobs(NamedTuple):
    chosen_N: Tensor  # float32
    values_NC: Tensor  # float32, in descending order
    ids_NC: Tensor  # int32


def pack_logprobs(found: TokenLogprobs) -> Tensor:
    """Packs into float32 [N, 1 + 2 C], the ids' bits as floats, so that one copy to the host is enough instead of three."""
    return torch.cat([found.chosen_N[:, None], found.values_NC, found.ids_NC.view(torch.float32)], 1)


def unpack_logprobs(packed: Tensor) -> TokenLogprobs:
    count = (packed.shape[1] - 1) // 2
    chosen, values, ids = packed.split((1, count, count), 1)
    return TokenLogprobs(chosen[:, 0], values, ids.contiguous().view(torch.int32))


def token_logprobs_reference(logits_NV: Tensor, tokens_N: Tensor, count: int = MAX_LOGPROBS) -> TokenLogprobs:
    """Log-probabilities of `tokens_N` and of the `count` likeliest tokens (at most the vocabulary) of each row."""
    logits = logits_NV.float()
    count = min(count, logits.shape[1])
    sums = logits.logsumexp(-1, keepdim=True)
    smallest = logits.topk(count).values[:, -1:]
    # `topk` may return any of several equal logits: so all that are at least its last one are sorted in a stable order.
    ids = torch.stack([_largest(row, least, count) for row, least in zip(logits, smallest, strict=True)])
    chosen = logits.gather(1, tokens_N.long()[:, None]) - sums
    return TokenLogprobs(chosen[:, 0], logits.gather(1, ids) - sums, ids.int())


def _largest(logits_V: Tensor, least: Tensor, count: int) -> Tensor:
    ids = (~(logits_V < least)).nonzero()[:, 0]  # not `>=`, so that NaN is included
    return ids[logits_V[ids].sort(descending=True, stable=True).indices[:count]]


def token_logprobs_triton(logits_NV: Tensor, tokens_N: Tensor, count: int = MAX_LOGPROBS) -> TokenLogprobs:
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    assert tokens_N.is_contiguous()
    device, count, blocks = logits_NV.device, min(count, vocab_size), -(-vocab_size // BLOCK)
    # A block with fewer than `count` logits is filled up with keys smaller than any logit's.
    keys = torch.empty((num_rows, blocks, count), dtype=torch.int64, device=device)
    sums = torch.empty((num_rows, blocks), dtype=torch.float32, device=device)
    chosen = torch.empty(num_rows, dtype=torch.float32, device=device)
    values = torch.empty((num_rows, count), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, count), dtype=torch.int32, device=device)
    if num_rows:
        _largest_of_block[(num_rows, blocks)](
            logits_NV,
            keys,
            sums,
            logits_NV.stride(0),
            VOCAB=vocab_size,
            COUNT=count,
            BLOCK=BLOCK,
            BLOCKS=blocks,
            num_warps=4,
            **overlap(logits_NV),
        )
        _merge_blocks[(num_rows,)](
            logits_NV,
            tokens_N,
            keys,
            sums,
            chosen,
            values,
            ids,
            logits_NV.stride(0),
            COUNT=count,
            BLOCKS=blocks,
            PADDED=next_power_of_2(blocks),
            KEYS_PADDED=next_power_of_2(blocks * count),
            num_warps=4,
            **overlap(logits_NV),
        )
    return TokenLogprobs(chosen, values, ids)


token_logprobs = by_device(token_logprobs_triton, token_logprobs_reference)


_SMALLEST = constant(-(2**63))  # a key below all others


@jit
def _key(x, ids):
    """A key that sorts by x, then by the lower id. IEEE bits sort like integers once those of negative numbers are flipped."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    ordered = bits ^ ((bits >> 31) & INT_MAX)
    return (ordered.to(tl.int64) << 32) | (INT_MAX - ids).to(tl.int64)


@jit
def _value(key):
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & INT_MAX)).to(tl.float32, bitcast=True)


@jit
def _largest_of_block(
    logits_ptr,
    keys_ptr,
    sums_ptr,
    logits_stride,
    VOCAB: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    wait_for_inputs(PDL)
    x = tl.load(logits_ptr + row * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    keys = tl.where(inside, _key(x, ids), _SMALLEST)
    # A block's sum is relative to its largest logit, which the first key holds.
    largest = tl.max(x, axis=0)
    exponentials = tl.where(x > float("-inf"), tl.exp(x - largest), 0.0)
    tl.store(sums_ptr + row * BLOCKS + block, tl.sum(exponentials, axis=0))
    first = keys_ptr + (row * BLOCKS + block) * COUNT
    for place in range(COUNT):
        top = tl.max(keys, axis=0)
        tl.store(first + place, top)
        keys = tl.where(keys == top, _SMALLEST, keys)


@jit
def _merge_blocks(
    logits_ptr,
    tokens_ptr,
    keys_ptr,
    sums_ptr,
    chosen_ptr,
    values_ptr,
    ids_ptr,
    logits_stride,
    COUNT: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    place = tl.arange(0, KEYS_PADDED)
    wait_for_inputs(PDL)
    sums = tl.load(sums_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=0.0)
    firsts = tl.load(keys_ptr + (row * BLOCKS + block) * COUNT, mask=block < BLOCKS, other=_SMALLEST)
    keys = tl.load(keys_ptr + row * BLOCKS * COUNT + place, mask=place < BLOCKS * COUNT, other=_SMALLEST)
    token = tl.load(tokens_ptr + row)
    logit = tl.load(logits_ptr + row * logits_stride + token).to(tl.float32)
    largest = _value(tl.max(firsts, axis=0))
    scaled = tl.where(sums > 0, sums * tl.exp(_value(firsts) - largest), 0.0)
    total = largest + tl.log(tl.sum(scaled, axis=0))
    tl.store(chosen_ptr + row, logit - total)
    for index in range(COUNT):
        top = tl.max(keys, axis=0)
        tl.store(values_ptr + row * COUNT + index, _value(top) - total)
        tl.store(ids_ptr + row * COUNT + index, INT_MAX - (top & INT_MAX).to(tl.int32))
        keys = tl.where(keys == top, _SMALLEST, keys)
