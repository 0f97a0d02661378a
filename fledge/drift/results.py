"""A suite's figures as plain data, and what follows from them: retention against the baseline, comparisons, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.drift.metrics import Estimate, MetricAccumulator, length_ratio, pooled

FLAT = 1.1  # largest growth of the fed-back state from step 1 to step 8 that still counts as flat
# Shares of its acceptance length (in the own template; in a short context) that a robust drafter must keep.
MIN_RETENTION_IN_TEMPLATES, MIN_RETENTION_IN_LONG_CONTEXTS = 0.85, 0.80
USEFUL = 1.2  # below this acceptance length almost no draft is accepted, and shares of it mean nothing
CLEARLY = 2  # standard errors
ENOUGH_PAIRS = 5  # with fewer pairs a standard error is too inexact to be shown


def shown_depth(depths: Sequence[int]) -> int:
    """Returns the depth that tables and charts show: 5, or the nearest one measured."""
    return min(depths, key=lambda depth: (abs(depth - 5), depth))


@dataclass(frozen=True)
class Measured:
    """One condition with each drafter's accumulator for it."""

    facts: dict[str, Any]  # name, note, numbers of prompts and tokens
    accumulators: Mapping[str, MetricAccumulator]  # by drafter

    @property
    def name(self) -> str:
        return self.facts["name"]


def suite_result(
    name: str, explanation: str, baseline: str | None, depths: Sequence[int], conditions: Sequence[Measured]
) -> dict[str, Any]:
    base = next((one for one in conditions if one.name == baseline), None)
    shown = shown_depth(depths)
    described = []
    for condition in conditions:
        drafters = {}
        first = next(iter(condition.accumulators.values()))
        for drafter, accumulator in condition.accumulators.items():
            figures = without_heads(accumulator.to_dict())
            figures |= (
                _shares(accumulator, base.accumulators[drafter], depths)
                if base
                else _of_mean(drafter, condition, conditions, depths)
            )
            # (accepted, steps) at the depth shown.
            figures["counts"] = {text: list(counts[shown]) for text, counts in accumulator.texts.items()}
            common = [text for text in accumulator.texts if text in first.texts]
            figures["against_first"] = _ratios(accumulator, first, depths, common)
            drafters[drafter] = figures
        described.append({**condition.facts, "drafters": drafters})
    return {
        "name": name,
        "explanation": explanation,
        "baseline": baseline,
        "depths": list(depths),
        "conditions": described,
        "overall_against_first": _overall(conditions, depths),
    }


def _shares(accumulator: MetricAccumulator, base: MetricAccumulator, depths: Sequence[int]) -> dict[str, Any]:
    """Returns acceptance length as a share of the baseline's, over all common questions and over those where neither loops."""
    common = [name for name in accumulator.texts if name in base.texts]
    non_looping = [name for name in common if name not in accumulator.looping | base.looping]
    kept = _ratios(accumulator, base, depths, common)
    return {
        "retention": {depth: one["value"] for depth, one in kept.items()},
        "retention_error": {depth: one["error"] for depth, one in kept.items()},
        "retention_not_looping": _ratios(accumulator, base, depths, non_looping),
        "pairs": len(common),
        "pairs_not_looping": len(non_looping),
    }


def _of_mean(drafter: str, condition: Measured, conditions: Sequence[Measured], depths: Sequence[int]) -> dict[str, Any]:
    """Returns the acceptance length as a share of the conditions' mean, for suites without a baseline."""
    lengths = {one.name: one.accumulators[drafter].to_dict()["acceptance_length"] for one in conditions}
    means = {depth: sum(one[depth] for one in lengths.values()) / len(lengths) for depth in depths}
    return {"retention": {depth: lengths[condition.name][depth] / means[depth] for depth in depths}}


