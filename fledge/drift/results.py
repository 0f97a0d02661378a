"""A suite's figures as plain data: every condition, what it keeps of the baseline, and how the drafters compare in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fledge.drift.acceptance import Estimate, length_ratio, pooled
from fledge.drift.tally import Tally
from fledge.drift.words import shown_depth


@dataclass(frozen=True)
class Measured:
    """One condition with each drafter's tally of it."""

    facts: dict[str, Any]  # name, note, numbers of prompts and tokens
    tallies: Mapping[str, Tally]  # by drafter

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


def _shares(tally: Tally, base: Tally, depths: Sequence[int]) -> dict[str, Any]:
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


def _ratio(tally: Tally, base: Tally, depth: int, without: set[str] = frozenset()) -> Estimate | None:
    common = [name for name in _common(tally, base) if name not in without]
    return length_ratio(tally.counts(depth, common), base.counts(depth, common)) if common else None


def _common(tally: Tally, base: Tally) -> list[str]:
    return [name for name in tally.texts if name in base.texts]


def _plain(estimates: dict[int, Estimate | None]) -> dict[int, dict[str, float | None]]:
    nothing = Estimate(1.0, None)
    return {depth: (one or nothing)._asdict() for depth, one in estimates.items()}


def without_heads(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures per head are kept for the probes over all prompts; for every condition they would drown the rest."""
    return {name: value for name, value in figures.items() if not name.endswith("_by_head")}
