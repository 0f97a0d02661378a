"""What a speculative run over a known text accepts, from how far the drafts of each of its rows stand; with standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fledge.speculation.stats import AcceptanceStats


def walk(matched: Sequence[int], depth: int) -> AcceptanceStats:
    """`matched[i]`: how many drafts from row i are the target's next tokens.

    A step accepts up to `depth` of them and adds the target's own next token; the answer ends where the rows end.
    """
    stats, at = AcceptanceStats(), 0
    while at < len(matched):
        accepted = min(matched[at], depth)
        left = len(matched) - at  # tokens the answer still has
        stats.add_step(depth, depth, accepted, min(accepted + 1, left))
        at += accepted + 1
    return stats


class Count(NamedTuple):
    """Of one text. Whole numbers when greedy; expectations when sampled."""

    accepted: float
    steps: float


def counted(matched: Sequence[int], depth: int) -> Count:
    """`walk` where only the two numbers are wanted."""
    accepted = steps = at = 0
    while at < len(matched):
        taken = min(matched[at], depth)
        accepted += taken
        steps += 1
        at += taken + 1
    return Count(accepted, steps)


def expected_walk(stands: Sequence[Sequence[float]], depth: int) -> Count:
    """`stands[i][j]`: probability that draft j of row i stands once those before it do. Exact, by following every path:

    a step that starts at row i ends at row i + a + 1, where a drafts stood.
    """
    starts = [0.0] * (len(stands) + depth + 2)  # probability that a step starts at each row
    starts[0] = 1.0
    accepted = steps = 0.0
    for row, chances in enumerate(stands):
        here = starts[row]
        if not here:
            continue
        steps += here
        reached = here
        for at in range(depth):
            on = reached * chances[at]
            starts[row + at + 1] += reached - on
            reached = on
            accepted += on
            if not reached:
                break
        else:
            starts[row + depth + 1] += reached
    return Count(accepted, steps)


class Estimate(NamedTuple):
    value: float
    error: float | None  # standard error, texts being the independent samples; None: a single text


def acceptance_length(counts: Sequence[Count]) -> Estimate:
    """Micro: 1 + accepted / steps over all texts together."""
    value, influence = _length(counts)
    return Estimate(value, standard_error(influence))


def length_ratio(counts: Sequence[Count], base: Sequence[Count]) -> Estimate:
    """Acceptance length over another's on the same texts or questions: what a pair has in common drops out of the error."""
    (value, mine), (other, theirs) = _length(counts), _length(base)
    ratio = value / other
    return Estimate(ratio, standard_error([ratio * (a / value - b / other) for a, b in zip(mine, theirs, strict=True)]))


def pooled(conditions: Sequence[Mapping[str, Count]]) -> dict[str, Count]:
    """The counts of each question, over all conditions it is asked under."""
    found: dict[str, Count] = {}
    for counts in conditions:
        for text, count in counts.items():
            kept = found.get(text, Count(0, 0))
            found[text] = Count(kept.accepted + count[0], kept.steps + count[1])
    return found


def accepted_ratio(counts: Sequence[Count], base: Sequence[Count]) -> Estimate:
    """As `length_ratio`, of accepted drafts a step: without the token that the target adds to each, as the paper counts."""
    ratio, influence = _accepted_ratio(counts, base)
    return Estimate(ratio, standard_error(influence))


Pair = tuple[Sequence[Count], Sequence[Count]]  # under a condition, and under its baseline


def kept_difference(one: Pair, other: Pair) -> Estimate:
    """How much more of its accepted drafts one drafter keeps than another, over the same texts."""
    (mine, a), (theirs, b) = _accepted_ratio(*one), _accepted_ratio(*other)
    if not a or not b:  # one of them accepts nothing to keep
        return Estimate(mine - theirs, None)
    return Estimate(mine - theirs, standard_error([x - y for x, y in zip(a, b, strict=True)]))


def _accepted_ratio(counts: Sequence[Count], base: Sequence[Count]) -> tuple[float, list[float]]:
    (value, mine), (other, theirs) = _length(counts), _length(base)
    if other <= 1:
        return math.inf, []
    ratio = (value - 1) / (other - 1)
    return ratio, [(a - ratio * b) / (other - 1) for a, b in zip(mine, theirs, strict=True)]


def _length(counts: Sequence[Count]) -> tuple[float, list[float]]:
    """With what each text moves it by (the delta method's influence)."""
    steps = sum(count.steps for count in counts)
    if not steps:
        return 1.0, [0.0] * len(counts)
    mean = sum(count.accepted for count in counts) / steps
    return 1 + mean, [(count.accepted - mean * count.steps) / steps for count in counts]


def standard_error(influence: Sequence[float]) -> float | None:
    """From what each of the independent samples moves a figure by."""
    count = len(influence)
    if count < 2:
        return None
    return (count / (count - 1) * sum(one * one for one in influence)) ** 0.5
