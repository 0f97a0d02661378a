"""Chooses each row's next token on the device: the likeliest, or drawn by the Gumbel-max trick within top-k, min-p and top-p.

    token = argmax(logits / temperature + gumbel noise)          temperature 0: no noise, ties go to the lower id

The noise is a pure function (Philox 4x32-10) of the row's seed, the token's index in its answer and the vocabulary id, so a
request's draws do not depend on the other rows of the batch. One Philox call gives noise for four ids, QUARTER apart.

It also couples drafter and target: both draw their n-th token with the same noise, so a drafter whose distribution is close to
the target's mostly draws the same token. A drafted token is accepted if it equals the token that the target draws; the token
emitted is always the target's own draw, the same with and without speculation.

A `PartialArgmax` is an unfinished argmax: the best token of each block of the vocabulary. The result is the best of these.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.sample_cpu import QUARTER, draw_row, lowest_kept, noise_of_all
from fledge.kernels.triton_support import (
    INT_MAX,
    by_device,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    tl,
    use_triton,
    wait_for_inputs,
)
from fledge.kernels.truncation import TruncationParams, floor_reference, floor_triton, keeps_all, scaled_logits


class PartialArgmax(NamedTuple):
    best_NC: Tensor  # float32, one per block of the vocabulary
    ids_NC: Tensor  # int32, target ids


class SamplingState(NamedTuple):
    """The sampling parameters of B sequences."""

    temperatures_B: Tensor
    seeds_B: Tensor
    counters_B: Tensor  # how many tokens were drawn before
    truncation: TruncationParams | None = None  # None: no truncation


def choose_reference(
    logits_NV: Tensor, draws: SamplingState | None = None, num_new: int = 1, ahead: int = 0, ids_V: Tensor | None = None
) -> PartialArgmax:
    """Chooses `num_new` consecutive tokens of each of B sequences, starting `ahead` tokens after the next one.

    `draws` None: greedy. `ids_V`: the target ids of the columns (of a draft vocabulary), ascending.
    """
    if draws is None:
        column = logits_NV.argmax(-1)
    else:
        temperatures, seeds, counters = (x.repeat_interleave(num_new) for x in draws[:3])
        counters = counters + ahead + torch.arange(num_new, device=counters.device).repeat(len(draws.seeds_B))
        truncation = None if draws.truncation is None else draws.truncation.repeated(num_new)
        sample = sample_cpu if logits_NV.is_cpu else sample_reference
        column = sample(logits_NV, temperatures, seeds, counters, truncation=truncation, ids_V=ids_V)
    ids = column if ids_V is None else ids_V[column]
    return PartialArgmax(logits_NV.gather(1, column[:, None]).float(), ids[:, None].int())


def picked(choice: PartialArgmax, vocab_size: int) -> Tensor:
    """The chosen tokens, int64 [N]; ties go to the lower id. NaN logits give an arbitrary token."""
    if choice.ids_NC.shape[1] == 1:
        return choice.ids_NC[:, 0].long()
    return picked_or_none(choice, vocab_size).clamp(max=vocab_size - 1)


def picked_or_none(choice: PartialArgmax, vocab_size: int) -> Tensor:
    """The chosen tokens, int64 [N]; `vocab_size` where the logits are NaN."""
    if not use_triton(choice.ids_NC):
        best = choice.best_NC.masked_fill(choice.best_NC.isnan(), -torch.inf)
        top = choice.best_NC == best.amax(-1, keepdim=True)
        return choice.ids_NC.masked_fill(~top, vocab_size).amin(-1).clamp(max=vocab_size).long()
    num_rows, num_blocks = choice.best_NC.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=choice.best_NC.device)
    _best_of_row[(num_rows,)](
        choice.best_NC, choice.ids_NC, tokens, VOCAB=vocab_size, BLOCKS=num_blocks, PADDED=next_power_of_2(num_blocks)
    )
    return tokens


def sample_reference(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    seeds_B: Tensor,
    counters_B: Tensor,
    truncation: TruncationParams | None = None,
    ids_V: Tensor | None = None,
) -> Tensor:
    """The drawn columns, int64 [B]. `counters_B`: how many tokens each row has drawn before.

    `truncation`: None: no truncation. `ids_V`: the ids of the columns.
    """
    scaled = scaled_logits(logits_BV, temperatures_B)
    if truncation is not None:
        scaled = scaled.masked_fill(scaled < floor_reference(logits_BV, temperatures_B, truncation)[:, None], -torch.inf)
    if bool((temperatures_B > 0).any()):
        noise = gumbel_noise(seeds_B, counters_B, logits_BV.shape[1] if ids_V is None else int(ids_V[-1]) + 1)
        noise = noise if ids_V is None else noise[:, ids_V]
        scaled = torch.where(temperatures_B[:, None] > 0, scaled + noise, scaled)
    return scaled.argmax(-1)


def sample_cpu(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    seeds_B: Tensor,
    counters_B: Tensor,
    truncation: TruncationParams | None = None,
    ids_V: Tensor | None = None,
) -> Tensor:
    """A faster `sample_reference` for CPU; returns the same columns."""
    scaled, floors = scaled_logits(logits_BV, temperatures_B), [-math.inf] * len(logits_BV)
    if truncation is not None:
        settings = zip(
            keeps_all(temperatures_B, truncation).tolist(),
            *(x.tolist() for x in (*truncation[:2], truncation.min_ps_B.log())),
            strict=True,
        )
        floors = [
            -math.inf if all_kept else lowest_kept(row, *cut) for row, (all_kept, *cut) in zip(scaled, settings, strict=True)
        ]
    rows = zip(scaled, seeds_B.tolist(), counters_B.tolist(), floors, (temperatures_B > 0).tolist(), strict=True)
    return torch.tensor([draw_row(*row, ids_V) if sampled else int(row[0].argmax()) for *row, sampled in rows])


def gumbel_noise(seeds_B: Tensor, counters_B: Tensor, vocab_size: int) -> Tensor:
    rows = zip(seeds_B.tolist(), counters_B.tolist(), strict=True)
    return torch.stack([torch.from_numpy(noise_of_all(*row, vocab_size)) for row in rows]).to(seeds_B.device)


def choose_triton(
    logits_NV: Tensor, draws: SamplingState | None = None, num_new: int = 1, ahead: int = 0, ids_V: Tensor | None = None
) -> PartialArgmax:
    num_rows, vocab_size = logits_NV.shape
    assert logits_NV.stride(1) == 1
    floors_N = None
    if draws is not None and draws.truncation is not None:
        floors_N = floor_triton(logits_NV, draws.temperatures_B, draws.truncation, num_new)
    num_blocks = -(-vocab_size // (4 * QUARTER))
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=logits_NV.device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits_NV.device)
    if num_rows:
        _best_of_block[(num_rows, num_blocks)](
            logits_NV,
            draws.temperatures_B if draws is not None else best,
            floors_N if floors_N is not None else best,
            draws.seeds_B if draws is not None else ids,
            draws.counters_B if draws is not None else ids,
            ids_V if ids_V is not None else ids,
            best,
            ids,
            logits_NV.stride(0),
            NEW=num_new,
            AHEAD=ahead,
            VOCAB=vocab_size,
            BLOCKS=num_blocks,
            PER_WORD=QUARTER,
            GREEDY=draws is None,
            HAS_FLOOR=floors_N is not None,
            HAS_IDS=ids_V is not None,
            num_warps=4,
            **overlap(logits_NV),
        )
    return PartialArgmax(best, ids)


choose = by_device(choose_triton, choose_reference)


@jit
def _gumbel(word):
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@jit
def _noise_of_ids(seed, ids, counter, PER_WORD: tl.constexpr):
    """Noise of arbitrary ids, one Philox call each."""
    zeros = ids * 0
    w0, w1, w2, w3 = tl.philox(seed, ids // (4 * PER_WORD) * PER_WORD + ids % PER_WORD, zeros + counter, zeros, zeros)
    word = ids // PER_WORD % 4
    return _gumbel(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@jit
def _best_of_block(
    logits_ptr,
    temperatures_ptr,
    floors_ptr,
    seeds_ptr,
    counters_ptr,
    target_ids_ptr,
    best_ptr,
    best_ids_ptr,
    logits_stride,
    NEW: tl.constexpr,
    AHEAD: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    GREEDY: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
    HAS_IDS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    sequence = row // NEW
    block = tl.program_id(1)
    lane = tl.arange(0, PER_WORD)
    id0 = block * (4 * PER_WORD) + lane
    id1, id2, id3 = id0 + PER_WORD, id0 + 2 * PER_WORD, id0 + 3 * PER_WORD
    logits = logits_ptr + row * logits_stride
    wait_for_inputs(PDL)
    x0 = tl.load(logits + id0, mask=id0 < VOCAB, other=float("-inf")).to(tl.float32)
    x1 = tl.load(logits + id1, mask=id1 < VOCAB, other=float("-inf")).to(tl.float32)
    x2 = tl.load(logits + id2, mask=id2 < VOCAB, other=float("-inf")).to(tl.float32)
    x3 = tl.load(logits + id3, mask=id3 < VOCAB, other=float("-inf")).to(tl.float32)
    if HAS_IDS:
        id0 = tl.load(target_ids_ptr + id0, mask=id0 < VOCAB, other=INT_MAX).to(tl.int32)
        id1 = tl.load(target_ids_ptr + id1, mask=id1 < VOCAB, other=INT_MAX).to(tl.int32)
        id2 = tl.load(target_ids_ptr + id2, mask=id2 < VOCAB, other=INT_MAX).to(tl.int32)
        id3 = tl.load(target_ids_ptr + id3, mask=id3 < VOCAB, other=INT_MAX).to(tl.int32)
    if not GREEDY:
        temperature = tl.load(temperatures_ptr + sequence)
        if temperature > 0:
            scale = 1.0 / temperature
            x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
            if HAS_FLOOR:
                floor = tl.load(floors_ptr + row)
                x0 = tl.where(x0 < floor, float("-inf"), x0)
                x1 = tl.where(x1 < floor, float("-inf"), x1)
                x2 = tl.where(x2 < floor, float("-inf"), x2)
                x3 = tl.where(x3 < floor, float("-inf"), x3)
            seed = tl.load(seeds_ptr + sequence)
            counter = tl.load(counters_ptr + sequence).to(tl.int32) + AHEAD + (row % NEW).to(tl.int32)
            if HAS_IDS:
                x0 += _noise_of_ids(seed, id0, counter, PER_WORD)
                x1 += _noise_of_ids(seed, id1, counter, PER_WORD)
                x2 += _noise_of_ids(seed, id2, counter, PER_WORD)
                x3 += _noise_of_ids(seed, id3, counter, PER_WORD)
            else:
                zeros = lane * 0
                w0, w1, w2, w3 = tl.philox(seed, block * PER_WORD + lane, zeros + counter, zeros, zeros)
                x0, x1, x2, x3 = x0 + _gumbel(w0), x1 + _gumbel(w1), x2 + _gumbel(w2), x3 + _gumbel(w3)
    # The larger of NaN and a number is the number, so its id is taken: past the vocabulary's end that is padding's.
    best01, best23 = tl.maximum(x0, x1), tl.maximum(x2, x3)
    ids01, ids23 = tl.where(x0 == best01, id0, id1), tl.where(x2 == best23, id2, id3)
    best = tl.maximum(best01, best23)
    ids = tl.where(best01 == best, ids01, ids23)
    top = tl.max(best, axis=0)
    tl.store(best_ptr + row * BLOCKS + block, top)
    tl.store(best_ids_ptr + row * BLOCKS + block, tl.min(tl.where(best == top, ids, INT_MAX), axis=0))


@jit
def pick(best_ptr, ids_ptr, row, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The best block's token, for use inside another kernel. NaN logits give the last id."""
    return tl.minimum(pick_or_none(best_ptr, ids_ptr, row, VOCAB, BLOCKS, PADDED), VOCAB - 1)


@jit
def pick_or_none(best_ptr, ids_ptr, row, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    """The best block's token; VOCAB if the logits are NaN: then no block has a best id, or padding is the best."""
    block = tl.arange(0, PADDED)
    best = tl.load(best_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    ids = tl.load(ids_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=VOCAB)
    top = tl.max(best, axis=0)
    return tl.minimum(tl.min(tl.where(best == top, ids, VOCAB), axis=0), VOCAB)


@jit
def _best_of_row(best_ptr, ids_ptr, tokens_ptr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    tl.store(tokens_ptr + row, pick_or_none(best_ptr, ids_ptr, row, VOCAB, BLOCKS, PADDED).to(tl.int64))
