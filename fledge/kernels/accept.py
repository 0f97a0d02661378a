"""Verification on the device: which drafted tokens stand, what is said next, and whether that ends the answer.

Row t of a sequence's T = depth + 1 verified rows gives the target's own choice after the pending token and t drafted ones. The
choice is always what is said; the next row's counts too if the drafted token was just that. So a step says 1 … T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.sample import Choice, pick, picked
from fledge.kernels.triton_support import jit, let_next_start, next_power_of_2, overlap, tl, use_triton, wait_for_inputs

DRAFTED = 1 << 30  # set in `answers` and `report` where the token came from the drafter


class RowState(NamedTuple):
    """One entry per row of the running batch; all but the last three settings change here."""

    active: Tensor  # int32: 1 while the row runs
    token: Tensor  # int64: the last of the text; its key is not in the cache yet
    length: Tensor  # int32: of the text, that token included
    answered: Tensor  # int32: tokens of the answer so far
    answers: Tensor  # int32 [R, A]
    status: Tensor  # int32: 0 running or empty; else the finished answer's length
    report: Tensor  # int32 [R, 1 + T…]: how many tokens the last step said, then the tokens
    limit: Tensor  # int32: most tokens of the answer
    depth_limit: Tensor  # int32: most drafted tokens a step that may stand
    stop_ids: Tensor  # int64 [R, S], -1: none


class Accepted(NamedTuple):
    tokens_BT: Tensor  # int64: the target's choices, said or not
    starts_B: Tensor  # int32: position of the first verified row
    counts_B: Tensor  # int32: tokens said; 0 where the row is empty or has ended


def accept(
    state: RowState, choice: Choice, drafts_RD: Tensor, num_new: int, vocab_size: int, rows_B: Tensor | None = None
) -> Accepted:
    """`rows_B`: the rows concerned; None: the first ones."""
    run = accept_triton if use_triton(state.token) else accept_reference
    return run(state, choice, drafts_RD, num_new, vocab_size, rows_B)


def accept_reference(
    state: RowState, choice: Choice, drafts_RD: Tensor, num_new: int, vocab_size: int, rows_B: Tensor | None = None
) -> Accepted:
    chosen_BT = picked(choice, vocab_size).view(-1, num_new)
    rows = torch.arange(len(chosen_BT), device=chosen_BT.device) if rows_B is None else rows_B
    going, answered, limit = state.active[rows] != 0, state.answered[rows], state.limit[rows]
    starts, counts = state.length[rows] - 1, torch.zeros_like(answered)
    ended, last = torch.zeros_like(going), state.token[rows]
    for t in range(num_new):
        chosen = chosen_BT[:, t]
        drafted = torch.zeros_like(going)
        if t < num_new - 1:
            drafted = going & (drafts_RD[rows, t] == chosen) & (state.depth_limit[rows] > t)
        said = (chosen + drafted * DRAFTED).int()
        state.answers[rows[going], (answered + t)[going].long()] = said[going]
        state.report[rows, 1 + t] = said
        ends = going & ((chosen[:, None] == state.stop_ids[rows]).any(-1) | (answered + t + 1 >= limit))
        counts += going
        last = torch.where(going, chosen, last)
        ended |= ends
        going = drafted & ~ends
    state.token[rows], state.length[rows], state.answered[rows] = last, starts + 1 + counts, answered + counts
    state.report[rows, 0] = counts
    state.status[rows] = torch.where(ended, answered + counts, state.status[rows])
    state.active[rows] = state.active[rows] * ~ended
    return Accepted(chosen_BT, starts, counts * ~ended)


def accept_triton(
    state: RowState, choice: Choice, drafts_RD: Tensor, num_new: int, vocab_size: int, rows_B: Tensor | None = None
) -> Accepted:
    batch, num_blocks = len(choice.ids_NC) // num_new, choice.ids_NC.shape[1]
    device = state.token.device
    tokens = torch.empty((batch, num_new), dtype=torch.int64, device=device)
    starts, counts = (torch.empty(batch, dtype=torch.int32, device=device) for _ in range(2))
    _accept[(batch,)](
        *state,
        *choice,
        drafts_RD,
        rows_B if rows_B is not None else tokens,
        tokens,
        starts,
        counts,
        NEW=num_new,
        ANSWER=state.answers.shape[1],
        REPORT=state.report.shape[1],
        STOPS=state.stop_ids.shape[1],
        STOPS_BLOCK=next_power_of_2(state.stop_ids.shape[1]),
        DRAFT=drafts_RD.shape[1],
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        PADDED=next_power_of_2(num_blocks),
        HAS_ROWS=rows_B is not None,
        num_warps=4 if num_blocks > 64 else 1,
        **overlap(tokens),
    )
    return Accepted(tokens, starts, counts)


@jit
def _accept(
    active_ptr,
    token_ptr,
    length_ptr,
    answered_ptr,
    answers_ptr,
    status_ptr,
    report_ptr,
    limit_ptr,
    depth_limit_ptr,
    stop_ids_ptr,
    best_ptr,
    ids_ptr,
    drafts_ptr,
    rows_ptr,
    tokens_ptr,
    starts_ptr,
    counts_ptr,
    NEW: tl.constexpr,
    ANSWER: tl.constexpr,
    REPORT: tl.constexpr,
    STOPS: tl.constexpr,
    STOPS_BLOCK: tl.constexpr,
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
    depth_limit = tl.load(depth_limit_ptr + row)
    last = tl.load(token_ptr + row)
    stop = tl.arange(0, STOPS_BLOCK)
    stops = tl.load(stop_ids_ptr + row * STOPS + stop, mask=stop < STOPS, other=-1)
    going = active != 0
    ended = active < 0
    count = active * 0
    for t in tl.static_range(NEW):
        chosen = pick(best_ptr, ids_ptr, index * NEW + t, VOCAB, BLOCKS, PADDED)
        drafted = active < 0
        if t < NEW - 1:
            drafted = going & (tl.load(drafts_ptr + row * DRAFT + t) == chosen) & (depth_limit > t)
        said = chosen + tl.where(drafted, 1073741824, 0)
        tl.store(answers_ptr + row * ANSWER + answered + t, said, mask=going)
        tl.store(report_ptr + row * REPORT + 1 + t, said)
        tl.store(tokens_ptr + index * NEW + t, chosen.to(tl.int64))
        stopped = tl.max((stops == chosen).to(tl.int32), axis=0) > 0
        ends = going & (stopped | (answered + t + 1 >= limit))
        count += going.to(tl.int32)
        last = tl.where(going, chosen.to(tl.int64), last)
        ended = ended | ends
        going = drafted & (ends == 0)
    tl.store(token_ptr + row, last)
    tl.store(length_ptr + row, length + count)
    tl.store(answered_ptr + row, answered + count)
    tl.store(report_ptr + row * REPORT, count)
    tl.store(status_ptr + row, answered + count, mask=ended)
    tl.store(active_ptr + row, active * 0, mask=ended)
    tl.store(starts_ptr + index, length - 1)
    tl.store(counts_ptr + index, tl.where(ended, 0, count))