def _overall(conditions: Sequence[Measured], depths: Sequence[int]) -> dict[str, Any]:
    """Compares each drafter with the first over all conditions of the suite together.

    A question asked under several conditions is one sample, not several: its answers are alike, so their errors correlate.
    """
    names = list(conditions[0].accumulators) if conditions else []
    result = {}
    for name in names[1:]:
        ratios = {}
        for depth in depths:
            mine, theirs = (
                pooled([{text: counts[depth] for text, counts in one.accumulators[who].texts.items()} for one in conditions])
                for who in (name, names[0])
            )
            ratios[depth] = length_ratio(list(mine.values()), [theirs[text] for text in mine])._asdict()
        result[name] = ratios
    return result


def _ratios(
    accumulator: MetricAccumulator, base: MetricAccumulator, depths: Sequence[int], texts: Sequence[str]
) -> dict[int, dict[str, float | None]]:
    """Returns the ratios of the acceptance lengths over these texts, by depth; 1 if there are no texts."""
    if not texts:
        return {depth: Estimate(1.0, None)._asdict() for depth in depths}
    return {depth: length_ratio(accumulator.counts(depth, texts), base.counts(depth, texts))._asdict() for depth in depths}


def without_heads(figures: dict[str, Any]) -> dict[str, Any]:
    """Removes the figures per head, which would be most of the report; only the probes over all prompts keep them."""
    return {name: value for name, value in figures.items() if not name.endswith("_by_head")}


def suite_of(figures: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in figures["suites"] if one["name"] == name), None)


def plus_minus(ratio: dict[str, float | None], pairs: int = ENOUGH_PAIRS) -> str:
    error = ratio["error"]
    if error is None or pairs < ENOUGH_PAIRS:
        return f"{ratio['value']:.2f}×"
    return f"{ratio['value']:.2f} ± {error:.{2 if not 0 < error < 0.005 else 3}f}×"  # 3 digits rather than "± 0.00"


def percent(share: float, error: float | None, pairs: int = ENOUGH_PAIRS) -> str:
    return f"{share:.0%}" if error is None or pairs < ENOUGH_PAIRS else f"{share:.0%} ± {error:.0%}"


class Share(NamedTuple):
    """Acceptance length as a share of the baseline's, over pairs of texts."""

    value: float
    error: float | None
    pairs: int

    def __str__(self) -> str:
        return percent(*self)


class Retention(NamedTuple):
    """The share over all questions, and over those where neither answer loops (None: in every pair one loops)."""

    all: Share
    non_looping: Share | None

    @property
    def least(self) -> Share:
        """The lower share. Loops are easy to draft and may hide a loss, so pairs without loops count too if enough exist."""
        both = (self.all, self.non_looping) if self.counts_non_looping else (self.all,)
        return min((share for share in both if share is not None), key=lambda share: share.value)

    @property
    def counts_non_looping(self) -> bool:
        return self.non_looping is not None and self.non_looping.pairs >= ENOUGH_PAIRS

    @property
    def without_loops(self) -> str:
        return "–" if self.non_looping is None else f"{self.non_looping} ({self.non_looping.pairs})"

    def __str__(self) -> str:
        if self.non_looping is None or self.non_looping.pairs == self.all.pairs:  # all pairs loop, or none
            return str(self.all)
        return f"{self.all}; {self.non_looping} without loops ({self.non_looping.pairs} pairs)"


def retention(condition: dict[str, Any], name: str, depth: int) -> Retention:
    """Returns a condition's retention. Without a baseline, it is a share of the conditions' mean and has no pairs."""
    one = condition["drafters"][name]
    error, pairs = (one.get("retention_error") or {}).get(depth), one.get("pairs", one["texts"])
    found = one["retention_not_looping"][depth] if one.get("pairs_not_looping") else None
    non_looping = None if found is None else Share(found["value"], found["error"], one["pairs_not_looping"])
    return Retention(Share(one["retention"][depth], error, pairs), non_looping)


