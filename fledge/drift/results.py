"""A suite's figures as plain data, and what they say: what a drafter keeps of the baseline, how drafters compare, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

from fledge.drift.metrics import Count, Estimate, MetricAccumulator, length_ratio, pooled

FLAT = 1.1  # growth of the fed-back state from step 1 to step 8 that is still flat
# What a robust drafter must keep: of its acceptance length in its own template, and in a short context.
KEPT_IN_TEMPLATES, KEPT_IN_LONG_CONTEXTS = 0.85, 0.80
USEFUL = 1.2  # acceptance length below which a drafter drafts next to nothing, so that shares of it say nothing
CLEARLY = 2  # standard errors
ENOUGH_PAIRS = 5  # below, a standard error over them is too vague to be given


def shown_depth(depths: Sequence[int]) -> int:
    """The depth that tables and charts speak of: 5, or the nearest there is."""
    return min(depths, key=lambda depth: (abs(depth - 5), depth))


@dataclass(frozen=True)
class Measured:
    """One condition with each drafter's tally of it."""

    facts: dict[str, Any]  # name, note, numbers of prompts and tokens
    tallies: Mapping[str, MetricAccumulator]  # by drafter

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
        for drafter, tally in condition.tallies.items():
            first = next(iter(condition.tallies.values()))
            figures = without_heads(tally.to_dict())
            figures |= (
                _shares(tally, base.tallies[drafter], depths) if base else _of_mean(drafter, condition, conditions, depths)
            )
            figures["counts"] = {name: list(tally.texts[name][shown]) for name in tally.texts}  # accepted, steps at depth 5
            figures["against_first"] = _plain({depth: _ratio(tally, first, depth) for depth in depths})
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


def _shares(tally: MetricAccumulator, base: MetricAccumulator, depths: Sequence[int]) -> dict[str, Any]:
    """Acceptance length as a share of the baseline's, over the questions that both have; and over those where neither loops."""
    calm = tally.looping | base.looping
    found = {
        "retention": _plain({depth: _ratio(tally, base, depth) for depth in depths}),
        "retention_not_looping": _plain({depth: _ratio(tally, base, depth, without=calm) for depth in depths}),
    }
    return {
        "retention": {depth: one["value"] for depth, one in found["retention"].items()},
        "retention_error": {depth: one["error"] for depth, one in found["retention"].items()},
        "retention_not_looping": found["retention_not_looping"],
        "pairs": len(_common(tally, base)),
        "pairs_not_looping": len([name for name in _common(tally, base) if name not in calm]),
    }


def _of_mean(drafter: str, condition: Measured, conditions: Sequence[Measured], depths: Sequence[int]) -> dict[str, Any]:
    """No baseline: a share of the conditions' mean."""
    lengths = {one.name: one.tallies[drafter].to_dict()["acceptance_length"] for one in conditions}
    means = {depth: sum(one[depth] for one in lengths.values()) / len(lengths) for depth in depths}
    return {"retention": {depth: lengths[condition.name][depth] / means[depth] for depth in depths}}


def _overall(conditions: Sequence[Measured], depths: Sequence[int]) -> dict[str, Any]:
    """Each drafter against the first over all conditions of the suite together.

    What is asked under several conditions is one sample, not several: its answers are alike, and so are their errors.
    """
    names = list(conditions[0].tallies) if conditions else []
    result = {}
    for name in names[1:]:
        ratios = {}
        for depth in depths:
            mine, theirs = (
                pooled([{text: counts[depth] for text, counts in one.tallies[who].texts.items()} for one in conditions])
                for who in (name, names[0])
            )
            ratios[depth] = length_ratio(list(mine.values()), [theirs[text] for text in mine])
        result[name] = _plain(ratios)
    return result


def _ratio(tally: MetricAccumulator, base: MetricAccumulator, depth: int, without: Set[str] = frozenset()) -> Estimate | None:
    common = [name for name in _common(tally, base) if name not in without]
    return length_ratio(tally.counts(depth, common), base.counts(depth, common)) if common else None


