"""The claims published for EAGLE 3.1, each with the figures of a lab run and whether it holds there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.drift_figures import accepted_ratio, condition_of, counts_of, paired, retention_difference
from fledge.drift.prompts import trained_on
from fledge.drift.results import (
    CLEARLY,
    FLAT,
    percent,
    retention,
    share_change,
    shown_depth,
    suite_of,
)

HOLDS, WEAKLY, NOT = "holds", "in direction only", "does not show here"
FAR = 0.5  # relative change of an attention share that is comparable to the published change
LESS = 0.8  # a drafter's change counts as less than another's below this fraction of it
MILD = 1.5  # growth of the fed-back state from step 1 to step 8 up to which it is mild
MOVED = 0.1  # relative change of an attention share, against step 1, from which it counts as a change


@dataclass(frozen=True)
class Claim:
    """A published claim, its figures here, and the verdict."""

    what: str
    published: str  # the drift paper's figures, Llama 3.1 8B unless said otherwise
    here: str
    verdict: str


def claims(figures: dict[str, Any], old: str, new: str) -> list[Claim]:
    """All claims with their verdicts. `old`, `new`: the drafters to compare, EAGLE 3 (the first of the run) and 3.1."""
    before, after = figures["probes"][old], figures["probes"][new]
    found = [
        _size(before, after),
        _share("sink_share", "moves away from the sink", ".46 → .08 / .11 → .10", before, after, -1),
        _share("own_share", "moves to the drafter's own tokens", ".14 → .31 / .50 → .53", before, after, +1),
        _templates(figures, old, new),
        _contexts(figures, old, new),
        _depth(figures, old, new),
        _noise(figures, old, new),
    ]
    return [claim for claim in found if claim is not None]


def _size(before: dict[str, Any], after: dict[str, Any]) -> Claim:
    old, new, step = before["rms_ratio"], after["rms_ratio"], before["drift_step"]
    verdict = NOT
    if new <= FLAT < old:
        verdict = HOLDS if old > MILD else WEAKLY
    errors = [one.get("rms_change_error") for one in (before, after)]
    shown = " / ".join(f"{ratio:.2f}{_spread(error)}×" for ratio, error in zip((old, new), errors, strict=True))
    return Claim(
        f"The fed-back state of EAGLE 3 grows, and that of 3.1 keeps its size (RMS at step {step} over step 1)",
        "3.6× / 0.99×",
        shown,
        verdict,
    )


def _share(name: str, what: str, published: str, before: dict[str, Any], after: dict[str, Any], sign: int) -> Claim:
    """A claim about an attention share, judged by its change relative to step 1: a small share cannot fall by much."""
    changes = [share_change(one, name) for one in (before, after)]
    old, new = (sign * change for _, _, change in changes)
    errors = [one.get(f"{name}_change_error") for one in (before, after)]
    # Errors are combined as if unpaired, which is conservative: both are over the same texts.
    sure = None in errors or old - new > CLEARLY * sum(error**2 for error in errors) ** 0.5
    if old >= FAR and new <= old / 2 and sure:
        verdict = HOLDS
    elif old >= MOVED and new <= LESS * old and sure:
        verdict = WEAKLY
    else:
        verdict = NOT
    shown = " / ".join(
        f"{first:.3f} → {last:.3f} ({change:+.0%}{_spread(error, percent=True)})"
        for (first, last, change), error in zip(changes, errors, strict=True)
    )
    step = before["drift_step"]
    return Claim(
        f"With depth the attention of EAGLE 3 {what}, and that of 3.1 does not (share at step 1 → step {step})",
        published,
        shown,
        verdict,
    )


def _spread(error: float | None, *, percent: bool = False) -> str:
    return "" if error is None else (f" ± {error:.0%}" if percent else f" ± {error:.2f}")


def _better(what: str, published: str, condition: dict[str, Any], old: str, new: str, depth: int, strong: float) -> Claim:
    """A claim on accepted drafts per step, `new` over `old` on the same answers (without the bonus token, as in the paper)."""
    lengths = [condition["drafters"][name]["acceptance_length"][depth] - 1 for name in (old, new)]
    counts = paired(condition, [new, old])
    if counts is None:  # older figures
        ratio, error = lengths[1] / lengths[0] if lengths[0] else 0.0, None
    else:
        ratio, error = accepted_ratio(*counts)
    sure = error is not None and ratio - 1 > CLEARLY * error
    if ratio >= strong and sure:
        verdict = HOLDS
    elif sure:
        verdict = WEAKLY
    else:
        verdict = NOT
    return Claim(what, published, f"{lengths[0]:.2f} / {lengths[1]:.2f}, {ratio:.2f}{_spread(error)}× (depth {depth})", verdict)


def _templates(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "templates")
    condition = condition_of(suite, "no template")
    if condition is None:
        return None
    trained = [trained_on(one.get("trained") or {}) for one in figures["drafters"] if one["name"] in (old, new)]
    met = "; both were trained on some text without a template" if all("no template" in names for names in trained) else ""
    what = f"Without a chat template 3.1 accepts far more than 3 (drafts accepted per step{met})"
    return _better(what, "1.69 / 2.61, 1.54×", condition, old, new, shown_depth(suite["depths"]), 1.25)


def _contexts(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "context length")
    if suite is None:
        return None
    longest = suite["conditions"][-1]
    windows = [one["config"]["window"] for one in figures["drafters"] if one["name"] in (old, new)]
    published = ".05 / .83 (full attention)" if None in windows else "2.43 / 2.97, 1.22× (sliding window)"
    seen = "" if None in windows else f"; the drafters attend to the last {' / '.join(map(str, dict.fromkeys(windows)))} tokens"
    what = f"In a long context ({longest['name']}) 3.1 accepts more, up to twice as much (drafts accepted per step{seen})"
    return _better(what, published, longest, old, new, shown_depth(suite["depths"]), 1.1 if None not in windows else 1.5)


def _depth(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    """The claim about depth, judged by the fraction of all rows that are right up to the last step.

    Rates among rows that are still right cannot be compared: these rows differ between drafters.
    """
    probes, suite = [figures["probes"][name] for name in (old, new)], suite_of(figures, "depth")
    deepest = min(map(deepest_joint, probes))
    if suite is None or deepest < 2 or deepest not in suite["depths"]:
        return None
    rates = [one["joint_acceptance"][deepest - 1] for one in probes]
    length = suite["conditions"][0]["drafters"][new]["against_first"][deepest]
    sure = length["error"] is not None and length["value"] - 1 > CLEARLY * length["error"]
    ratio = rates[1] / rates[0] if rates[0] else float("inf")
    verdict = NOT
    if sure and rates[1] > 1.2 * rates[0]:
        verdict = HOLDS if rates[1] > 2 * rates[0] else WEAKLY
    rows = " / ".join("{:,} of {:,}".format(*right_rows(one, deepest)) for one in probes)
    trained = sorted({one["trained"].get("ttt_steps") for one in figures["drafters"] if one["name"] in (old, new)} - {None})
    steps = f", trained with {' or '.join(map(str, trained))} steps" if trained else ""
    return Claim(
        f"Past the trained depth, drafts of 3.1 stay right where those of 3 do not (rows whose drafts are all right up to step "
        f"{deepest}{steps})",
        "acceptance at step 16: .00 / .53, trained with 2 steps",
        f"{rates[0]:.3f} / {rates[1]:.3f}, {ratio:.2f}× ({rows} rows); acceptance length at depth {deepest} "
        f"{length['value']:.2f}{_spread(length['error'])}×{_calm_depth(probes, deepest)}",
        verdict,
    )


def _calm_depth(probes: list[dict[str, Any]], deepest: int) -> str:
    """The same figures without looping answers, if they are known: loops stay right longest."""
    if not any(one["looping_texts"] for one in probes):
        return ""
    rates = [(one.get("joint_acceptance_not_looping") or [None] * deepest)[deepest - 1] for one in probes]
    if None not in rates:
        return f"; without loops {rates[0]:.3f} / {rates[1]:.3f} of rows"
    lengths = [(one.get("acceptance_length_not_looping") or {}).get(deepest) for one in probes]
    loops = f"; {probes[0]['looping_texts']} of {probes[0]['texts']} answers loop"
    if None in lengths:
        return loops
    shallow = shown_depth(list(probes[0]["acceptance_length"]))
    there = " / ".join(f"{one['acceptance_length_not_looping'][shallow]:.2f}" for one in probes)
    return f"{loops}, without them {lengths[0]:.2f} / {lengths[1]:.2f}, at depth {shallow} {there}"


def _noise(figures: dict[str, Any], old: str, new: str) -> Claim | None:
    suite = suite_of(figures, "noise")
    disturbed, clean = condition_of(suite, "α = 0.5"), condition_of(suite, "no noise")
    if disturbed is None:
        return None
    sides = []
    for name in (old, new):
        noisy, base = (counts_of(one, name) for one in (disturbed, clean))
        if noisy is None or base is None:
            return None
        texts = sorted(text for text in noisy if text in base)
        sides.append(([noisy[text] for text in texts], [base[text] for text in texts]))
    shares = [accepted_ratio(*side) for side in sides]
    more = retention_difference(sides[1], sides[0])
    sure = more.error is not None and more.value > CLEARLY * more.error
    verdict = NOT
    if sure:
        verdict = HOLDS if shares[0].value < 0.5 <= shares[1].value else WEAKLY
    return Claim(
        "Noise of half the state's size costs EAGLE 3 nearly all accepted drafts, and 3.1 less than half",
        "5 % / 58 % kept",
        f"{' / '.join(percent(*share) for share in shares)} kept, {100 * more.value:.0f}"
        f"{'' if more.error is None else f' ± {100 * more.error:.0f}'} points more (depth {shown_depth(suite['depths'])})",
        verdict,
    )


def lowest_length(figures: dict[str, Any], name: str) -> str:
    """The context length with the lowest retention, without loops: it need not be the longest one."""
    suite = suite_of(figures, "context length")
    others = suite["conditions"][1:] if suite else []
    shares = {one["name"]: retention(one, name, shown_depth(suite["depths"])) for one in others}
    shares = {length: share for length, share in shares.items() if share.counts_non_looping}
    if not shares:
        return "–"
    worst = min(shares, key=lambda length: shares[length].non_looping.value)
    one = shares[worst]
    return f"{percent(one.non_looping.value, one.non_looping.error)} ({worst}, {one.non_looping.pairs} pairs)"


def right_rows(probes: dict[str, Any], step: int) -> tuple[int, int]:
    """The number of rows that are right up to a step, and the number of rows, which is the same for all drafters."""
    joint = probes["joint_acceptance"][step - 1]
    if "rows_inside" in probes:
        rows = probes["rows_inside"][step - 1]
        return round(joint * rows), rows
    right = round((probes["conditional_acceptance"][step - 1] or 0) * probes["rows_on_path"][step - 1])  # older figures
    return right, round(right / joint) if joint else probes["rows_on_path"][0]


def deepest_joint(probes: dict[str, Any]) -> int:
    """The last step that any row reaches."""
    return sum(value is not None for value in probes.get("joint_acceptance") or [])
