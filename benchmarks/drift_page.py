"""Writes the page of the drift study: tables and plots, all made from the figures of one lab run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.drift_ablation import ablation, by_condition, comparisons
from benchmarks.drift_claims import HOLDS, NOT, WEAKLY, claims, lowest_length
from benchmarks.drift_figures import ratio_over
from fledge.drift import report as plots
from fledge.drift.prompts import NONE_GIVEN, trained_on
from fledge.drift.report import suite_notes
from fledge.drift.results import ENOUGH_PAIRS, plus_minus, retention, shown_depth, verdict_table
from fledge.files import write_atomically

# Keys of dictionaries by draft depth, whose keys JSON turns into strings.
BY_DEPTH = {
    *("acceptance_length", "standard_error", "acceptance_length_macro", "acceptance_length_not_looping"),
    *("standard_error_not_looping", "steps"),
    *("retention", "retention_error", "retention_not_looping", "against_first"),
}
STEPS = (1, 2, 4, 5, 8, 12, 16)
PICTURED = ("templates", "system prompts", "context length", "noise", "depth")


@dataclass
class Ablation:
    """Another lab run, over drafters that were trained to differ in one setting each."""

    figures: dict[str, Any]
    source: str  # the file's name
    about_training: str
    conclusions: str = ""  # what follows for the recipe


def write_study(
    figures: dict[str, Any],
    source: Path,
    page: Path,
    images: Path,
    about_training: str = "",
    apart: Ablation | None = None,
) -> Path:
    """Writes the page and its plots. `about_training`: how the drafters were trained. `apart`: the ablation of the fixes."""
    figures = with_todays_names(with_depths(figures))
    pictures = {"by-step": plots.plot_by_step(figures)}
    for suite in figures["suites"]:
        if suite["name"] in PICTURED:
            pictures[suite["name"].replace(" ", "-")] = plots.plot_suite(figures, suite)
    if apart is not None:
        apart = replace(apart, figures=with_todays_names(with_depths(apart.figures)))
        pictures["ablation"] = plots.plot_by_step(apart.figures)
    for name, content in pictures.items():
        _write(images / f"drift-study-{name}.png", content)
    _write(page, study(figures, source.name, os.path.relpath(images, page.parent), about_training, apart).encode())
    return page


def with_depths(value: Any, name: str = "") -> Any:
    """The figures as before they became JSON: depths are numbers again."""
    if isinstance(value, list):
        return [with_depths(one) for one in value]
    if not isinstance(value, dict):
        return value
    if name == "overall_against_first":
        return {drafter: with_depths(ratios, "against_first") for drafter, ratios in value.items()}
    return {int(key) if name in BY_DEPTH else key: with_depths(one, key) for key, one in value.items()}


def with_todays_names(figures: dict[str, Any]) -> dict[str, Any]:
    """Updates older figures, which call a missing system prompt "none" and contain the name of the texts' folder."""
    suites = []
    for suite in figures["suites"]:
        suite = {
            **suite,
            "explanation": re.sub(r"(\d+) files of \S+(?=\.)", r"\1 given with --documents", suite["explanation"]),
        }
        if suite["name"] == "system prompts" and suite["baseline"] == "none":
            conditions = [c if c["name"] != "none" else {**c, "name": NONE_GIVEN} for c in suite["conditions"]]
            suite |= {"baseline": NONE_GIVEN, "conditions": conditions}
        suites.append(suite)
    return {**figures, "suites": suites}


