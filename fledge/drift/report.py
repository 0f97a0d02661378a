"""The report of a lab run: a self-contained HTML file, the plots as PNG files, and every figure as JSON."""

from __future__ import annotations

import base64
import io
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from fledge.bench.provenance import write_json
from fledge.drift.prompts import NONE_GIVEN, trained_on
from fledge.drift.results import ENOUGH_PAIRS, plus_minus, retention, shown_depth, verdict_table, verdicts
from fledge.files import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.2rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd }
h3 { font-size: 1rem; margin-bottom: .3rem } img { max-width: 100% } .dim { color: #666; font-size: .9em }
table { border-collapse: collapse; font-size: .88em; margin: .6rem 0 } th, td { padding: .2rem .6rem; text-align: right }
th { border-bottom: 1px solid #999 } th:first-child, td:first-child { text-align: left }
tr:nth-child(even) td { background: #f6f6f4 }
.base td { font-weight: 600 } .low { color: #b3261e } .good { color: #2e6b1f } pre { font-size: .8em; white-space: pre-wrap }
"""
# Shares of the baseline from which a figure is green (a robust drafter keeps this much) and below which it is red.
GOOD, LOW = 0.85, 0.7


def write_report(figures: dict[str, Any], folder: Path) -> Path:
    """Writes report.html, report.json and plots/*.png; returns the HTML file."""
    found = {one["name"]: [asdict(verdict) for verdict in verdicts(figures, one["name"])] for one in figures["drafters"]}
    figures = {**figures, "verdicts": found}
    images = {"by-step": plot_by_step(figures)}
    for share in ("sink_share", "own_share"):
        if any(one.get(f"{share}_by_head") for one in figures["probes"].values()):
            images[share.replace("_", "-")] = plot_by_head(figures, share)
    for suite in figures["suites"]:
        images[_slug(suite["name"])] = plot_suite(figures, suite)
    for name, content in images.items():
        _write(folder / "plots" / f"{name}.png", content)
    write_json(folder / "report.json", figures)
    _write(folder / "report.html", html(figures, images).encode())
    return folder / "report.html"


def html(figures: dict[str, Any], images: dict[str, bytes]) -> str:
    names = [one["name"] for one in figures["drafters"]]
    parts = [
        f"<h1>Drift report: {escape(figures['model'])}</h1>",
        f"<p class=dim>{escape(', '.join(names))} · {escape(figures['device'])}, {escape(figures['dtype'])} · "
        f"{escape(str(figures['provenance']['time']))}</p>",
        "<h2>What a robust drafter must show</h2>",
        _table(*verdict_table(figures)),
        "<h2>Drafters</h2>",
        _drafters(figures),
        "<h2>By draft step</h2>",
        _image(images["by-step"], "probes by draft step"),
        _sink(figures["sink"]),
        *(_image(images[name], name) for name in ("sink-share", "own-share") if name in images),
        "<h2>What the target gives the drafters</h2>",
        _target_states(figures),
    ]
    for suite in figures["suites"]:
        parts += [
            f"<h2>{escape(suite['name'].capitalize())}</h2>",
            f"<p class=dim>{escape(' '.join([suite['explanation'], *suite_notes(suite, figures)]))}</p>",
            _image(images[_slug(suite["name"])], suite["name"]),
            *(_suite_table(suite, name) for name in names),
        ]
        if len(names) > 1:
            parts.append(_ratios(suite, names))
    parts += ["<h2>How it was measured</h2>", METHOD, "<h2>Provenance</h2>", _provenance(figures)]
    body = "\n".join(parts)
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>Drift: {escape(figures['model'])}</title>"
        f"<style>{STYLE}</style><body>{body}</body></html>\n"
    )


METHOD = """<p>The target answers each prompt greedily, once. One pass over prompt and answer gives its states; from every
position of the answer each drafter then drafts with its own tokens, as in serving. Greedy acceptance depends only on the
target's text, so this gives exactly what a speculative run accepts at every depth. At a temperature, the target samples its
answers; the draft that equals the target's token is drawn and accepted with probability min(1, q/p). The figures are then
expectations over the drafts, exact for these texts.</p>
<ul>
<li><b>Acceptance length</b>: 1 + accepted drafts / steps over all texts together; the 1 is the token that the target itself
adds. A token outside the draft vocabulary is a miss. In brackets: without answers that loop.</li>
<li><b>kept</b>: acceptance length as a share of the baseline's (in bold), or of the conditions' mean if there is no baseline.
Compared question by question, so only questions that both have count. Without loops: only questions where neither answer
loops, with their number.</li>
<li><b>±</b>: standard error, with texts (or pairs of them) as the independent samples; where conditions are taken together, a
question counts once. Shares and ratios have none below five pairs. <b>steps</b>: verification passes behind the figure.</li>
<li><b>RMS</b>: ‖x‖₂/√d of the state that a step passes to the next.</li>
<li><b>Shares of attention</b>: on the sink, on the rest of the prompt, on the accepted answer, and on the drafter's own tokens
(the one it drafts from and those drafted since); they add up to one. Mean over rows, heads and layers. Read the slope over
depth rather than the level.</li>
<li><b>Cosine</b>: between the fed-back state and the fused target state that it replaces, over rows whose drafts were right so
far.</li>
</ul>"""


def _drafters(figures: dict[str, Any]) -> str:
    step = next(iter(figures["probes"].values())).get("drift_step", 8)
    rows = []
    for one in figures["drafters"]:
        config, probes = one["config"], figures["probes"][one["name"]]
        rows.append(
            {
                "drafter": one["name"],
                "kind": f"EAGLE {one['version']}",
                "parameters": f"{one['parameters'] / 1e6:.1f} M",
                "vocabulary": f"{config['draft_vocab_size']:,}",
                "taps": ", ".join(map(str, config["aux_layer_ids"])),
                "window": str(config["window"] or "none"),
                f"RMS step {step} / 1": _number(probes.get("rms_ratio"), "×"),
                "sink share a step": _number(probes.get("sink_share_slope"), digits=4),
                "own share a step": _number(probes.get("own_share_slope"), digits=4),
            }
        )
    return _table(list(rows[0]), [list(row.values()) for row in rows])


def _sink(sink: dict[str, Any]) -> str:
    clear = "" if sink["clear"] else " The sink is not clear."
    return (
        f"<p>The target's sink, found from its own attention: column {sink['column']} (<code>{escape(sink['token'])}</code>) "
        f"with {sink['share']:.0%} of all attention; uniform attention would give it {sink['uniform']:.1%}. Next: column "
        f"{sink['runner_up']} with {sink['runner_up_share']:.1%}.{clear}</p>"
    )


def _target_states(figures: dict[str, Any]) -> str:
    rows = [
        [f"{name}: {layer}", *(_number(places.get(place)) for place in ("sink", "prompt", "answer"))]
        for name, states in figures["target_states"].items()
        for layer, places in states.items()
    ]
    return _table(["mean RMS", "at the sink", "prompt", "answer"], rows)


def _suite_table(suite: dict[str, Any], name: str) -> str:
    depths, shown = suite["depths"], shown_depth(suite["depths"])
    rows, classes = [], []
    for condition in suite["conditions"]:
        one = condition["drafters"][name]
        without = one.get("acceptance_length_not_looping") if one.get("looping_texts") else None
        lengths = {}
        for depth in depths:
            length = f"{one['acceptance_length'][depth]:.2f}"
            lengths[str(depth)] = f"{length} ({without[depth]:.2f})" if without else length
        left = retention(condition, name, shown)
        colour = "good" if left.all.value >= GOOD else ("low" if left.all.value < LOW else "")
        note = f" ({condition['note']})" if condition["note"] else ""
        rows.append(
            {
                f"{name}: acceptance length at depth": condition["name"] + note,
                **lengths,
                f"± at {shown}": _number(one["standard_error"][shown]),
                f"kept at {shown}": f"<span class='{colour}'>{left.all}</span>",
                "kept without loops": left.without_loops,
                "steps": f"{one['steps'][shown]:.0f}",
                "answers": str(one["texts"]),
                "looping": str(one["looping_texts"]),
                "tokens of the prompt": _number(condition.get("prompt_tokens"), digits=0),
            }
        )
        classes.append("base" if condition["name"] == suite["baseline"] else "")
    return _table(list(rows[0]), [list(row.values()) for row in rows], classes)


def _ratios(suite: dict[str, Any], names: list[str]) -> str:
    head = [f"acceptance length against {names[0]}", *(f"{name}, depth {d}" for name in names[1:] for d in suite["depths"])]
    rows = []
    for condition in suite["conditions"]:
        others = [condition["drafters"][name]["against_first"] for name in names[1:]]
        texts = condition["drafters"][names[0]]["texts"]
        rows.append([condition["name"], *(plus_minus(other[d], texts) for other in others for d in suite["depths"])])
    overall = suite["overall_against_first"]
    rows.append(["all together", *(plus_minus(overall[name][d]) for name in names[1:] for d in suite["depths"])])
    return _table(head, rows, [*[""] * (len(rows) - 1), "base"])


def _provenance(figures: dict[str, Any]) -> str:
    lines = [f"{key}: {value}" for key, value in figures["provenance"].items()]
    lines += [f"data: {figures['data']}", f"settings: {figures['settings']}"]
    lines += [f"weights of {one['name']}, sha256: {one['weights_sha256']}" for one in figures["drafters"]]
    lines.append(f"took: {figures['seconds']:.0f} s")
    return f"<pre>{escape(chr(10).join(lines))}</pre><p class=dim>Every figure is in report.json.</p>"


def _table(head: list[str], rows: list[list[str]], classes: list[str] | None = None) -> str:
    classes = classes or [""] * len(rows)
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f"<tr class='{kind}'>"
        + "".join(f"<td>{cell if cell.startswith('<span') else escape(cell)}</td>" for cell in row)
        + "</tr>"
        for row, kind in zip(rows, classes, strict=True)
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def suite_notes(suite: dict[str, Any], figures: dict[str, Any]) -> list[str]:
    """Returns the notes that one needs to read a suite's table."""
    if suite["name"] == "templates":
        return _known_templates(suite, figures)
    if suite["name"] == "system prompts":
        return [
            f"“{NONE_GIVEN}”: no system prompt is given, and a template that has a default puts it in (SmolLM2's does). "
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


def _image(content: bytes, name: str) -> str:
    return f"<img alt='{escape(name)}' src='data:image/png;base64,{base64.b64encode(content).decode()}'>"


def _number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}{unit}"


def _slug(name: str) -> str:
    return name.replace(" ", "-")


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, lambda file: file.write(content))


# --- plots, as PNG bytes ------------------------------------------------------------------------------------------------

COLOURS = ("#c2541b", "#1f6f8b", "#5b8c2a", "#7a4e9e", "#b08900", "#4a4a4a", "#d98cb3", "#63b7af", "#8c6239", "#a3a3ff")
BY_STEP = (
    ("rms", "RMS of the fed-back state", True),
    ("sink_share", "attention on the sink", False),
    ("own_share", "attention on its own tokens", False),
    ("prompt_share", "attention on the rest of the prompt", False),
    ("entropy", "entropy of attention (nats)", False),
    ("cosine", "cosine with the target's state (right drafts)", False),
    ("accuracy", "share of right drafts", False),
    ("joint_acceptance", "share of drafts right up to here", False),
)


def png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
    plt.close(figure)
    return buffer.getvalue()


def plot_by_step(figures: dict[str, Any]) -> bytes:
    """Plots every probe over draft depth, all drafters in each panel."""
    shown = [panel for panel in BY_STEP if any(probes.get(panel[0]) for probes in figures["probes"].values())]
    figure, axes = plt.subplots(-(-len(shown) // 4), 4, figsize=(16, 3.4 * -(-len(shown) // 4)), squeeze=False)
    for axis in axes.flat[len(shown) :]:
        axis.set_visible(False)
    for axis, (name, title, logarithmic) in zip(axes.flat, shown, strict=False):
        for colour, (drafter, probes) in zip(_colours(figures), figures["probes"].items(), strict=False):
            points = [(step, value) for step, value in enumerate(probes.get(name) or [], 1) if value is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=drafter)
        if logarithmic:
            axis.set_yscale("log", base=2)
            axis.yaxis.set_major_formatter("{x:g}")
        elif axis.get_ylim()[0] > 0:
            axis.set_ylim(bottom=0)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("draft step", fontsize=8)
        _plain(axis)
    axes.flat[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    return png(figure)


def plot_by_head(figures: dict[str, Any], share: str) -> bytes:
    """Plots one share by head (rows) and draft step (columns), one panel per drafter."""
    probes = {name: one[f"{share}_by_head"] for name, one in figures["probes"].items() if one.get(f"{share}_by_head")}
    figure, axes = plt.subplots(1, len(probes), figsize=(5.2 * len(probes), 3.4), squeeze=False)
    top = max(max(map(max, steps)) for steps in probes.values())
    for axis, (name, steps) in zip(axes.flat, probes.items(), strict=True):
        table = list(zip(*steps, strict=True))
        image = axis.imshow(
            table, aspect="auto", vmin=0, vmax=top, cmap="viridis", extent=(0.5, len(steps) + 0.5, len(table), 0)
        )
        axis.set_title(f"{name}: {share.replace('_', ' ')} by head", fontsize=10)
        axis.set_xlabel("draft step", fontsize=8)
        axis.set_ylabel("head", fontsize=8)
        figure.colorbar(image, ax=axis)
    figure.tight_layout()
    return png(figure)


def plot_suite(figures: dict[str, Any], result: dict[str, Any]) -> bytes:
    """Plots the acceptance length of every condition (over depth if there is only one condition)."""
    names = [one["name"] for one in figures["drafters"]]
    conditions, depth = result["conditions"], shown_depth(result["depths"])
    if len(conditions) == 1:
        return _over_depth(figures, result)
    height = max(2.2, 0.34 * len(conditions) * max(1, 0.6 * len(names)))
    figure, axis = plt.subplots(figsize=(8.4, height))
    thickness = 0.8 / len(names)
    for number, (name, colour) in enumerate(zip(names, _colours(figures), strict=False)):
        lengths = [condition["drafters"][name]["acceptance_length"][depth] for condition in conditions]
        mine = [condition["drafters"][name] for condition in conditions]
        errors = [one["standard_error"][depth] or 0.0 if one["texts"] >= ENOUGH_PAIRS else 0.0 for one in mine]
        places = [place + (number - (len(names) - 1) / 2) * thickness for place in range(len(conditions))]
        axis.barh(places, lengths, thickness, color=colour, label=name, xerr=errors, error_kw={"elinewidth": 0.8, "alpha": 0.6})
        for place, length, error in zip(places, lengths, errors, strict=True):
            axis.text(length + error, place, f" {length:.2f}", va="center", fontsize=7)
    axis.set_yticks(range(len(conditions)), [condition["name"] for condition in conditions], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(left=1)
    axis.set_xlabel(f"acceptance length at depth {depth}, with standard error", fontsize=8)
    axis.legend(
        fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=min(4, len(names))
    )  # clear of the bars
    _plain(axis)
    return png(figure)


def _over_depth(figures: dict[str, Any], result: dict[str, Any]) -> bytes:
    figure, axis = plt.subplots(figsize=(6.4, 3.2))
    for (name, one), colour in zip(result["conditions"][0]["drafters"].items(), _colours(figures), strict=False):
        lengths = [one["acceptance_length"][depth] for depth in result["depths"]]
        axis.plot(result["depths"], lengths, marker="o", markersize=3, color=colour, label=name)
    axis.set_xlabel("depth", fontsize=8)
    axis.set_ylabel("acceptance length", fontsize=8)
    axis.set_ylim(bottom=1)
    axis.legend(fontsize=8, frameon=False)
    _plain(axis)
    return png(figure)


def _colours(figures: dict[str, Any]) -> list[str]:
    return [COLOURS[number % len(COLOURS)] for number in range(len(figures["drafters"]))]


def _plain(axis: Any) -> None:
    axis.grid(alpha=0.25)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
