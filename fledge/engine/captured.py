"""What captured cycles can serve, and how a request enters them."""

from __future__ import annotations

from fledge.engine.device_batch import Entry, how_chosen, why_not_captured
from fledge.engine.request import Request
from fledge.engine.slots import MAX_DEPTH
from fledge.sampling import SamplingParams
from fledge.speculation.drafting import Drafter, EagleSpeculator

LEAST_TOP_P = 1e-6  # smaller ones keep the likeliest token alone too, and may be 0 in fp32


def runs_captured(params: SamplingParams) -> bool:
    """Whether the captured cycle can serve a request; else the eager engine does."""
    return not params.adjusts_logits and params.logprobs is None


def how_of(params: SamplingParams) -> int:
    return how_chosen(0.0 if params.greedy else params.temperature, params.top_p, params.top_k, params.min_p)


def can_capture(drafter: Drafter | None) -> bool:
    """Whether there is a captured cycle for this way of drafting: none at all, or a chain from an EAGLE drafter."""
    if drafter is None:
        return True
    return isinstance(drafter, EagleSpeculator) and drafter.tree is None and why_not_captured(drafter.network) is None


def entry_of(request: Request, row: int, limit: int, drawn_seed: int | None) -> Entry:
    """`limit`: of its answer. `drawn_seed`: for a request that names none."""
    params = request.params
    return Entry(
        row,
        list(request.tokens),
        request.pages,
        limit,
        drawn_seed if params.seed is None else params.seed % 2**62,
        0.0 if params.greedy else params.temperature,
        max(params.top_p, LEAST_TOP_P),
        sorted(request.end_token_ids),
        MAX_DEPTH if request.speculate else 0,
        request.num_computed,
        request.num_answer,
        max(params.top_k, 0),
        params.min_p,
    )
