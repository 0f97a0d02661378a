"""Says in words what drifts, where and how much. Every sentence is made from figures of the same report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from fledge.drift.pairs import ENOUGH_PAIRS, distinct_conditions, kept, plus_minus, ratio_over, suite_of
from fledge.drift.templates import trained_on

FLAT, MILD = 1.1, 1.5  # growth of the fed-back state from step 1 to step 8 that is still flat, or only mild
MOVED = 0.1  # change of an attention share, relative to its size at step 1, from which it counts as moving
SMALL = 0.1  # a share of attention below which a change of it moves little
WEAK = 0.85  # share of the baseline's acceptance length below which a condition is named
ENOUGH_ROWS = 20  # rows behind a mean that is worth a sentence
USELESS = 1.2  # acceptance length below which a drafter drafts next to nothing, so that shares of it say nothing


def in_words(figures: dict[str, Any]) -> dict[str, list[str]]:
    """Sentences by drafter, and under `together` those that compare them."""
    words = {one["name"]: _one(one["name"], figures) for one in figures["drafters"]}
    if len(words) > 1:
        words["together"] = _together(figures)
    return words


def deepest_known(probes: dict[str, Any]) -> int:
    """The last step that enough rows reach with all drafts right to say how often the next one is; 0: none."""
    rows = probes.get("rows_on_path")
    if not rows:  # older figures: by the share of rows that get there
        rows = [1000 * share for share in [1.0, *(probes.get("joint_acceptance") or [])[:-1]] if share is not None]
    return next((step for step, count in enumerate(rows) if count < ENOUGH_ROWS), len(rows))


def shown_depth(depths: Sequence[int]) -> int:
    """The depth that sentences and charts speak of: 5, or the nearest there is."""
    return min(depths, key=lambda depth: (abs(depth - 5), depth))


def _one(name: str, figures: dict[str, Any]) -> list[str]:
    probes = figures["probes"][name]
    useful, length = _acceptance(probes)
    sentences = [length, _size(probes), _shares(probes, figures["sink"]), _closeness(probes), _accuracy(probes)]
    sentences += [_inputs(figures["target_states"].get(name) or {}, figures, name), _past_training(name, figures)]
    if not useful:
        return [sentence for sentence in sentences if sentence]
    weak, steady = [], []
    for suite in figures["suites"]:
        if suite["name"] in ("depth", "domains"):
            continue
        (weak if (found := _weakest(suite, name)) else steady).append(found or suite["name"])
    sentences += [f"Weakest under {text}." for text in weak]
    if steady:
        sentences.append(f"Holds at least {WEAK:.0%} of its baseline acceptance length in: {', '.join(steady)}.")
    return [sentence for sentence in sentences if sentence]


def _acceptance(probes: dict[str, Any]) -> tuple[bool, str]:
    lengths = probes["acceptance_length"]
    depth = min(lengths, key=lambda depth: abs(depth - 5))
    length, useful = lengths[depth], lengths[depth] >= USELESS
    looping = f", {probes['looping_texts']} of {probes['texts']} answers loop" if probes["looping_texts"] else ""
    verdict = "" if useful else " It accepts next to nothing: look for a mistake in its training or loading first."
    return useful, f"Acceptance length {length:.2f} at depth {depth} over all prompts{looping}.{verdict}"


def _size(probes: dict[str, Any]) -> str:
    sizes, ratio = probes.get("rms"), probes.get("rms_ratio")
    if not sizes or ratio is None:
        return ""
    step = probes["drift_step"]
    moved = f"{sizes[0]:.2f} → {sizes[step - 1]:.2f}, {ratio:.2f}× from step 1 to {step}"
    if ratio > MILD:
        return f"The fed-back state grows with every step (RMS {moved}): the drift that a norm on the fed-back state stops."
    if ratio > FLAT:
        return f"The fed-back state grows a little (RMS {moved})."
    if ratio < 1 / FLAT:
        return f"The fed-back state shrinks (RMS {moved})."
    return f"The fed-back state keeps its size (RMS {moved})."


def share_change(probes: dict[str, Any], name: str) -> tuple[float, float, float]:
    """At step 1, at the drift step, and the change relative to the former: a small share can only move by little."""
    first, last = probes[name][0], probes[name][probes["drift_step"] - 1]
    return first, last, last / first - 1 if first else 0.0


def _shares(probes: dict[str, Any], sink: dict[str, Any]) -> str:
    if "sink_share_slope" not in probes:
        return ""
    parts = []
    for name, label in (
        ("sink_share", "on the sink"),
        ("own_share", "on its own tokens"),
        ("prompt_share", "on the rest of the prompt"),
    ):
        first, last, change = share_change(probes, name)
        small = " of a small share" if first < SMALL else ""
        verb = "hardly changes" if abs(change) < MOVED else f"{'rises' if change > 0 else 'falls'} by {abs(change):.0%}{small}"
        parts.append(f"{label} {verb} ({first:.3f} → {last:.3f})")
    unclear = "" if sink["clear"] else " The target has no clear sink, so read the sink's share with care."
    return f"Attention {parts[0]}, {parts[1]} and {parts[2]} from step 1 to {probes['drift_step']}.{unclear}"


def _closeness(probes: dict[str, Any]) -> str:
    last = min(probes.get("drift_step", 8), deepest_known(probes))
    found = []
    for name, what in (
        ("cosine", "its fed-back state has a cosine of {} with the fused target state it stands in for"),
        ("cosine_hidden", "what its head reads one of {} with what the target's head reads"),
    ):
        values = [value for value in (probes.get(name) or [])[:last] if value is not None]
        if len(values) > 1:
            found.append(what.format(f"{values[0]:.2f} at step 1 and {values[-1]:.2f} at step {len(values)}"))
    return f"While its drafts are right, {'; '.join(found)}." if found else ""


def _accuracy(probes: dict[str, Any]) -> str:
    accuracy = [value for value in probes.get("accuracy") or [] if value is not None]
    if len(accuracy) < 2:
        return ""
    at = min(8, len(accuracy))
    deep = f", {accuracy[-1]:.0%} at step {len(accuracy)}" if len(accuracy) > at else ""
    return f"Drafts are the target's token in {accuracy[0]:.0%} of cases at step 1, {accuracy[at - 1]:.0%} at step {at}{deep}."


def _inputs(states: dict[str, Any], figures: dict[str, Any], name: str) -> str:
    """Sizes of the target's states are the target's; what a drafter makes of them shows in the parts of its fc output."""
    sizes = _in_answers(states, "layer")
    if len(sizes) < 2:
        return ""
    (low, small), (high, large) = min(sizes.items(), key=lambda x: x[1]), max(sizes.items(), key=lambda x: x[1])
    config = next(one["config"] for one in figures["drafters"] if one["name"] == name)
    normed = config["fc_norm"] or config["norm_before_fc"]
    sentence = f"The target's states differ in size by {large / small:.1f}× ({low}: {small:.2f}, {high}: {large:.2f})"
    sentence += ", and are normed before the fc layer" if normed else ""
    parts = _in_answers(states, "fc part of ")
    if len(parts) < 2:
        return f"{sentence}; how much of the fused input comes from each was not measured."
    ordered = sorted(parts.items(), key=lambda x: -x[1])
    listed = ", ".join(f"{layer} {size:.2f}" for layer, size in parts.items())
    ratio = ordered[0][1] / ordered[1][1]
    return f"{sentence}; to the fused input they add (RMS) {listed}: most is {ordered[0][0]}'s, {ratio:.1f}× the next."


def _in_answers(states: dict[str, Any], kind: str) -> dict[str, float]:
    return {
        name.removeprefix("fc part of "): places["answer"]
        for name, places in states.items()
        if name.startswith(kind) and "answer" in places
    }


def right_rows(probes: dict[str, Any], step: int) -> tuple[int, int]:
    """How many rows are right up to a step, and of how many: the same rows whatever the drafter."""
    joint = probes["joint_acceptance"][step - 1]
    if "rows_inside" in probes:
        rows = probes["rows_inside"][step - 1]
        return round(joint * rows), rows
    right = round((probes["conditional_acceptance"][step - 1] or 0) * probes["rows_on_path"][step - 1])  # older figures
    return right, round(right / joint) if joint else probes["rows_on_path"][0]


def deepest_joint(probes: dict[str, Any]) -> int:
    """The last step that some row reaches."""
    return sum(value is not None for value in probes.get("joint_acceptance") or [])


def _past_training(name: str, figures: dict[str, Any]) -> str:
    """What is left beyond the depth and the length that a drafter was trained for, where both are known."""
    drafter = next(one for one in figures["drafters"] if one["name"] == name)
    trained, probes, parts = drafter.get("trained") or {}, figures["probes"][name], []
    steps, last = trained.get("ttt_steps"), deepest_joint(probes)
    if steps and last > steps:
        (early, early_rows), (late, late_rows) = right_rows(probes, steps), right_rows(probes, last)
        parts.append(
            f"trained with {steps} draft steps, all its drafts up to step {steps} are right in {early / early_rows:.1%} of "
            f"rows ({early:,} of {early_rows:,}), up to step {last} in {late / late_rows:.1%} ({late:,} of {late_rows:,}"
            f"{', answers that loop among them' if probes['looping_texts'] else ''})"
        )
    suite = suite_of(figures, "context length")
    length = trained.get("sequence_length")
    if suite and length and suite["conditions"][-1]["prompt_tokens"] > length:
        longest, depth = suite["conditions"][-1], shown_depth(suite["depths"])
        window = drafter["config"]["window"]
        seen = f", of which it attends to the last {window}" if window else ""
        parts.append(
            f"trained on texts of up to {length:,} tokens, it keeps {kept(longest, name, depth)} of its acceptance length at "
            f"{longest['name']}{seen}"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _weakest(suite: dict[str, Any], name: str) -> str:
    """The condition with the lowest share of the baseline, with loops or without, if it is low enough to speak of."""
    depth = shown_depth(suite["depths"])
    found = [(kept(c, name, depth), c) for c in suite["conditions"] if c["name"] != suite["baseline"]]
    if not found:
        return ""
    share, condition = min(found, key=lambda pair: pair[0].least)
    if share.least >= WEAK:
        return ""
    length = condition["drafters"][name]["acceptance_length"][depth]
    error = share.least_error
    if error is None:
        sure = "; too few answers to tell"
    else:
        sure = "" if WEAK - share.least > 2 * error else f"; less than two standard errors below {WEAK:.0%}"
    return (
        f"{suite['name']}: “{condition['name']}” (acceptance length {length:.2f} at depth {depth}; kept of "
        f"{suite['baseline'] or 'the mean'}: {share}{sure})"
    )


def suite_notes(suite: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """What one must know to read a suite's table."""
    if suite["name"] == "templates":
        return _known_templates(suite, figures)
    if suite["name"] == "system prompts":
        return [
            f"“{suite['baseline']}”: no system prompt is given, and a template that has a default puts it in (SmolLM2's does). "
            "None of these prompts is used in Fledge's training."
        ]
    if suite["name"] == "context length":
        windows = {one["name"]: one["config"]["window"] for one in figures["drafters"] if one["config"]["window"]}
        listed = ", ".join(f"{name} to the last {window} tokens" for name, window in windows.items())
        note = (
            f"With a window a drafter attends only to what lies in it ({listed}): past that length the target alone reads more "
            "and what is tested are the target's changed states and answers, not the drafter's own reach."
        )
        return [note] if windows else []
    return []


