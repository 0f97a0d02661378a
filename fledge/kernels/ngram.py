"""N-gram drafting on the device: drafts the tokens that followed an earlier occurrence of the text's last few tokens.

    text     … 7 3 5 8 1 … 4 3 5 |          the last n = 2 tokens are 3 5; earlier they were followed by 8 1 …
                   ^ end                    `end`: the position after an earlier occurrence; drafts are tokens[end], …

The longest n that occurs earlier is used, and of its occurrences the most recent. An occurrence may overlap the text's end but
is never the end itself. Drafts beyond the text's end, and all drafts of a row without an occurrence, are the text's last token:
shapes are fixed, and a wrong draft costs nothing except its row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.triton_support import jit, let_next_start, next_power_of_2, overlap, tl, use_triton, wait_for_inputs

BLOCK = 2048  # positions that a program compares at once
# An occurrence is ranked by (matched tokens, position) in one int32: position < STRIDE.
STRIDE = 1 << 24
MAX_LONGEST = 127


def ngram_drafts(
    tokens_RL: Tensor, length_R: Tensor, active_R: Tensor, batch: int, depth: int, longest: int = 4, shortest: int = 2
) -> Tensor:
    """Returns drafts int64 [batch, depth] for the first `batch` rows, whose texts are `tokens_RL[r, : length_R[r]]`."""
    assert 1 <= shortest <= longest <= MAX_LONGEST
    assert tokens_RL.shape[1] < STRIDE
    run = ngram_drafts_triton if use_triton(tokens_RL) else ngram_drafts_reference
    return run(tokens_RL, length_R, active_R, batch, depth, longest, shortest)


def ngram_drafts_reference(
    tokens_RL: Tensor, length_R: Tensor, active_R: Tensor, batch: int, depth: int, longest: int = 4, shortest: int = 2
) -> Tensor:
    tokens_BL, length_B1 = tokens_RL[:batch], length_R[:batch, None].long()
    last_B1 = (length_B1 - 1).clamp(min=0)
    place_L = torch.arange(tokens_BL.shape[1], device=tokens_BL.device)  # positions of an n-gram's last token
    matches = (place_L < last_B1) & (active_R[:batch, None] != 0)
    num_matched = torch.zeros_like(matches, dtype=torch.int64)
    for back in range(longest):
        wanted_B1 = tokens_BL.gather(1, (last_B1 - back).clamp(min=0))
        matches &= (tokens_BL.roll(back, 1) == wanted_B1) & (place_L >= back)
        num_matched += matches
    ranks = torch.where(num_matched >= shortest, num_matched * STRIDE + place_L + 1, 0)
    best_B1 = ranks.amax(1, keepdim=True)
    ends_B1 = torch.where(best_B1 > 0, best_B1 % STRIDE, length_B1)
    places_BD = ends_B1 + torch.arange(depth, device=tokens_BL.device)
    return tokens_BL.gather(1, places_BD.minimum(last_B1)).long()


def ngram_drafts_triton(
    tokens_RL: Tensor, length_R: Tensor, active_R: Tensor, batch: int, depth: int, longest: int = 4, shortest: int = 2
) -> Tensor:
    assert tokens_RL.stride(1) == 1
    drafts = torch.empty((batch, depth), dtype=torch.int64, device=tokens_RL.device)
    _ngram_drafts[(batch,)](
        tokens_RL,
        length_R,
        active_R,
        drafts,
        tokens_RL.stride(0),
        DEPTH=depth,
        DEPTH_BLOCK=next_power_of_2(depth),
        LONGEST=longest,
        SHORTEST=shortest,
        PLACES=BLOCK,
        RANK_STRIDE=STRIDE,
        num_warps=8,
        **overlap(drafts),
    )
    return drafts


@jit
def _ngram_drafts(
    tokens_ptr,
    length_ptr,
    active_ptr,
    drafts_ptr,
    row_stride,
    DEPTH: tl.constexpr,
    DEPTH_BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    SHORTEST: tl.constexpr,
    PLACES: tl.constexpr,
    RANK_STRIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    text = tokens_ptr + row * row_stride
    wait_for_inputs(PDL)
    length = tl.load(length_ptr + row).to(tl.int32)
    active = tl.load(active_ptr + row)
    last = tl.maximum(length - 1, 0)
    best = length * 0
    # Searches backwards from the latest possible end of an occurrence, block by block, until a match of LONGEST tokens.
    latest = tl.where(active != 0, last, 0)
    while (latest >= SHORTEST) & (best < LONGEST * RANK_STRIDE):
        end = latest - tl.arange(0, PLACES)
        num_matched = tl.zeros([PLACES], tl.int32)
        matches = end >= SHORTEST
        for back in tl.static_range(LONGEST):
            place = end - 1 - back
            matches = matches & (place >= 0)
            wanted = tl.load(text + tl.maximum(last - back, 0))
            matches = matches & (tl.load(text + place, mask=matches, other=0) == wanted)
            num_matched += matches.to(tl.int32)
        ranks = tl.where(num_matched >= SHORTEST, num_matched * RANK_STRIDE + end, 0)
        best = tl.maximum(best, tl.max(ranks, axis=0))
        latest -= PLACES
    first = tl.where(best > 0, best % RANK_STRIDE, length)
    step = tl.arange(0, DEPTH_BLOCK)
    drafts = tl.load(text + tl.minimum(first + step, last))
    tl.store(drafts_ptr + row * DEPTH + step, drafts.to(tl.int64), mask=step < DEPTH)