def study(figures: dict[str, Any], source: str, images: str, about_training: str = "", apart: Ablation | None = None) -> str:
    names = [one["name"] for one in figures["drafters"]]
    old = names[0]
    new = next((one["name"] for one in figures["drafters"][1:] if one["version"] == "3.1"), names[-1])
    parts = ["# The drift study", _opening(figures, source), "## The drafters", _drafters(figures), about_training]
    parts += ["## Limits of these figures", _limits(figures)]
    if len(names) > 1:
        parts += ["## What was claimed, and what we find", _claims(figures, old, new)]
    parts += ["## What a robust drafter must show", _checks(figures, names)]
    parts += ["## By draft step", f"![probes by draft step]({images}/drift-study-by-step.png)", _by_step(figures, names)]
    parts += ["### What the target gives the drafters", _target_states(figures)]
    parts += ablation(figures, table) + comparisons(figures, table) if apart is None else _apart(apart, images)
    parts.append("## Under stress")
    parts.append(
        "Acceptance length (1 + accepted / steps) with its standard error over answers; in brackets how much of the baseline's "
        "is kept, paired by question. Then the same over questions where neither answer loops (and how many these are), and "
        f"ratios of drafters on the same answers. No error is given below {ENOUGH_PAIRS} answers or pairs."
    )
    for suite in figures["suites"]:
        parts.append(f"### {suite['name'].capitalize()}")
        parts.append(" ".join([suite["explanation"], *suite_notes(suite, figures)]))
        if suite["name"] in PICTURED:
            parts.append(f"![{suite['name']}]({images}/drift-study-{suite['name'].replace(' ', '-')}.png)")
        parts.append(_depths(suite, names) if suite["name"] == "depth" else _suite(suite, figures, names))
    parts += ["## How it was made", _provenance(figures)]
    if apart is not None:
        parts += ["The ablation:", _provenance(apart.figures)]
    parts.append(_command(source, apart))
    return "\n\n".join(part for part in parts if part) + "\n"


def _apart(apart: Ablation, images: str) -> list[str]:
    """The sections on the ablation, from its own lab run."""
    figures = apart.figures
    title, *fixes = ablation(figures, table)
    told = (
        f"{apart.about_training} Every figure of this section and the next is from [`{apart.source}`]"
        f"(../benchmarks/results/{apart.source})."
    )
    picture = f"![the ablation's drafters by draft step]({images}/drift-study-ablation.png)"
    follows = ["## What follows for the recipe", apart.conclusions] if apart.conclusions else []
    parts = [title, told, _drafters(figures), *fixes, picture, *comparisons(figures, table)]
    return [*parts, "### By condition", *by_condition(figures, table), *follows]


def _opening(figures: dict[str, Any], source: str) -> str:
    settings, provenance = figures["settings"], figures["provenance"]
    kinds = " against ".join(sorted({one["version"] for one in figures["drafters"]}))
    probed = next(iter(figures["probes"].values()))["texts"]
    about = (
        f"EAGLE {kinds} on {figures['model']}: how the drafters' states and attention change with draft depth, and how much "
        "acceptance they keep under other templates, system prompts, context lengths, temperatures and noise. "
        "[`drift-lab.md`](drift-lab.md) has the definitions."
    )
    measured = (
        f"Measured on {provenance['device']} ({figures['device']}, {figures['dtype']}): {probed} prompts for the probes and "
        f"domains, up to {settings['prompts']} for each template and system prompt, {settings['documents']} documents with "
        f"{settings['questions']} questions each at every context length, answers of up to {settings['max_tokens']} tokens. "
        f"Every figure is from [`{source}`](../benchmarks/results/{source}); `benchmarks/drift_study.py` writes this page from "
        "it."
    )
    return f"{about}\n\n{measured}"


def _drafters(figures: dict[str, Any]) -> str:
    rows = []
    for one in figures["drafters"]:
        config, trained = one["config"], one["trained"]
        augmented = {True: "yes", False: "no"}.get(trained.get("augmented"), "–")
        window = str(config["window"] or "none")
        fixes = [_yes(config["fc_norm"]), _yes(config["norm_output"])]
        rows.append(
            [
                one["name"],
                *fixes,
                window,
                str(trained.get("ttt_steps", "–")),
                str(trained.get("sequence_length", "–")),
                augmented,
                f"`{one['weights_sha256'][:16]}`" if one.get("weights_sha256") else "not recorded",
            ]
        )
    head = ["drafter", "fc_norm", "norm_output", "window", "trained steps", "trained length", "other templates in training"]
    return table([*head, "weights, sha256"], rows)