def _known_templates(suite: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    known = {one["name"]: trained_on(one.get("trained") or {}) for one in figures["drafters"]}
    names = [c["name"] for c in suite["conditions"] if c["name"] != suite["baseline"]]
    groups: dict[tuple[str, ...], list[str]] = {}
    for drafter, met in known.items():
        groups.setdefault(tuple(name for name in names if name in met), []).append(drafter)
    return [
        f"† {' and '.join(drafters)} met {', '.join(met)} in training (alike but for a preamble or white space); "
        f"new to them: {', '.join(name for name in names if name not in met)}."
        for met, drafters in groups.items()
        if met
    ]


def _together(figures: dict[str, Any]) -> list[str]:
    names = [one["name"] for one in figures["drafters"]]
    probes = figures["probes"]
    sentences = []
    ratios = {name: probes[name].get("rms_ratio") for name in names}
    if all(ratio is not None for ratio in ratios.values()):
        step = probes[names[0]]["drift_step"]
        listed = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in ratios.items())
        sentences.append(f"Growth of the fed-back state to step {step}: {listed}.")
    if all("sink_share" in probes[name] and "drift_step" in probes[name] for name in names):
        changes = {name: share_change(probes[name], "sink_share") for name in names}
        listed = ", ".join(
            f"{name} {change:+.0%} ({first:.3f} → {last:.3f})" for name, (first, last, change) in changes.items()
        )
        sentences.append(f"Share of attention on the sink, step {probes[names[0]]['drift_step']} against step 1: {listed}.")
    for name in names[1:]:
        sentences += _against(name, names[0], figures)
    return sentences


