"""Computes the figures in the drift study's text: ratios and differences of accepted drafts over the same texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fledge.drift.metrics import Count, Estimate, length_and_influence, length_ratio, pooled, standard_error
from fledge.drift.results import suite_of


def condition_of(suite: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    return next((one for one in suite["conditions"] if one["name"] == name), None) if suite else None


def counts_of(condition: dict[str, Any], drafter: str) -> dict[str, Count]:
    """A drafter's counts by text, at the depth that the page's text uses."""
    return {text: Count(*count) for text, count in condition["drafters"][drafter]["counts"].items()}


def paired(condition: dict[str, Any], drafters: list[str]) -> list[list[Count]]:
    """The counts of each drafter, in the same order of texts."""
    found = [counts_of(condition, name) for name in drafters]
    common = [text for text in found[0] if all(text in other for other in found[1:])]
    return [[counts[text] for text in common] for counts in found]


def ratio_over(figures: dict[str, Any], suite: str, name: str, base: str) -> Estimate | None:
    """The ratio of two drafters' acceptance lengths over all conditions of a suite, paired by question; None: no such suite."""
    found = suite_of(figures, suite)
    if not found or not found["conditions"]:
        return None
    sides = [pooled([counts_of(condition, who) for condition in found["conditions"]]) for who in (name, base)]
    both = [text for text in sides[0] if text in sides[1]]
    return length_ratio(*([side[text] for text in both] for side in sides)) if both else None


def accepted_ratio(counts: Sequence[Count], base: Sequence[Count]) -> Estimate:
    """The ratio of accepted drafts per step, without the target's own token, as in the paper."""
    ratio, influence = _accepted_ratio(counts, base)
    return Estimate(ratio, standard_error(influence))


Pair = tuple[Sequence[Count], Sequence[Count]]  # counts under a condition, and under its baseline


def retention_difference(one: Pair, other: Pair) -> Estimate:
    """The difference between the fractions of accepted drafts that two drafters keep, over the same texts."""
    (mine, a), (theirs, b) = _accepted_ratio(*one), _accepted_ratio(*other)
    if not a or not b:  # one of them accepts no drafts under the baseline
        return Estimate(mine - theirs, None)
    return Estimate(mine - theirs, standard_error([x - y for x, y in zip(a, b, strict=True)]))


def _accepted_ratio(counts: Sequence[Count], base: Sequence[Count]) -> tuple[float, list[float]]:
    (value, mine), (other, theirs) = length_and_influence(counts), length_and_influence(base)
    if other <= 1:
        return math.inf, []
    ratio = (value - 1) / (other - 1)
    return ratio, [(a - ratio * b) / (other - 1) for a, b in zip(mine, theirs, strict=True)]