def _limits(figures: dict[str, Any]) -> str:
    """The list of what the page's standard errors cover and do not cover."""
    settings, suites = figures["settings"], {suite["name"] for suite in figures["suites"]}
    lines = [
        "Each drafter was trained once: errors are over texts and do not include the difference between two trainings by one "
        "recipe.",
        "The conditions of a suite (except domains) have the same questions; over all conditions, a question is one sample.",
    ]
    if "context length" in suites:
        lines.append(
            f"Context lengths: {settings['documents']} documents times {settings['questions']} questions are treated as "
            "independent pairs, although questions share documents; errors there are rather too small."
        )
    lines.append(
        "Loops are easy to draft, and this target loops often. If enough pairs have no loops, the figure without them is also "
        "given, and is the one that counts."
    )
    if not any("sink_share_change_error" in one for one in figures["probes"].values()):
        lines.append("These figures have no standard errors for sizes of states and shares of attention.")
    return "\n".join(f"- {line}" for line in lines)


def _claims(figures: dict[str, Any], old: str, new: str) -> str:
    found = claims(figures, old, new)
    rows = [[claim.what, claim.published, claim.here, f"**{claim.verdict}**"] for claim in found]
    counted = {verdict: sum(claim.verdict == verdict for claim in found) for verdict in (HOLDS, WEAKLY, NOT)}
    summary = (
        f"Of {len(found)} claims {counted[HOLDS] or 'none'} {'holds' if counted[HOLDS] <= 1 else 'hold'} as published, "
        f"{counted[WEAKLY]} in direction only (the sign is the published one, the size is not), {counted[NOT]} not at all. "
        f"Figures are {old} / {new}; the published ones are the drift paper's, for Llama 3.1 8B."
    )
    return f"{summary}\n\n" + table(["claim", "published", "here", ""], rows)


def _checks(figures: dict[str, Any], names: Sequence[str]) -> str:
    head, rows = verdict_table(figures)
    rows.append(["lowest at any length, without loops", "–", *(lowest_length(figures, name) for name in names)])
    close = (
        "The mark depends on the figure alone, on the lower one if there are two; (close): less than two standard errors "
        "from the limit."
    )
    return table(head, rows) + f"\n\n{close}"


def _by_step(figures: dict[str, Any], names: Sequence[str]) -> str:
    measures = (
        ("rms", "RMS of the fed-back state"),
        ("sink_share", "share on the sink"),
        ("own_share", "share on own tokens"),
        ("prompt_share", "share on the rest of the prompt"),
        ("entropy", "entropy, nats"),
        ("cosine", "cosine of the fed-back with the fused target state"),
        ("cosine_hidden", "cosine of the heads' inputs"),
        ("accuracy", "right drafts"),
        ("joint_acceptance", "right up to this step"),
        ("rows_on_path", "rows right before this step"),
    )
    deepest = max(len(figures["probes"][name]["rms"]) for name in names)
    steps = [step for step in STEPS if step <= deepest]
    rows = []
    for key, label in measures:
        for name in names:
            values = figures["probes"][name].get(key)
            if values:
                rows.append([label, name, *(_number(values[step - 1], _digits(key)) for step in steps)])
    sink = figures["sink"]
    found = (
        f"The target's sink, found from its own attention, is column {sink['column']} (`{sink['token']}`) with "
        f"{sink['share']:.0%} of all attention, where uniform attention would give {sink['uniform']:.1%}."
    )
    which = (
        "Sizes and shares are means over all rows, right drafts over the rows whose text is long enough: the same rows for "
        "every drafter. Cosines are over rows whose earlier drafts were right, which differ between drafters."
    )
    return f"{found} {which}\n\n" + table(["at step", "", *map(str, steps)], rows)


