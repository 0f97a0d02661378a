"""When requests that plain cycles left behind should read their text again, so that they can be drafted for.

A plain captured cycle leaves the drafter without the target's states, and they cannot be had later but by another pass over the
text. That pass costs everyone its time; what follows is faster by what speculation gains under the present load. A load that
comes and goes would make it a bad bargain, so the load must have been low for a while, and each request does it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fledge.engine.load_depth import LoadDepth

# Speculation must be expected to gain so much: with less, a little more load would undo it.
LEAST_GAIN = 1.15
# What is gained must be so many times what the pass takes: where answers end is not known, and passes over texts take longer
# than those that were recorded, whose attention has nothing to read.
TIMES_OVER = 4.0
# Launches in a row that must speak for it.
LAUNCHES = 32


class StartingOver:
    def __init__(self, load: LoadDepth) -> None:
        self.load = load
        self.once: set[str] = set()  # requests that have done it
        self.held = 0  # launches in a row that spoke for it

    def is_due(
        self,
        seconds: Callable[[int], float | None],
        share: float,
        allowed: Sequence[int],
        remaining: Sequence[int],
        pass_seconds: float | None,
    ) -> bool:
        """`seconds`, `share` and `allowed`: as `LoadDepth.choose` would have them for the launch after it. `remaining`: tokens
        that those left behind are expected to say yet. `pass_seconds`: of the pass over their texts, if it is known."""
        pays = pass_seconds is not None and self.pays(seconds, share, allowed, remaining, pass_seconds)
        self.held = self.held + 1 if pays else 0
        return self.held >= LAUNCHES

    def pays(
        self,
        seconds: Callable[[int], float | None],
        share: float,
        allowed: Sequence[int],
        remaining: Sequence[int],
        pass_seconds: float,
    ) -> bool:
        plain, depth = seconds(0), self.load.choose(share, seconds, allowed)
        if plain is None or not depth or not remaining:
            return False
        cycle, tokens = seconds(depth), self.load.mean_tokens(depth, share, allowed)
        if plain * tokens < LEAST_GAIN * cycle:
            return False
        return max(remaining) * (plain - cycle / tokens) > TIMES_OVER * pass_seconds