def share_change(probes: dict[str, Any], name: str) -> tuple[float, float, float]:
    """Returns a share at step 1, at the drift step, and the relative change, since a small share can only move a little."""
    first, last = probes[name][0], probes[name][probes["drift_step"] - 1]
    return first, last, last / first - 1 if first else 0.0


@dataclass(frozen=True)
class Verdict:
    """One criterion for a robust drafter, with its result."""

    what: str
    limit: str
    value: str
    passed: bool
    close: bool = False  # the limit lies within two standard errors


def verdicts(figures: dict[str, Any], name: str) -> list[Verdict]:
    probes = figures["probes"][name]
    depth = shown_depth(list(probes["acceptance_length"]))
    length, loops = probes["acceptance_length"][depth], f"; {probes['looping_texts']} of {probes['texts']} answers loop"
    found = [
        Verdict(
            f"acceptance length at depth {depth}, all prompts",
            f"≥ {USEFUL}",
            f"{length:.2f}{loops if probes['looping_texts'] else ''}",
            length >= USEFUL,
        ),
        Verdict(
            f"fed-back RMS, step {probes['drift_step']} over step 1",
            f"≤ {FLAT}",
            f"{probes['rms_ratio']:.2f}",
            probes["rms_ratio"] <= FLAT,
        ),
    ]
    for suite_name, limit in (("templates", MIN_RETENTION_IN_TEMPLATES), ("system prompts", MIN_RETENTION_IN_TEMPLATES)):
        if suite := suite_of(figures, suite_name):
            others = [one for one in suite["conditions"] if one["name"] != suite["baseline"]]
            shares = {one["name"]: retention(one, name, shown_depth(suite["depths"])) for one in others}
            if shares:
                worst = min(shares, key=lambda which: shares[which].least.value)
                found.append(_retention_verdict(f"{suite_name}, lowest: {worst}", limit, shares[worst]))
    if (suite := suite_of(figures, "context length")) and len(suite["conditions"]) > 1:
        longest = suite["conditions"][-1]
        window = next(one["config"]["window"] for one in figures["drafters"] if one["name"] == name)
        seen = f"; attends to the last {window}" if window else ""
        share = retention(longest, name, shown_depth(suite["depths"]))
        found.append(_retention_verdict(f"context of {longest['name']}", MIN_RETENTION_IN_LONG_CONTEXTS, share, seen))
    return found


def _retention_verdict(what: str, limit: float, found: Retention, aside: str = "") -> Verdict:
    least = found.least
    error = least.error if least.pairs >= ENOUGH_PAIRS else None
    close = error is None or abs(least.value - limit) < CLEARLY * error
    return Verdict(f"acceptance length kept, {what}", f"≥ {limit:.0%}", f"{found}{aside}", least.value >= limit, close)


def verdict_table(figures: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Returns head and rows, one column per drafter. The mark compares the figure with the limit; where there are two figures,
    the lower one. (close): less than two standard errors from the limit."""
    names = [one["name"] for one in figures["drafters"]]
    by_name = {name: verdicts(figures, name) for name in names}
    rows = []
    for number, first in enumerate(by_name[names[0]]):
        mine = [by_name[name][number] for name in names]
        cells = [f"{one.value}{_worst(one)} {'✓' if one.passed else '✗'}{' (close)' if one.close else ''}" for one in mine]
        rows.append([first.what.split(", lowest:")[0], first.limit, *cells])
    probes = [figures["probes"][name] for name in names]
    if all("sink_share_slope" in one for one in probes):
        moved = [f"{share_change(one, 'sink_share')[2]:+.0%} ({one['sink_share_slope']:+.4f} a step)" for one in probes]
        rows.append([f"share on the sink, step {probes[0]['drift_step']} against step 1", "–", *moved])
    return ["", "limit", *names], rows


def _worst(verdict: Verdict) -> str:
    return f" ({verdict.what.split('lowest: ')[1]})" if "lowest: " in verdict.what else ""
