"""Compares drafters that differ in one setting: each fix alone, augmentation, and a window on attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.drift_figures import condition_of, ratio_over
from fledge.drift.results import plus_minus, shown_depth, suite_of

Table = Callable[[Sequence[str], Sequence[Sequence[str]]], str]
CORNERS = ((False, False), (True, False), (False, True), (True, True))  # fc_norm, norm_output
# Suites over which two drafters are compared, all conditions together.
COMPARED = ("domains", "templates", "system prompts", "context length", "multi-turn", "noise")


def _flags(drafter: dict[str, Any]) -> tuple[bool, bool]:
    return drafter["config"]["fc_norm"], drafter["config"]["norm_output"]


def _rest(drafter: dict[str, Any], *without: str) -> tuple[Any, ...]:
    """The settings in which two drafters must agree to be compared. `without`: the setting that is compared."""
    facts = {
        "flags": _flags(drafter),
        "window": drafter["config"]["window"],
        "augmented": _augmentation(drafter),
        "ttt_steps": drafter["trained"].get("ttt_steps"),
    }
    return tuple(value for name, value in facts.items() if name not in without)


def _augmentation(drafter: dict[str, Any]) -> tuple[Any, ...]:
    """Whether training texts were augmented and, if the figures say so, how often and how."""
    trained = drafter["trained"]
    chances = {name: chance for name, chance in (trained.get("augmentation") or {}).items() if chance}
    return trained.get("augmented"), *sorted(chances.items())


def ablation(figures: dict[str, Any], table: Table) -> list[str]:
    """The section on the two fixes, if all four combinations were trained alike; otherwise it says that they were not."""
    title = "## The two fixes one by one"
    groups: dict[tuple[Any, ...], dict[tuple[bool, bool], str]] = {}
    for drafter in figures["drafters"]:
        groups.setdefault(_rest(drafter, "flags"), {}).setdefault(_flags(drafter), drafter["name"])
    group = next((one for one in groups.values() if len(one) == len(CORNERS)), None)
    if group is None:
        missing = "drafters with `fc_norm` alone and with `norm_output` alone, trained like the others, are not among these"
        return [title, f"Not measured: {missing}, so this page cannot say which of the two does what."]
    measures = _measures(figures, list(group.values()))
    rows = [[label, *(form.format(values[group[corner]]) for corner in CORNERS)] for label, form, values in measures]
    head = ["", "neither (EAGLE 3)", "`fc_norm` only", "`norm_output` only", "both (EAGLE 3.1)"]
    found = []
    for suite in COMPARED:
        ratios = [ratio_over(figures, suite, group[corner], group[False, False]) for corner in CORNERS[1:]]
        if all(ratios):
            found.append([suite, *(plus_minus(ratio._asdict()) for ratio in ratios)])
    over = table(["acceptance length over neither's, all conditions together", *head[2:]], found) if found else ""
    return [title, table(head, rows), over]


def by_condition(figures: dict[str, Any], table: Table) -> list[str]:
    """Tables of the acceptance length of every drafter under every template, system prompt and context length."""
    names, parts = [drafter["name"] for drafter in figures["drafters"]], []
    for name in ("templates", "system prompts", "context length"):
        if suite := suite_of(figures, name):
            depth = shown_depth(suite["depths"])
            rows = [
                [one["name"], *(f"{one['drafters'][drafter]['acceptance_length'][depth]:.2f}" for drafter in names)]
                for one in suite["conditions"]
            ]
            parts.append(table([f"{name}, depth {depth}", *names], rows))
    return parts


def _measures(figures: dict[str, Any], names: Sequence[str]) -> list[tuple[str, str, dict[str, float]]]:
    probes = figures["probes"]
    found: list[tuple[str, str, dict[str, float]]] = []
    for depth in (5, 16):
        if all(depth in probes[name]["acceptance_length"] for name in names):
            found.append(
                (f"acceptance length, depth {depth}", "{:.2f}", {n: probes[n]["acceptance_length"][depth] for n in names})
            )
    step = probes[names[0]]["drift_step"]
    found.append((f"fed-back RMS, step {step} over step 1", "{:.2f}×", {n: probes[n]["rms_ratio"] for n in names}))
    for share in ("sink", "own"):
        found.append((f"{share} share, change a step", "{:+.4f}", {n: probes[n][f"{share}_share_slope"] for n in names}))
    for name, label in (("templates", "lowest share kept: templates"), ("system prompts", "lowest share kept: system prompts")):
        if suite := suite_of(figures, name):
            depth = shown_depth(suite["depths"])
            found.append(
                (label, "{:.0%}", {n: min(c["drafters"][n]["retention"][depth] for c in suite["conditions"]) for n in names})
            )
    if suite := suite_of(figures, "context length"):
        depth, longest = shown_depth(suite["depths"]), suite["conditions"][-1]
        kept = {n: longest["drafters"][n]["retention"][depth] for n in names}
        found.append((f"kept at {longest['name']}", "{:.0%}", kept))
    if condition := condition_of(suite_of(figures, "noise"), "α = 0.5"):
        depth = shown_depth(suite_of(figures, "noise")["depths"])
        found.append(("kept under noise, α = 0.5", "{:.0%}", {n: condition["drafters"][n]["retention"][depth] for n in names}))
    return found


def comparisons(figures: dict[str, Any], table: Table) -> list[str]:
    """Sections on pairs of drafters that differ only in augmentation, or only in the window; otherwise "not measured"."""
    parts: list[str] = []
    for aspect, title, value in (
        ("augmented", "Training under other templates and system prompts", _augmentation),
        ("window", "A window on the drafter's attention", lambda d: d["config"]["window"]),
    ):
        groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for drafter in figures["drafters"]:
            groups.setdefault(_rest(drafter, aspect), []).append(drafter)
        pairs = [(group[0], other) for group in groups.values() for other in group[1:] if value(other) != value(group[0])]
        rows = []
        for suite in COMPARED:
            ratios = [ratio_over(figures, suite, one["name"], other["name"]) for one, other in pairs]
            if ratios and all(ratios):
                rows.append([suite, *(plus_minus(ratio._asdict()) for ratio in ratios)])
        parts.append(f"## {title}")
        if rows:
            head = ["acceptance length, all conditions together", *(f"{a['name']} / {b['name']}" for a, b in pairs)]
            parts.append(table(head, rows))
        else:
            parts.append("Not measured: no two of these drafters differ only in this.")
    return parts
