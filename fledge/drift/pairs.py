"""Drafters and conditions compared text by text, from the counts that a lab run keeps of each text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from fledge.drift.acceptance import Count, Estimate, length_ratio, pooled

ENOUGH_PAIRS = 5  # below, a standard error over them is too vague to be given


def suite_of(figures: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in figures["suites"] if one["name"] == name), None)


def condition_of(suite: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    return next((one for one in suite["conditions"] if one["name"] == name), None) if suite else None


def counts_of(condition: dict[str, Any], drafter: str) -> dict[str, Count] | None:
    """By text, at the depth that sentences speak of; None in older figures."""
    counts = condition["drafters"][drafter].get("counts")
    return None if counts is None else {text: Count(*count) for text, count in counts.items()}


def paired(condition: dict[str, Any], drafters: list[str]) -> list[list[Count]] | None:
    """The counts of each drafter, in the same order of texts."""
    found = [counts_of(condition, name) for name in drafters]
    if None in found:
        return None
    common = [text for text in found[0] if all(text in other for other in found[1:])]
    return [[counts[text] for text in common] for counts in found]


def ratio_over(figures: dict[str, Any], suite: str, name: str, base: str) -> Estimate | None:
    """Over all conditions of a suite, question by question; None where the figures do not have the texts' counts."""
    found = suite_of(figures, suite)
    sides = []
    for who in (name, base):
        counts = [counts_of(condition, who) for condition in found["conditions"]] if found else []
        if not counts or None in counts:
            return None
        sides.append(pooled(counts))
    both = [text for text in sides[0] if text in sides[1]]
    return length_ratio(*([side[text] for text in both] for side in sides)) if both else None


def distinct_conditions(figures: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Suites with their conditions, less those that are the same answers once more under another name.

    Without noise, at temperature 0, without a system prompt: all of these are the prompts in the target's own template.
    """
    seen = set()
    for suite in figures["suites"]:
        for condition in suite["conditions"]:
            first = next(iter(condition["drafters"]))
            counts = counts_of(condition, first)
            key = tuple(sorted(counts.items())) if counts else (suite["name"], condition["name"])
            if key not in seen:
                seen.add(key)
                yield suite, condition


def plus_minus(ratio: dict[str, float | None], pairs: int = ENOUGH_PAIRS) -> str:
    error = ratio["error"]
    if error is None or pairs < ENOUGH_PAIRS:
        return f"{ratio['value']:.2f}×"
    return f"{ratio['value']:.2f} ± {error:.{2 if not 0 < error < 0.005 else 3}f}×"  # "± 0.00" would claim too much


def percent(share: float, error: float | None, pairs: int = ENOUGH_PAIRS) -> str:
    return f"{share:.0%}" if error is None or pairs < ENOUGH_PAIRS else f"{share:.0%} ± {error:.0%}"


class Kept(NamedTuple):
    """Of the baseline's acceptance length: over all questions, and over those where neither answer loops."""

    value: float
    error: float | None
    pairs: int
    calm: float | None  # None: all loop
    calm_error: float | None
    calm_pairs: int

    @property
    def least(self) -> float:
        """Loops are easy to draft and may hide a loss: where enough pairs are free of them, those count too."""
        return self.value if not self.counts_calm else min(self.value, self.calm)

    @property
    def least_error(self) -> float | None:
        is_calm = self.counts_calm and self.calm < self.value
        error, pairs = (self.calm_error, self.calm_pairs) if is_calm else (self.error, self.pairs)
        return error if pairs >= ENOUGH_PAIRS else None

    @property
    def counts_calm(self) -> bool:
        return self.calm is not None and self.calm_pairs >= ENOUGH_PAIRS

    @property
    def without_loops(self) -> str:
        return "–" if self.calm is None else f"{percent(self.calm, self.calm_error, self.calm_pairs)} ({self.calm_pairs})"

    def __str__(self) -> str:
        value = percent(self.value, self.error, self.pairs)
        if self.calm is None or self.calm_pairs == self.pairs:  # all loop, or none does
            return value
        return f"{value}; {percent(self.calm, self.calm_error, self.calm_pairs)} without loops ({self.calm_pairs} pairs)"


def kept(condition: dict[str, Any], name: str, depth: int) -> Kept:
    one = condition["drafters"][name]
    error, pairs = (one.get("retention_error") or {}).get(depth), one.get("pairs", one["texts"])
    calm = one["retention_not_looping"][depth] if one.get("pairs_not_looping") else {"value": None, "error": None}
    return Kept(one["retention"][depth], error, pairs, calm["value"], calm["error"], one.get("pairs_not_looping", 0))
