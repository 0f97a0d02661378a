"""Says in words what drifts, where and how much. Every sentence is made from figures of the same report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

FLAT, MILD = 1.1, 1.5  # growth of the fed-back state from step 1 to step 8 that is still flat, or only mild
MOVED = 0.01  # change of an attention share a step from which it counts as moving
WEAK = 0.85  # share of the baseline's acceptance length below which a condition is named
VAGUE = 0.07  # standard error of such a share from which it says little
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


def _shares(probes: dict[str, Any], sink: dict[str, Any]) -> str:
    if "sink_share_slope" not in probes:
        return ""
    at = probes["drift_step"] - 1
    parts = []
    for name, label in (
        ("sink_share", "the sink"),
        ("own_share", "its own tokens"),
        ("prompt_share", "the rest of the prompt"),
    ):
        first, last, change = probes[name][0], probes[name][at], probes[f"{name}_slope"]
        verb = "stays on" if abs(change) < MOVED else ("moves to" if change > 0 else "leaves")
        parts.append(f"{verb} {label} ({first:.2f} → {last:.2f}, {change:+.3f} a step)")
    unclear = "" if sink["clear"] else " The target has no clear sink, so read the sink's share with care."
    return f"Attention {parts[0]}, {parts[1]} and {parts[2]}.{unclear}"


def _closeness(probes: dict[str, Any]) -> str:
    last = min(probes.get("drift_step", 8), deepest_known(probes))
    known = [(step, value) for step, value in enumerate((probes.get("cosine") or [])[:last], 1) if value is not None]
    if len(known) < 2:
        return ""
    (first_step, first), (last_step, last) = known[0], known[-1]
    return (
        f"While its drafts are right, its state points as the target's does to a cosine of {first:.2f} at step {first_step} "
        f"and {last:.2f} at step {last_step}."
    )


def _accuracy(probes: dict[str, Any]) -> str:
    accuracy = [value for value in probes.get("accuracy") or [] if value is not None]
    if len(accuracy) < 2:
        return ""
    at = min(8, len(accuracy))
    deep = f", {accuracy[-1]:.0%} at step {len(accuracy)}" if len(accuracy) > at else ""
    return f"Drafts are the target's token in {accuracy[0]:.0%} of cases at step 1, {accuracy[at - 1]:.0%} at step {at}{deep}."


def _inputs(states: dict[str, Any], figures: dict[str, Any], name: str) -> str:
    sizes = {layer: places["answer"] for layer, places in states.items() if layer.startswith("layer") and "answer" in places}
    if len(sizes) < 2:
        return ""
    (low, small), (high, large) = min(sizes.items(), key=lambda x: x[1]), max(sizes.items(), key=lambda x: x[1])
    config = next(one["config"] for one in figures["drafters"] if one["name"] == name)
    normed = config["fc_norm"] or config["norm_before_fc"]
    effect = "which its norm before the fc layer evens out" if normed else "and the largest dominates the fused input"
    return f"The target's states differ in size by {large / small:.1f}× ({low}: {small:.2f}, {high}: {large:.2f}), {effect}."


def _past_training(name: str, figures: dict[str, Any]) -> str:
    """What is left beyond the depth and the length that a drafter was trained for, where both are known."""
    trained = next(one.get("trained") or {} for one in figures["drafters"] if one["name"] == name)
    parts = []
    steps, rates = trained.get("ttt_steps"), figures["probes"][name].get("conditional_acceptance") or []
    last = deepest_known(figures["probes"][name])
    if steps and last > steps:
        parts.append(
            f"trained with {steps} draft steps, it is right in {rates[steps - 1]:.0%} of cases at step {steps} and in "
            f"{rates[last - 1]:.0%} at step {last}, once all before were right"
        )
    suite = next((one for one in figures["suites"] if one["name"] == "context length"), None)
    length = trained.get("sequence_length")
    if suite and length and suite["conditions"][-1]["prompt_tokens"] > length:
        longest, depth = suite["conditions"][-1], shown_depth(suite["depths"])
        one = longest["drafters"][name]
        error = one["retention_error"][depth]
        spread = "" if error is None else f" ± {error:.0%}"
        parts.append(
            f"trained on texts of up to {length:,} tokens, it keeps {one['retention'][depth]:.0%}{spread} of its acceptance "
            f"length at {longest['name']}"
        )
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _weakest(suite: dict[str, Any], name: str) -> str:
    """The condition with the lowest share of the baseline, if it is low enough to speak of."""
    depth = shown_depth(suite["depths"])
    found = [(c["drafters"][name]["retention"][depth], c) for c in suite["conditions"] if c["name"] != suite["baseline"]]
    if not found:
        return ""
    share, condition = min(found, key=lambda pair: pair[0])
    if share >= WEAK:
        return ""
    one = condition["drafters"][name]
    base = suite["baseline"] or "the mean"
    error = (one.get("retention_error") or {}).get(depth)
    sure = "" if error is None else f" ± {error:.0%}"
    few = "; too few answers to tell" if error is None or error > VAGUE else ""
    return (
        f"{suite['name']}: “{condition['name']}” (acceptance length {one['acceptance_length'][depth]:.2f} at depth {depth}, "
        f"{share:.0%}{sure} of {base}{few})"
    )


def _together(figures: dict[str, Any]) -> list[str]:
    names = [one["name"] for one in figures["drafters"]]
    probes = figures["probes"]
    sentences = []
    ratios = {name: probes[name].get("rms_ratio") for name in names}
    if all(ratio is not None for ratio in ratios.values()):
        step = probes[names[0]]["drift_step"]
        listed = ", ".join(f"{name} {ratio:.2f}×" for name, ratio in ratios.items())
        sentences.append(f"Growth of the fed-back state to step {step}: {listed}.")
    slopes = {name: probes[name].get("sink_share_slope") for name in names}
    if all(value is not None for value in slopes.values()):
        sentences.append("Sink share a step: " + ", ".join(f"{name} {value:+.4f}" for name, value in slopes.items()) + ".")
    for name in names[1:]:
        sentences += _against(name, names[0], figures)
    return sentences


def _against(name: str, first: str, figures: dict[str, Any]) -> list[str]:
    by_condition = [
        (c["drafters"][name]["against_first"][shown_depth(suite["depths"])], f"{suite['name']}: {c['name']}")
        for suite in figures["suites"]
        for c in suite["conditions"]
    ]
    best, worst = (which(by_condition, key=lambda pair: pair[0]["value"]) for which in (max, min))
    ahead = sum(ratio["value"] > 1 for ratio, _ in by_condition)
    clear = sum(ratio["error"] is not None and ratio["value"] - 1 > 2 * ratio["error"] for ratio, _ in by_condition)
    behind = sum(ratio["error"] is not None and 1 - ratio["value"] > 2 * ratio["error"] for ratio, _ in by_condition)
    sentence = (
        f"Against {first}, {name} accepts longer in {ahead} of {len(by_condition)} conditions ({clear} by more than two "
        f"standard errors; {behind} shorter by as much); at best {plus_minus(best[0])} ({best[1]}), at worst "
        f"{plus_minus(worst[0])} ({worst[1]})."
    )
    overall = {suite["name"]: suite["overall_against_first"][name][shown_depth(suite["depths"])] for suite in figures["suites"]}
    listed = ", ".join(f"{suite} {plus_minus(ratio)}" for suite, ratio in overall.items())
    return [sentence, f"All conditions of a suite together, {name} over {first}: {listed}."]


def plus_minus(ratio: dict[str, float | None]) -> str:
    error = "" if ratio["error"] is None else f" ± {ratio['error']:.2f}"
    return f"{ratio['value']:.2f}{error}×"
