"""The next token of each row, on the device: the likeliest, or drawn by the Gumbel-max trick, within top-p where asked.

    token = argmax(logits / temperature + gumbel noise)          temperature 0: no noise, ties go to the lower id

The noise is a pure function (Philox 4x32-10) of the row's seed, the token's number in its answer and the vocabulary id, so
that a request's draws do not depend on who else is in the batch. One Philox call gives noise for four ids, QUARTER apart.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fledge.kernels.triton_support import jit, next_power_of_2, tl, use_triton

QUARTER = 1024
BISECTIONS = 24  # of a range of about log(vocabulary): to a millionth in log-probability


def sample(
    logits_BV: Tensor, temperatures_B: Tensor, seeds_B: Tensor, counters_B: Tensor, top_ps_B: Tensor | None = None
) -> Tensor:
    """Token ids, int64 [B]. `counters_B`: how many tokens each row has drawn before. `top_ps_B` None: nothing is cut off."""
    if use_triton(logits_BV):
        floors = None if top_ps_B is None else top_p_floor_triton(logits_BV, temperatures_B, top_ps_B)
        return sample_triton(logits_BV, temperatures_B, seeds_B, counters_B, floors)
    floors = None if top_ps_B is None else top_p_floor_reference(logits_BV, temperatures_B, top_ps_B)
    return sample_reference(logits_BV, temperatures_B, seeds_B, counters_B, floors)


def top_p_floor_reference(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> Tensor:
    """The lowest logits / temperature that top-p keeps; ties with it are kept too. -inf where temperature is 0."""
    scaled = _scaled(logits_BV, temperatures_B)
    ordered = scaled.sort(-1, descending=True).values
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    num_kept = (before < top_ps_B[:, None]).sum(-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, num_kept - 1)[:, 0].masked_fill(temperatures_B <= 0, -torch.inf)


def sample_reference(
    logits_BV: Tensor, temperatures_B: Tensor, seeds_B: Tensor, counters_B: Tensor, floors_B: Tensor | None = None
) -> Tensor:
    scaled = _scaled(logits_BV, temperatures_B)
    if floors_B is not None:
        scaled = scaled.masked_fill(scaled < floors_B[:, None], -torch.inf)
    if bool((temperatures_B > 0).any()):
        noise = gumbel_noise(seeds_B, counters_B, logits_BV.shape[1])
        scaled = torch.where(temperatures_B[:, None] > 0, scaled + noise, scaled)
    return scaled.argmax(-1)


def _scaled(logits_BV: Tensor, temperatures_B: Tensor) -> Tensor:
    return logits_BV.float() * torch.where(temperatures_B > 0, 1.0 / temperatures_B, 1.0)[:, None]


def gumbel_noise(seeds_B: Tensor, counters_B: Tensor, vocab_size: int) -> Tensor:
    ids = torch.arange(vocab_size, device=seeds_B.device)
    lane = ids // (4 * QUARTER) * QUARTER + ids % QUARTER
    words = torch.stack(philox(seeds_B[:, None].long(), lane[None, :], counters_B[:, None].long()))
    word = words.gather(0, (ids // QUARTER % 4).expand(1, *words.shape[1:]))[0]
    uniform = ((word >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def philox(seeds: Tensor, c0: Tensor, c1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox 4x32-10: four 32-bit words (as int64) for key `seeds` (64 bits) and counter (c0, c1, 0, 0)."""
    low = 0xFFFFFFFF
    key0, key1 = seeds & low, (seeds >> 32) & low
    c0, c1 = torch.broadcast_tensors(c0, c1)
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        high_a, low_a = _multiply(0xD2511F53, c0)
        high_b, low_b = _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ key0, low_b, high_a ^ c3 ^ key1, low_a
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return c0, c1, c2, c3


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a product, in halves of `word` so that int64 does not overflow."""
    low_product = factor * (word & 0xFFFF)
    upper = factor * (word >> 16) + (low_product >> 16)  # the product without its lowest 16 bits
    return upper >> 16, ((upper & 0xFFFF) << 16) | (low_product & 0xFFFF)


def top_p_floor_triton(logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor) -> Tensor:
    """By bisection instead of a sort: 25 readings of a row that stays in the cache of the device."""
    batch, vocab_size = logits_BV.shape
    floors = torch.empty(batch, dtype=torch.float32, device=logits_BV.device)
    if batch:
        _top_p_floor[(batch,)](
            logits_BV,
            temperatures_B,
            top_ps_B,
            floors,
            logits_BV.stride(0),
            VOCAB=vocab_size,
            LOG_VOCAB=math.log(vocab_size),
            BLOCK=min(next_power_of_2(vocab_size), 4096),
            STEPS=BISECTIONS,
            num_warps=8,
        )
    return floors


def sample_triton(
    logits_BV: Tensor, temperatures_B: Tensor, seeds_B: Tensor, counters_B: Tensor, floors_B: Tensor | None = None
) -> Tensor:
    batch, vocab_size = logits_BV.shape
    assert logits_BV.stride(1) == 1
    num_blocks = -(-vocab_size // (4 * QUARTER))
    best = torch.empty((batch, num_blocks), dtype=torch.float32, device=logits_BV.device)
    best_ids = torch.empty((batch, num_blocks), dtype=torch.int32, device=logits_BV.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits_BV.device)
    if batch:
        _best_of_block[(batch, num_blocks)](
            logits_BV,
            temperatures_B,
            floors_B if floors_B is not None else temperatures_B,
            seeds_B,
            counters_B,
            best,
            best_ids,
            logits_BV.stride(0),
            VOCAB=vocab_size,
            BLOCKS=num_blocks,
            PER_WORD=QUARTER,
            HAS_FLOOR=floors_B is not None,
            num_warps=4,
        )
        _best_of_row[(batch,)](
            best, best_ids, tokens, VOCAB=vocab_size, BLOCKS=num_blocks, PADDED=next_power_of_2(num_blocks), num_warps=1
        )
    return tokens


@jit
def _gumbel(word):
    uniform = ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    return -tl.log(-tl.log(uniform))


@jit
def _best_of_block(
    logits_ptr,
    temperatures_ptr,
    floors_ptr,
    seeds_ptr,
    counters_ptr,
    best_ptr,
    best_ids_ptr,
    logits_stride,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PER_WORD: tl.constexpr,
    HAS_FLOOR: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = tl.arange(0, PER_WORD)
    id0 = block * (4 * PER_WORD) + lane
    id1, id2, id3 = id0 + PER_WORD, id0 + 2 * PER_WORD, id0 + 3 * PER_WORD
    logits = logits_ptr + row * logits_stride
    x0 = tl.load(logits + id0, mask=id0 < VOCAB, other=float("-inf")).to(tl.float32)
    x1 = tl.load(logits + id1, mask=id1 < VOCAB, other=float("-inf")).to(tl.float32)
    x2 = tl.load(logits + id2, mask=id2 < VOCAB, other=float("-inf")).to(tl.float32)
    x3 = tl.load(logits + id3, mask=id3 < VOCAB, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        scale = 1.0 / temperature
        x0, x1, x2, x3 = x0 * scale, x1 * scale, x2 * scale, x3 * scale
        if HAS_FLOOR:
            floor = tl.load(floors_ptr + row)
            x0 = tl.where(x0 < floor, float("-inf"), x0)
            x1 = tl.where(x1 < floor, float("-inf"), x1)
            x2 = tl.where(x2 < floor, float("-inf"), x2)
            x3 = tl.where(x3 < floor, float("-inf"), x3)
        zeros = lane * 0
        counter = zeros + tl.load(counters_ptr + row).to(tl.int32)
        w0, w1, w2, w3 = tl.philox(tl.load(seeds_ptr + row), block * PER_WORD + lane, counter, zeros, zeros)
        x0, x1, x2, x3 = x0 + _gumbel(w0), x1 + _gumbel(w1), x2 + _gumbel(w2), x3 + _gumbel(w3)
    best01, ids01 = tl.maximum(x0, x1), tl.where(x1 > x0, id1, id0)
    best23, ids23 = tl.maximum(x2, x3), tl.where(x3 > x2, id3, id2)
    best, ids = tl.maximum(best01, best23), tl.where(best23 > best01, ids23, ids01)
    top = tl.max(best, axis=0)
    tl.store(best_ptr + row * BLOCKS + block, top)
    tl.store(best_ids_ptr + row * BLOCKS + block, tl.min(tl.where(best == top, ids, VOCAB - 1), axis=0))


@jit
def _best_of_row(best_ptr, best_ids_ptr, tokens_ptr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PADDED: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)
    best = tl.load(best_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=float("-inf"))
    ids = tl.load(best_ids_ptr + row * BLOCKS + block, mask=block < BLOCKS, other=VOCAB - 1)
    top = tl.max(best, axis=0)
    token = tl.min(tl.where(best == top, ids, VOCAB - 1), axis=0)
    tl.store(tokens_ptr + row, token.to(tl.int64))


@jit
def _top_p_floor(
    logits_ptr,
    temperatures_ptr,
    top_ps_ptr,
    floors_ptr,
    logits_stride,
    VOCAB: tl.constexpr,
    LOG_VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    STEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    floor = tl.full([], float("-inf"), tl.float32)
    if temperature > 0:
        scale = 1.0 / temperature
        lane = tl.arange(0, BLOCK)
        logits = logits_ptr + row * logits_stride
        peaks = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf")).to(tl.float32)
            peaks = tl.maximum(peaks, x)
        peak = tl.max(peaks, axis=0)
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, VOCAB, BLOCK):
            x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf")).to(tl.float32)
            sums += tl.exp((x - peak) * scale)
        top_p = tl.load(top_ps_ptr + row)
        wanted = top_p * tl.sum(sums, axis=0)
        # All ids together below this weigh less than 1 - top_p, so what lies above always suffices.
        low = tl.log(tl.maximum(1.0 - top_p, 1e-7)) - LOG_VOCAB
        high = low * 0.0
        for _ in range(STEPS):
            middle = (low + high) * 0.5
            sums = tl.zeros([BLOCK], tl.float32)
            for start in range(0, VOCAB, BLOCK):
                x = tl.load(logits + start + lane, mask=start + lane < VOCAB, other=float("-inf")).to(tl.float32)
                x = (x - peak) * scale
                sums += tl.where(x >= middle, tl.exp(x), 0.0)
            enough = tl.sum(sums, axis=0) >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        floor = peak * scale + low
    tl.store(floors_ptr + row, floor)