def _against(name: str, first: str, figures: dict[str, Any]) -> list[str]:
    return [sentence for say in (_by_condition, _by_suite, _states_apart) if (sentence := say(name, first, figures))]


def _by_condition(name: str, first: str, figures: dict[str, Any]) -> str:
    """Over conditions with enough answers, each set of answers once."""
    found = [
        (c["drafters"][name]["against_first"][shown_depth(suite["depths"])], f"{suite['name']}: {c['name']}")
        for suite, c in distinct_conditions(figures)
        if c["drafters"][name]["texts"] >= ENOUGH_PAIRS
    ]
    if not found:
        return ""
    best, worst = (which(found, key=lambda pair: pair[0]["value"]) for which in (max, min))
    ahead = sum(ratio["value"] > 1 for ratio, _ in found)
    clear = [what for ratio, what in found if ratio["error"] is not None and ratio["value"] - 1 > 2 * ratio["error"]]
    by_suite = ", ".join(f"{name} {n}" for name, n in Counter(what.split(": ")[0] for what in clear).items())
    behind = sum(ratio["error"] is not None and 1 - ratio["value"] > 2 * ratio["error"] for ratio, _ in found)
    return (
        f"Against {first}, {name} accepts longer in {ahead} of {len(found)} conditions of at least {ENOUGH_PAIRS} answers "
        f"({len(clear)} by more than two standard errors{f': {by_suite}' if clear else ''}; {behind} shorter by as much; "
        f"chance alone would give about {len(found) / 44:.1f} of each, and they share questions, so they are no independent "
        f"trials); at best {plus_minus(best[0])} ({best[1]}), at worst {plus_minus(worst[0])} ({worst[1]})."
    )


