"""The recompute policy: when to prefill requests with a stale drafter again, so that they can be drafted for.

A plain captured cycle does not keep the target's hidden states; only another pass over the text can restore them. That pass
delays all running requests; the gain afterwards depends on the load. Under a fluctuating load it would not pay, so the load
must have been low for a while, and each request is recomputed at most once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fledge.engine.request import Request
from fledge.speculation.acceptance import AcceptanceModel

# The least expected speed-up by speculation: a smaller one would be lost at slightly more load.
LEAST_GAIN = 1.15
# The time saved must be at least this many times the pass's time: it is unknown where answers end, and prefilling real texts
# takes longer than the recorded pass was measured with empty inputs.
TIMES_OVER = 4.0
# Consecutive steps at which recomputing must be expected to pay.
STEPS = 32


class RecomputePolicy:
    def __init__(self, acceptance: AcceptanceModel) -> None:
        self.acceptance = acceptance
        self.done: set[Request] = set()  # requests that were recomputed
        self.num_agreeing = 0  # consecutive steps at which it was expected to pay

    def is_due(self, pays: bool) -> bool:
        """Call it once per step. Whether recomputing pays now and did in enough consecutive steps before."""
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
        """Whether recomputing is expected to pay. `seconds`, `share`, `allowed`: arguments of `AcceptanceModel.choose` for the
        batch afterwards. `remaining`: tokens that the stale requests are expected to emit still. `pass_seconds`: the time to
        prefill their texts; None: not known."""
        if pass_seconds is None or not remaining:
            return False
        plain, depth = seconds(0), self.acceptance.choose(share, seconds, allowed)
        if plain is None or not depth:
            return False
        cycle, tokens = seconds(depth), self.acceptance.mean_tokens(depth, share, allowed)
        if cycle is None or plain * tokens < LEAST_GAIN * cycle:
            return False
        return max(remaining) * (plain - cycle / tokens) > TIMES_OVER * pass_seconds