def _common(tally: MetricAccumulator, base: MetricAccumulator) -> list[str]:
    return [name for name in tally.texts if name in base.texts]


def _plain(estimates: Mapping[int, Estimate | None]) -> dict[int, dict[str, float | None]]:
    nothing = Estimate(1.0, None)
    return {depth: (one or nothing)._asdict() for depth, one in estimates.items()}


def without_heads(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures per head are kept for the probes over all prompts; for every condition they would drown the rest."""
    return {name: value for name, value in figures.items() if not name.endswith("_by_head")}


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
    found = [counts for name in drafters if (counts := counts_of(condition, name)) is not None]
    if len(found) < len(drafters):
        return None
    common = [text for text in found[0] if all(text in other for other in found[1:])]
    return [[counts[text] for text in common] for counts in found]


def ratio_over(figures: dict[str, Any], suite: str, name: str, base: str) -> Estimate | None:
    """Over all conditions of a suite, question by question; None where the figures do not have the texts' counts."""
    found = suite_of(figures, suite)
    sides = []
    for who in (name, base):
        conditions = found["conditions"] if found else []
        counts = [one for condition in conditions if (one := counts_of(condition, who)) is not None]
        if not counts or len(counts) < len(conditions):
            return None
        sides.append(pooled(counts))
    both = [text for text in sides[0] if text in sides[1]]
    return length_ratio(*([side[text] for text in both] for side in sides)) if both else None


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
        return self.value if self._calm is None else min(self.value, self._calm)

    @property
    def least_error(self) -> float | None:
        is_calm = self._calm is not None and self._calm < self.value
        error, pairs = (self.calm_error, self.calm_pairs) if is_calm else (self.error, self.pairs)
        return error if pairs >= ENOUGH_PAIRS else None

    @property
    def counts_calm(self) -> bool:
        return self._calm is not None

    @property
    def _calm(self) -> float | None:
        return self.calm if self.calm_pairs >= ENOUGH_PAIRS else None

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


def share_change(probes: dict[str, Any], name: str) -> tuple[float, float, float]:
    """At step 1, at the drift step, and the change relative to the former: a small share can only move by little."""
    first, last = probes[name][0], probes[name][probes["drift_step"] - 1]
    return first, last, last / first - 1 if first else 0.0


@dataclass(frozen=True)
class Verdict:
    """One thing that a robust drafter must show."""

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
    for suite_name, limit in (("templates", KEPT_IN_TEMPLATES), ("system prompts", KEPT_IN_TEMPLATES)):
        if suite := suite_of(figures, suite_name):
            others = [one for one in suite["conditions"] if one["name"] != suite["baseline"]]
            shares = {one["name"]: kept(one, name, shown_depth(suite["depths"])) for one in others}
            if shares:
                worst = min(shares, key=lambda which: shares[which].least)
                found.append(_kept_verdict(f"{suite_name}, lowest: {worst}", limit, shares[worst]))
    if (suite := suite_of(figures, "context length")) and len(suite["conditions"]) > 1:
        longest = suite["conditions"][-1]
        window = next(one["config"]["window"] for one in figures["drafters"] if one["name"] == name)
        seen = f"; attends to the last {window}" if window else ""
        share = kept(longest, name, shown_depth(suite["depths"]))
        found.append(_kept_verdict(f"context of {longest['name']}", KEPT_IN_LONG_CONTEXTS, share, seen))
    return found


def _kept_verdict(what: str, limit: float, share: Kept, aside: str = "") -> Verdict:
    error = share.least_error
    close = error is None or abs(share.least - limit) < CLEARLY * error
    return Verdict(f"acceptance length kept, {what}", f"≥ {limit:.0%}", f"{share}{aside}", share.least >= limit, close)


def verdict_table(figures: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows, a column a drafter. The mark goes by the figure itself, the lower one where there are two; (close): less
    than two standard errors from the limit."""
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