def _digits(key: str) -> int:
    return 0 if key == "rows_on_path" else 3 if key.endswith(("_share", "_acceptance")) else 2


def _target_states(figures: dict[str, Any]) -> str:
    rows = [
        [name, layer, *(_number(places.get(place)) for place in ("sink", "prompt", "answer"))]
        for name, states in figures["target_states"].items()
        for layer, places in states.items()
        if layer.startswith("fc ") or name == next(iter(figures["target_states"]))
    ]
    return table(["", "mean RMS of", "at the sink", "in the prompt", "in the answer"], rows)


def _suite(suite: dict[str, Any], figures: dict[str, Any], names: Sequence[str]) -> str:
    depth, rows = shown_depth(suite["depths"]), []
    known = {name for one in figures["drafters"] for name in trained_on(one.get("trained") or {})}
    has_calm = suite["baseline"] is not None
    for condition in suite["conditions"]:
        cells, non_looping = [], []
        for name in names:
            one = condition["drafters"][name]
            error = one["standard_error"][depth] if one["texts"] >= ENOUGH_PAIRS else None
            share, is_base = retention(condition, name, depth), condition["name"] == suite["baseline"]
            left = "" if is_base else f" ({share.all})"
            cells.append(f"{one['acceptance_length'][depth]:.2f}{f' ± {error:.2f}' if error is not None else ''}{left}")
            non_looping.append("" if is_base else share.without_loops)
        one = condition["drafters"][names[0]]
        ratios = [plus_minus(condition["drafters"][name]["against_first"][depth], one["texts"]) for name in names[1:]]
        mark = " †" if suite["name"] == "templates" and condition["name"] in known else ""
        numbers = [f"{one['texts']} ({one['looping_texts']})", f"{one['steps'][depth]:.0f}"]
        rows.append([condition["name"] + mark, *cells, *(non_looping if has_calm else ()), *ratios, *numbers])
    found = [ratio_over(figures, suite["name"], name, names[0]) for name in names[1:]]
    if found and all(found):
        blank = [""] * len(names) * (2 if has_calm else 1)
        rows.append(["all together", *blank, *(plus_minus(ratio._asdict()) for ratio in found), "", ""])
    head = [
        f"depth {depth}",
        *names,
        *(f"{name}, kept without loops" for name in names if has_calm),
        *(f"{name} / {names[0]}" for name in names[1:]),
        "answers (looping)",
        f"steps, {names[0]}",
    ]
    return table(head, rows)


def _depths(suite: dict[str, Any], names: Sequence[str]) -> str:
    condition = suite["conditions"][0]
    steps = [depth for depth in suite["depths"] if depth in (1, 2, 3, 5, 7, 10, 13, 16)]
    rows = [[name, *(f"{condition['drafters'][name]['acceptance_length'][d]:.2f}" for d in steps)] for name in names]
    for name in names[1:]:
        rows.append([f"{name} / {names[0]}", *(plus_minus(condition["drafters"][name]["against_first"][d]) for d in steps)])
    return table(["acceptance length at depth", *map(str, steps)], rows)


def _provenance(figures: dict[str, Any]) -> str:
    facts = figures["provenance"]
    kept = ("fledge", "commit", "device", "threads", "python", "torch", "command", "documents_sha256", "time", "note")
    lines = [f"{name}: {facts[name]}" for name in kept if facts.get(name) is not None]
    if "seconds" in figures:
        lines.append(f"took: {figures['seconds']:.0f} s for {len(figures['drafters'])} drafters")
    return "```\n" + "\n".join(lines) + "\n```"


def _command(source: str, apart: Ablation | None) -> str:
    more = f" --ablation benchmarks/results/{apart.source}" if apart is not None else ""
    return f"Page: `python -m benchmarks.drift_study write benchmarks/results/{source}{more}`"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _yes(flag: bool) -> str:
    return "yes" if flag else "no"


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))
