"""Adjusts the logits of verified rows on the device: penalties, bias, bans and grammar masks, in one pass over the vocabulary.

Row t of a sequence's T = depth + 1 verified rows is adjusted for the text, the pending token and t drafted ones. The result
equals that of `speculation.distribution.adjust` to the bit; a row without options stays unchanged.

    repetition → presence and frequency → bias → stop tokens before `min_answer` → bad words → grammar mask
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.accept import RowState
from fledge.kernels.adjustments import BAD_WORDS, BIAS, MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, PENALTIES, Adjustments
from fledge.kernels.bits import unpack_bits
from fledge.kernels.triton_support import by_device, jit, let_next_start, next_power_of_2, overlap, tl, wait_for_inputs

BLOCK = 2048


def adjust_reference(
    logits_NV: Tensor,
    state: RowState,
    adjustments: Adjustments,
    drafts_RD: Tensor,
    num_new: int,
    rows_B: Tensor | None = None,
) -> Tensor:
    """Returns adjusted logits, float32 [N, V], of `num_new` verified positions of each row. `rows_B` None: the first rows.

    If bans and grammar forbid every token, the stop tokens are allowed, so that the answer ends.
    """
    a, vocab_size = adjustments, logits_NV.shape[1]
    x = logits_NV.float().clone().view(-1, num_new, vocab_size)
    rows = torch.arange(len(x), device=x.device) if rows_B is None else rows_B
    drafts = drafts_RD[rows, : num_new - 1]
    stops = unpack_bits(state.stop_bits[rows], vocab_size)
    for t in range(num_new):
        y, uses = x[:, t], a.options_R[rows, None]
        counts = a.counts_RV[rows].int()
        if t:
            before = drafts[:, :t].long()
            counts.scatter_add_(1, before.clamp(min=0), (before >= 0).int())
        seen = (counts > 0) | unpack_bits(a.prompt_RW[rows], vocab_size)
        repetition, presence, frequency = (z[rows, None] for z in (a.repetition_R, a.presence_R, a.frequency_R))
        repeated = torch.where(y > 0, y / repetition, y * repetition)
        y = torch.where((uses & PENALTIES != 0) & seen & (repetition != 1), repeated, y)
        y = torch.where((uses & PENALTIES != 0) & (counts > 0), y - (presence + frequency * counts), y)
        y = torch.where(uses & BIAS != 0, y + a.bias_RV[rows], y)
        y = y.masked_fill(stops & (state.answered[rows] + t < state.min_answer[rows])[:, None], -torch.inf)
        if state.tokens is not None:
            y = y.masked_fill(_bad_tokens(state, a, drafts, rows, t, vocab_size) & (uses & BAD_WORDS != 0), -torch.inf)
        allowed = unpack_bits(a.mask_RTW[rows, t], vocab_size) | (a.has_mask_R[rows] == 0)[:, None]
        y = y.masked_fill(~allowed, -torch.inf)
        x[:, t] = torch.where((y == -torch.inf).all(-1, keepdim=True) & stops, 0.0, y)
    return x.view(-1, vocab_size)


def _bad_tokens(state: RowState, a: Adjustments, drafts_BD: Tensor, rows: Tensor, t: int, vocab_size: int) -> Tensor:
    """The tokens that would complete a bad word after `t` drafted ones, bool [B, V]."""
    words = a.bad_words_RBL[rows]
    matches = words[:, :, -1] >= 0
    for back in range(1, words.shape[2]):
        at = (state.length[rows] + t - back).long()
        before = drafts_BD[:, t - back] if back <= t else state.tokens[rows, at.clamp(min=0)]
        word = words[:, :, -1 - back]
        matches &= (word < 0) | ((word == before[:, None]) & (at >= 0)[:, None])
    last = torch.where(matches, words[:, :, -1], vocab_size).long()
    return torch.zeros((len(rows), vocab_size + 1), dtype=torch.bool, device=rows.device).scatter_(1, last, True)[:, :-1]


def adjust_triton(
    logits_NV: Tensor,
    state: RowState,
    adjustments: Adjustments,
    drafts_RD: Tensor,
    num_new: int,
    rows_B: Tensor | None = None,
) -> Tensor:
    a, (num_rows, vocab_size) = adjustments, logits_NV.shape
    assert logits_NV.stride(1) == 1
    assert num_new <= a.mask_RTW.shape[1]
    out = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=logits_NV.device)
    blocks = -(-vocab_size // BLOCK)
    largest = torch.empty((num_rows, blocks), dtype=torch.float32, device=logits_NV.device)
    words = a.prompt_RW.shape[1]
    if not num_rows:
        return out
    shared = {"NEW": num_new, "VOCAB": vocab_size, "WORDS": words, "HAS_ROWS": rows_B is not None, **overlap(logits_NV)}
    rows = rows_B if rows_B is not None else largest
    _adjust[(num_rows, blocks)](
        logits_NV,
        out,
        largest,
        rows,
        drafts_RD,
        state.length,
        state.answered,
        state.min_answer,
        state.stop_bits,
        state.tokens if state.tokens is not None else state.report,
        *a,
        logits_NV.stride(0),
        DRAFT=drafts_RD.shape[1],
        TEXT=0 if state.tokens is None else state.tokens.shape[1],
        POSITIONS=a.mask_RTW.shape[1],
        BAD_WORDS=MAX_BAD_WORDS,
        BAD_LENGTH=MAX_BAD_WORD_TOKENS,
        BLOCK=BLOCK,
        BLOCKS=blocks,
        num_warps=4,
        enable_fp_fusion=False,  # a fused multiply-add rounds once, the reference twice
        **shared,
    )
    _allow_stop_tokens_if_all_banned[(num_rows,)](
        out, largest, rows, state.stop_bits, BLOCK=BLOCK, BLOCKS=blocks, PADDED=next_power_of_2(blocks), num_warps=4, **shared
    )
    return out


adjust = by_device(adjust_triton, adjust_reference)


@jit
def _bits(ptr, ids, inside):
    """The bits of these ids in a bit set: 0 or 1."""
    return (tl.load(ptr + ids // 32, mask=inside, other=0) >> (ids % 32)) & 1


@jit
def _adjust(
    logits_ptr,
    out_ptr,
    largest_ptr,
    rows_ptr,
    drafts_ptr,
    length_ptr,
    answered_ptr,
    min_answer_ptr,
    stop_bits_ptr,
    text_ptr,
    options_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    counts_ptr,
    prompt_ptr,
    bias_ptr,
    bad_words_ptr,
    has_mask_ptr,
    mask_ptr,
    logits_stride,
    NEW: tl.constexpr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    DRAFT: tl.constexpr,
    TEXT: tl.constexpr,
    POSITIONS: tl.constexpr,
    BAD_WORDS: tl.constexpr,
    BAD_LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    n = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    t = (n % NEW).to(tl.int32)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    wait_for_inputs(PDL)
    row = n // NEW
    if HAS_ROWS:
        row = tl.load(rows_ptr + row)
    x = tl.load(logits_ptr + n * logits_stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    options = tl.load(options_ptr + row)
    has_mask = tl.load(has_mask_ptr + row)
    too_early = tl.load(answered_ptr + row) + t < tl.load(min_answer_ptr + row)
    if (options & 1) != 0:  # PENALTIES
        counts = tl.load(counts_ptr + row * VOCAB + ids, mask=inside, other=0).to(tl.int32)
        for place in tl.static_range(NEW - 1):
            draft = tl.load(drafts_ptr + row * DRAFT + place).to(tl.int32)
            counts += ((ids == draft) & (place < t)).to(tl.int32)
        repetition = tl.load(repetition_ptr + row)
        if repetition != 1.0:
            seen = (counts > 0) | (_bits(prompt_ptr + row * WORDS, ids, inside) != 0)
            factors = tl.zeros([BLOCK], tl.float32) + repetition
            repeated = tl.where(x > 0, tl.div_rn(x, factors), x * factors)
            x = tl.where(seen, repeated, x)
        penalty = tl.load(presence_ptr + row) + tl.load(frequency_ptr + row) * counts.to(tl.float32)
        x = tl.where(counts > 0, x - penalty, x)
    if (options & 2) != 0:  # BIAS
        x = x + tl.load(bias_ptr + row * VOCAB + ids, mask=inside, other=0.0)
    if too_early:
        x = tl.where(_bits(stop_bits_ptr + row * WORDS, ids, inside) != 0, float("-inf"), x)
    if ((options & 4) != 0) & (TEXT > 0):  # BAD_WORDS
        length = tl.load(length_ptr + row)
        word = tl.arange(0, BAD_WORDS)
        words = bad_words_ptr + (row * BAD_WORDS + word) * BAD_LENGTH
        last = tl.load(words + BAD_LENGTH - 1)
        matches = last >= 0
        for back in tl.static_range(1, BAD_LENGTH):
            at = length + t - back
            drafted = tl.load(drafts_ptr + row * DRAFT + t - back, mask=back <= t, other=-1).to(tl.int32)
            written = tl.load(text_ptr + row * TEXT + at, mask=(back > t) & (at >= 0) & (at < TEXT), other=-2)
            before = tl.where(back <= t, drafted, written)
            token = tl.load(words + BAD_LENGTH - 1 - back)
            matches = matches & ((token < 0) | (token == before))
        last = tl.where(matches, last, -1)
        for index in range(BAD_WORDS):
            bad = tl.sum(tl.where(word == index, last, 0), axis=0)
            x = tl.where(ids == bad, float("-inf"), x)
    if has_mask != 0:
        allowed = _bits(mask_ptr + (row * POSITIONS + t) * WORDS, ids, inside)
        x = tl.where(allowed != 0, x, float("-inf"))
    tl.store(out_ptr + n * VOCAB + ids, x, mask=inside)
    # NaN counts as not banned. A maximum would ignore it, so it is replaced by 0.
    tl.store(largest_ptr + n * BLOCKS + block, tl.max(tl.where(x != x, 0.0, x), axis=0))


@jit
def _allow_stop_tokens_if_all_banned(
    out_ptr,
    largest_ptr,
    rows_ptr,
    stop_bits_ptr,
    NEW: tl.constexpr,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    n = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, PADDED)
    wait_for_inputs(PDL)
    row = n // NEW
    if HAS_ROWS:
        row = tl.load(rows_ptr + row)
    largest = tl.load(largest_ptr + n * BLOCKS + blocks, mask=blocks < BLOCKS, other=float("-inf"))
    if tl.max(largest, axis=0) == float("-inf"):
        for block in range(BLOCKS):
            ids = block * BLOCK + tl.arange(0, BLOCK)
            stops = _bits(stop_bits_ptr + row * WORDS, ids, ids < VOCAB)
            tl.store(out_ptr + n * VOCAB + ids, ids * 0.0, mask=(ids < VOCAB) & (stops != 0))
