"""Verification on the device: which drafted tokens are accepted, which tokens are emitted, and whether they end the answer.

Row t of a sequence's T = depth + 1 verified rows gives the target's own choice after the pending token and t drafted ones. Only
these choices are emitted: row 0's always, row t + 1's if row t's was emitted and equals the drafted token. A step emits 1 … T
tokens. If logits are NaN, an arbitrary token is emitted with a mark, and the answer ends.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.bits import has_bit
from fledge.kernels.sample import PartialArgmax, pick_or_none, picked_or_none
from fledge.kernels.triton_support import (
    by_device,
    constant,
    jit,
    let_next_start,
    next_power_of_2,
    overlap,
    tl,
    wait_for_inputs,
)

DRAFTED = 1 << 30  # set in `report` if the token came from the drafter
NOT_A_NUMBER = 1 << 29  # set in `report` if the logits were NaN
_DRAFTED, _NOT_A_NUMBER = constant(DRAFTED), constant(NOT_A_NUMBER)


class RowState(NamedTuple):
    """One entry per row of the running batch. `accept` changes the first five and `tokens`."""

    active: Tensor  # int32: 1 while the row runs
    token: Tensor  # int64: the pending token, the text's last; its key is not in the cache yet
    length: Tensor  # int32: length of the text, that token included
    answered: Tensor  # int32: tokens of the answer so far
    report: Tensor  # int32 [R, 1 + T…]: how many tokens the last step emitted, then the tokens
    limit: Tensor  # int32: most tokens of the answer
    min_answer: Tensor  # int32: a stop token before this many tokens does not end the answer
    depth_limit: Tensor  # int32: most drafted tokens that may be accepted per step
    stop_bits: Tensor  # int32 [R, W]: bit v % 32 of word v // 32 is set if token v is a stop token
    tokens: Tensor | None = None  # int32 [R, L]: the text by position; None: not kept


class Accepted(NamedTuple):
    tokens_BT: Tensor  # int64: the target's choices, emitted or not
    starts_B: Tensor  # int32: position of the first verified row
    counts_B: Tensor  # int32: tokens emitted; 0 if the row is empty or its answer has ended


def accept_reference(
    state: RowState, choice: PartialArgmax, drafts_RD: Tensor, num_new: int, vocab_size: int, rows_B: Tensor | None = None
) -> Accepted:
    """Accepts drafted tokens and updates `state`. `rows_B`: the rows to process; None: the first ones."""
    found_BT = picked_or_none(choice, vocab_size).view(-1, num_new)
    chosen_BT = found_BT.clamp(max=vocab_size - 1)
    rows = torch.arange(len(chosen_BT), device=chosen_BT.device) if rows_B is None else rows_B
    going, answered, limit = state.active[rows] != 0, state.answered[rows], state.limit[rows]
    least = state.min_answer[rows].clamp(min=1)
    starts, counts = state.length[rows] - 1, torch.zeros_like(answered)
    ended, last = torch.zeros_like(going), state.token[rows]
    for t in range(num_new):
        chosen, broken = chosen_BT[:, t], found_BT[:, t] == vocab_size
        drafted = torch.zeros_like(going)
        if t < num_new - 1:
            drafted = going & (drafts_RD[rows, t] == found_BT[:, t]) & (state.depth_limit[rows] > t)
        state.report[rows, 1 + t] = (chosen + drafted * DRAFTED + broken * NOT_A_NUMBER).int()
        if state.tokens is not None:
            at = (starts + 1 + t).long()
            kept = going & (at < state.tokens.shape[1])
            state.tokens[rows[kept], at[kept]] = chosen[kept].int()
        stopped = has_bit(state.stop_bits[rows], chosen[:, None])[:, 0] & (answered + t + 1 >= least)
        ends = going & (stopped | broken | (answered + t + 1 >= limit))
        counts += going
        last = torch.where(going, chosen, last)
        ended |= ends
        going = drafted & ~ends
    state.token[rows], state.length[rows], state.answered[rows] = last, starts + 1 + counts, answered + counts
    state.report[rows, 0] = counts
    state.active[rows] = state.active[rows] * ~ended
    return Accepted(chosen_BT, starts, counts * ~ended)


def accept_triton(
    state: RowState, choice: PartialArgmax, drafts_RD: Tensor, num_new: int, vocab_size: int, rows_B: Tensor | None = None
) -> Accepted:
    batch, num_blocks = len(choice.ids_NC) // num_new, choice.ids_NC.shape[1]
    device = state.token.device
    tokens = torch.empty((batch, num_new), dtype=torch.int64, device=device)
    starts, counts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    _accept[(batch,)](
        *state[:-1],
        state.tokens if state.tokens is not None else state.report,
        *choice,
        drafts_RD,
        rows_B if rows_B is not None else tokens,
        tokens,
        starts,
        counts,
        NEW=num_new,
        NEW_PADDED=next_power_of_2(num_new),
        REPORT=state.report.shape[1],
        WORDS=state.stop_bits.shape[1],
        TEXT=0 if state.tokens is None else state.tokens.shape[1],
        DRAFT=drafts_RD.shape[1],
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        PADDED=next_power_of_2(num_blocks),
        HAS_ROWS=rows_B is not None,
        num_warps=4 if num_blocks > 64 else 1,
        **overlap(tokens),
    )
    return Accepted(tokens, starts, counts)


accept = by_device(accept_triton, accept_reference)


@jit
def _accept(
    active_ptr,
    token_ptr,
    length_ptr,
    answered_ptr,
    report_ptr,
    limit_ptr,
    min_answer_ptr,
    depth_limit_ptr,
    stop_bits_ptr,
    text_ptr,
    best_ptr,
    ids_ptr,
    drafts_ptr,
    rows_ptr,
    tokens_ptr,
    starts_ptr,
    counts_ptr,
    NEW: tl.constexpr,
    NEW_PADDED: tl.constexpr,
    REPORT: tl.constexpr,
    WORDS: tl.constexpr,
    TEXT: tl.constexpr,  # length of the kept text; 0: none is kept
    DRAFT: tl.constexpr,
    VOCAB: tl.constexpr,
    BLOCKS: tl.constexpr,
    PADDED: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    index = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    row = index
    if HAS_ROWS:
        row = tl.load(rows_ptr + index)
    active = tl.load(active_ptr + row)
    answered = tl.load(answered_ptr + row)
    length = tl.load(length_ptr + row)
    limit = tl.load(limit_ptr + row)
    least = tl.maximum(tl.load(min_answer_ptr + row), 1)
    depth_limit = tl.load(depth_limit_ptr + row)
    last = tl.load(token_ptr + row)
    # All loads come before the first store, so that they overlap: the compiler moves no load above a store.
    at = tl.arange(0, NEW_PADDED)
    found = tl.full([NEW_PADDED], VOCAB - 1, tl.int32)
    for t in tl.static_range(NEW):
        found = tl.where(at == t, pick_or_none(best_ptr, ids_ptr, index * NEW + t, VOCAB, BLOCKS, PADDED), found)
    chosen = tl.minimum(found, VOCAB - 1)
    broken = found == VOCAB
    drafts = tl.load(drafts_ptr + row * DRAFT + at, mask=at < NEW - 1, other=-1)
    words = tl.load(stop_bits_ptr + row * WORDS + chosen // 32)
    number = answered + at + 1
    ends = (((words >> (chosen % 32)) & 1) != 0) & (number >= least) | (number >= limit) | broken
    drafted = (drafts == found) & (depth_limit > at) & (at < NEW - 1)
    goes_on = drafted & (ends == 0)
    # Tokens are emitted up to and including the first that is not accepted as a draft or ends the answer.
    count = tl.min(tl.where(goes_on, NEW, at + 1), axis=0)
    count = tl.where(active != 0, count, 0)
    emitted = at < count
    ended = tl.max((emitted & ends).to(tl.int32), axis=0) > 0
    final = tl.sum(tl.where(at == count - 1, chosen, 0), axis=0).to(tl.int64)
    reported = chosen + tl.where(emitted & drafted, _DRAFTED, 0) + tl.where(broken, _NOT_A_NUMBER, 0)
    tl.store(report_ptr + row * REPORT + 1 + at, reported, mask=at < NEW)
    tl.store(tokens_ptr + index * NEW + at, chosen.to(tl.int64), mask=at < NEW)
    if TEXT:
        tl.store(text_ptr + row * TEXT + length + at, chosen, mask=emitted & (length + at < TEXT))
    tl.store(token_ptr + row, tl.where(count > 0, final, last))
    tl.store(length_ptr + row, length + count)
    tl.store(answered_ptr + row, answered + count)
    tl.store(report_ptr + row * REPORT, count)
    tl.store(active_ptr + row, active * 0, mask=ended)
    tl.store(starts_ptr + index, length - 1)
    tl.store(counts_ptr + index, tl.where(ended, 0, count))
