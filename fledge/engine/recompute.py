"""When requests whose drafter is stale should be prefilled again, so that they can be drafted for.

A plain captured cycle does not keep the target's hidden states, and they can only be had by another pass over the text. That
pass delays everyone; afterwards speculation gains what it gains at the current load. Under a load that comes and goes it
would not pay, so the load must have been low for a while, and each request is recomputed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fledge.engine.request import Request
from fledge.speculation.acceptance import AcceptanceModel

# Speculation must be expected to gain so much: with less, a little more load would undo it.
LEAST_GAIN = 1.15
# The gain must be so many times what the pass takes: where answers end is not known, and prefill of real texts takes longer
# than the recorded pass, whose attention has nothing to read.
TIMES_OVER = 4.0
# Steps in a row that must agree.
STEPS = 32


class RecomputePolicy:
    def __init__(self, acceptance: AcceptanceModel) -> None:
        self.acceptance = acceptance
        self.done: set[Request] = set()  # requests that were recomputed
        self.num_agreeing = 0  # steps in a row that spoke for it

    def is_due(self, pays: bool) -> bool:
        """Once a step: whether it pays now and did in enough steps before."""
        self.num_agreeing = self.num_agreeing + 1 if pays else 0
        return self.num_agreeing >= STEPS

    def pays(
        self,
        seconds: Callable[[int], float | None],
        share: float,
        allowed: Sequence[int],
        remaining: Sequence[int],
        pass_seconds: float | None,
    ) -> bool:
        """`seconds`, `share` and `allowed`: as `AcceptanceModel.choose` would have them afterwards. `remaining`: tokens that
        the stale requests are expected to emit yet. `pass_seconds`: of the prefill of their texts; None: not known."""
        if pass_seconds is None or not remaining:
            return False
        plain, depth = seconds(0), self.acceptance.choose(share, seconds, allowed)
        if plain is None or not depth:
            return False
        cycle, tokens = seconds(depth), self.acceptance.mean_tokens(depth, share, allowed)
        if cycle is None or plain * tokens < LEAST_GAIN * cycle:
            return False
        return max(remaining) * (plain - cycle / tokens) > TIMES_OVER * pass_seconds
