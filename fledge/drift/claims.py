"""What was claimed for EAGLE 3.1, beside what a lab run found: each claim with its figures and whether it holds here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fledge.drift.words import FLAT, deepest_known, shown_depth

HOLDS, WEAKLY, NOT = "holds", "holds, but weakly", "does not show here"
MOVES = 0.005  # change of a share a step that counts as moving
CLEARLY = 2  # standard errors
ENOUGH_PAIRS = 5  # from which a share over them counts
# What a robust drafter must keep: of its acceptance length in its own template, and in a short context.
KEPT_IN_TEMPLATES, KEPT_IN_LONG_CONTEXTS = 0.85, 0.80


@dataclass(frozen=True)
class Claim:
    what: str
    published: str  # the drift paper's figures, Llama 3.1 8B unless said otherwise
    here: str
    verdict: str


def suite_of(figures: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((one for one in figures["suites"] if one["name"] == name), None)


def condition_of(suite: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    return next((one for one in suite["conditions"] if one["name"] == name), None) if suite else None


def claims(figures: dict[str, Any], old: str, new: str) -> list[Claim]:
    """`old`, `new`: the drafters to compare, EAGLE 3 (the first of the run) and 3.1."""
    before, after = figures["probes"][old], figures["probes"][new]
    found = [
        _size(before, after),
        _share("sink_share", "moves away from the sink", ".46 → .08 / .11 → .10", before, after, -1),
        _share("own_share", "moves to the drafter's own tokens", ".14 → .31 / .50 → .53", before, after, +1),
        _inputs(figures, old),
        _templates(figures, old, new),
        _contexts(figures, old, new),
        _depth(figures, before, after),
        _noise(figures, old, new),
    ]
    return [claim for claim in found if claim is not None]


def _size(before: dict[str, Any], after: dict[str, Any]) -> Claim:
    old, new, step = before["rms_ratio"], after["rms_ratio"], before["drift_step"]
    verdict = NOT
    if new <= FLAT < old:
        verdict = HOLDS if old > 1.5 else WEAKLY
    return Claim(
        f"The fed-back state of EAGLE 3 grows, that of 3.1 keeps its size (RMS, step {step} over step 1)",
        "3.6× / 0.99×",
        f"{old:.2f}× / {new:.2f}×",
        verdict,
    )


def _share(name: str, what: str, published: str, before: dict[str, Any], after: dict[str, Any], sign: int) -> Claim:
    at = before["drift_step"] - 1
    old, new = (sign * one[f"{name}_slope"] for one in (before, after))
    if old > MOVES and new < old / 2:
        verdict = HOLDS
    elif old > MOVES and new < old:
        verdict = WEAKLY
    else:
        verdict = NOT
    moves = [(one[name][0], one[name][at], one[f"{name}_slope"]) for one in (before, after)]
    shown = " / ".join(f"{first:.2f} → {last:.2f} ({change:+.4f} a step)" for first, last, change in moves)
    return Claim(f"With depth the attention of EAGLE 3 {what}, that of 3.1 does not", published, shown, verdict)


def _inputs(figures: dict[str, Any], name: str) -> Claim | None:
    states = figures["target_states"].get(name) or {}
    sizes = {layer: places["answer"] for layer, places in states.items() if layer.startswith("layer") and "answer" in places}
    if len(sizes) < 2:
        return None
    layers = list(sizes)
    largest = max(sizes, key=sizes.get)
    listed = ", ".join(f"{layer} {size:.1f}" for layer, size in sizes.items())
    return Claim(
        "The highest tapped layer is by far the largest and dominates the fused input",
        "grows with the layer",
        f"{listed} (RMS)",
        HOLDS if largest == layers[-1] and sizes[largest] > 2 * sizes[layers[0]] else NOT,
    )


def _accepted_ratio(condition: dict[str, Any], old: str, new: str, depth: int) -> tuple[float, float | None]:
    """Accepted drafts a step of `new` over `old` (the bonus token left out, as the paper counts), with a standard error."""
    before, after = (condition["drafters"][name]["acceptance_length"][depth] for name in (old, new))
    if before <= 1:
        return float("inf"), None
    error = condition["drafters"][new]["against_first"][depth]["error"]
    return (after - 1) / (before - 1), None if error is None else error * before / (before - 1)


def _better(what: str, published: str, condition: dict[str, Any], old: str, new: str, depth: int, strong: float) -> Claim:
    ratio, error = _accepted_ratio(condition, old, new, depth)
    sure = error is not None and ratio - 1 > CLEARLY * error
    if ratio >= strong and sure:
        verdict = HOLDS
    elif sure:
        verdict = WEAKLY
    else:
        verdict = NOT
    shown = " / ".join(f"{condition['drafters'][name]['acceptance_length'][depth] - 1:.2f}" for name in (old, new))
    spread = "" if error is None else f" ± {error:.2f}"
    return Claim(what, published, f"{shown}, {ratio:.2f}{spread}× (depth {depth})", verdict)


def _templates(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "templates")
    condition = condition_of(suite, "no template")
    if condition is None:
        return None
    what = "Without a chat template 3.1 accepts far more than 3 (drafts accepted a step)"
    return _better(what, "1.69 / 2.61, 1.54×", condition, old, new, shown_depth(suite["depths"]), 1.25)


def _contexts(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "context length")
    if suite is None:
        return None
    longest = suite["conditions"][-1]
    windows = [one["config"]["window"] for one in figures["drafters"] if one["name"] in (old, new)]
    published = ".05 / .83 (full attention)" if None in windows else "2.43 / 2.97, 1.22× (sliding window)"
    what = f"In a long context ({longest['name']}) 3.1 accepts more, up to twice as much (drafts accepted a step)"
    return _better(what, published, longest, old, new, shown_depth(suite["depths"]), 1.1 if None not in windows else 1.5)


def _depth(figures: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> Claim | None:
    rates = [one.get("conditional_acceptance") or [] for one in (before, after)]
    deepest = min(deepest_known(before), deepest_known(after))
    if deepest < 2:
        return None
    old, new = (one[deepest - 1] for one in rates)
    verdict = HOLDS if new > 1.5 * old else (WEAKLY if new > old + 0.02 else NOT)
    trained = sorted({one["trained"].get("ttt_steps") for one in figures["drafters"]} - {None})
    steps = f", trained with {' or '.join(map(str, trained))} steps" if trained else ""
    return Claim(
        f"Drafting past the trained depth, 3.1 goes on being right where 3 is not (acceptance at step {deepest} once all "
        f"before stood{steps})",
        "step 16: .00 / .53, trained with 2 steps",
        f"{old:.2f} / {new:.2f} (step 1: {rates[0][0]:.2f} / {rates[1][0]:.2f})",
        verdict,
    )


def _noise(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "noise")
    disturbed, clean = condition_of(suite, "α = 0.5"), condition_of(suite, "no noise")
    if disturbed is None:
        return None
    depth = shown_depth(suite["depths"])
    kept = []
    for name in (old, new):
        with_noise, without = (one["drafters"][name]["acceptance_length"][depth] - 1 for one in (disturbed, clean))
        kept.append(with_noise / without if without else 0.0)
    verdict = HOLDS if kept[1] > 1.5 * kept[0] else (WEAKLY if kept[1] > kept[0] + 0.05 else NOT)
    return Claim(
        "Noise of half its size on the state costs 3 nearly all acceptance and 3.1 less than half",
        "5 % / 58 % kept",
        f"{kept[0]:.0%} / {kept[1]:.0%} kept (depth {depth})",
        verdict,
    )


@dataclass(frozen=True)
class Check:
    what: str
    limit: str
    value: str
    passed: bool


def checks(figures: dict[str, Any], name: str) -> list[Check]:
    """What a drafter must show to be called robust."""
    probes = figures["probes"][name]
    found = [
        Check(
            f"fed-back RMS, step {probes['drift_step']} over step 1",
            f"≤ {FLAT}",
            f"{probes['rms_ratio']:.2f}",
            probes["rms_ratio"] <= FLAT,
        )
    ]
    for suite_name, limit in (("templates", KEPT_IN_TEMPLATES), ("system prompts", KEPT_IN_TEMPLATES)):
        if suite := suite_of(figures, suite_name):
            others = [one for one in suite["conditions"] if one["name"] != suite["baseline"]]
            kept = {one["name"]: _kept(one, name, suite) for one in others}
            if kept:
                worst = min(kept, key=lambda which: _least(kept[which]))
                found.append(_kept_check(f"{suite_name}, lowest: {worst}", limit, *kept[worst]))
    if (suite := suite_of(figures, "context length")) and len(suite["conditions"]) > 1:
        longest = suite["conditions"][-1]
        found.append(_kept_check(f"context of {longest['name']}", KEPT_IN_LONG_CONTEXTS, *_kept(longest, name, suite)))
    return found


Kept = tuple[float, float | None, float | None, int]  # value, error, value without loops, pairs without loops


def _kept(condition: dict[str, Any], name: str, suite: dict[str, Any]) -> Kept:
    depth, one = shown_depth(suite["depths"]), condition["drafters"][name]
    calm = one["retention_not_looping"][depth]["value"] if one["pairs_not_looping"] else None
    return one["retention"][depth], one["retention_error"][depth], calm, one["pairs_not_looping"]


def _least(kept: Kept) -> float:
    value, _, calm, pairs = kept
    return value if calm is None or pairs < ENOUGH_PAIRS else min(value, calm)


def _kept_check(what: str, limit: float, kept: float, error: float | None, calm: float | None, pairs: int) -> Check:
    """Loops are easy to draft and may hide a loss: where enough pairs are free of them, those must hold too."""
    value = f"{kept:.0%}" if error is None else f"{kept:.0%} ± {error:.0%}"
    if calm is not None:
        value += f"; {calm:.0%} without loops ({pairs} pairs)"
    passed = _least((kept, error, calm, pairs)) >= limit
    return Check(f"acceptance length kept, {what}", f"≥ {limit:.0%}", value, passed)
