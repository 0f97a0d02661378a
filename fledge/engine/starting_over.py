"""When requests that plain cycles left behind should read their text again, so that they can be drafted for.

A plain captured cycle leaves the drafter without the target's states, and they cannot be had later but by another pass over the
text. That pass costs everyone its time, once; what follows is faster by what speculation gains under the present load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fledge.engine.load_depth import LoadDepth

# Speculation must be expected to gain so much: with less, a little more load would undo it, and the pass was for nothing.
LEAST_GAIN = 1.15
# What is gained must be so many times what the pass takes. Where answers end is not known.
TIMES_OVER = 2.0


def pays(load: LoadDepth, seconds: Callable[[int], float | None], remaining: Sequence[int], pass_seconds: float) -> bool:
    """`seconds(depth)`: of a cycle for all that run, all of them drafted for. `remaining`: tokens that those left behind are
    expected to say yet. `pass_seconds`: of the pass over their texts, all together."""
    plain, depth = seconds(0), load.choose(1.0, seconds)
    if plain is None or not depth or not remaining:
        return False
    cycle, tokens = seconds(depth), load.tokens(depth)
    if plain * tokens < LEAST_GAIN * cycle:
        return False
    return max(remaining) * (plain - cycle / tokens) > TIMES_OVER * pass_seconds