def _by_suite(name: str, first: str, figures: dict[str, Any]) -> str:
    overall = {suite["name"]: ratio_over(figures, suite["name"], name, first) for suite in figures["suites"]}
    listed = ", ".join(f"{suite} {plus_minus(ratio._asdict())}" for suite, ratio in overall.items() if ratio)
    return f"All conditions of a suite together, {name} over {first}, a question being one sample: {listed}." if listed else ""


def _states_apart(name: str, first: str, figures: dict[str, Any]) -> str:
    """Where a drafter's states lie further from the target's than another's, and yet it drafts no worse."""
    mine, theirs = figures["probes"][name], figures["probes"][first]
    at = min(deepest_known(mine), deepest_known(theirs), mine.get("drift_step", 0)) - 1
    pairs = [[(one.get(key) or [])[: at + 1] for one in (mine, theirs)] for key in ("cosine", "cosine_hidden")]
    if at < 1 or any(len(values) <= at or None in values for pair in pairs for values in pair):
        return ""
    depth = shown_depth(list(mine["acceptance_length"]))
    lengths = [one["acceptance_length"][depth] for one in (mine, theirs)]
    if lengths[0] < lengths[1] or any(a[at] >= b[at] for a, b in pairs):
        return ""
    return (
        f"By step {at + 1} the states of {name} lie further from the target's than those of {first} (both cosines), and it "
        f"drafts no worse (acceptance length {lengths[0]:.2f} against {lengths[1]:.2f} at depth {depth}). Drafters are trained "
        "for the right tokens, not for states that agree with the target's, so a falling cosine is no sign of failing drafts."
    )
