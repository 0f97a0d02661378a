"""Shows and writes a benchmark's results: a terminal table, JSON with provenance, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fledge.bench.provenance import write_json
from fledge.errors import literal
from fledge.files import write_atomically

COLOURS = ("#c2541b", "#1f6f8b", "#5b8c2a", "#7a4e9e", "#b08900", "#4a4a4a")
HEADINGS = (
    "",
    "users",
    "tok/s\nper user",
    "tok/s\ntotal",
    "speed-up",
    "acceptance\nlength",
    "overhead",
    "memory\nbandwidth",
    "same\noutput",
)
LEGEND = "per user: after the first token; overhead: tokens per pass / speed-up - 1; memory bandwidth: fraction of a copy's"


def table(figures: dict[str, Any]) -> Table:
    answers = "1 answer" if figures["turns"] == 1 else f"{figures['turns']} answers"
    where = f"{figures['model']} on {figures['device']}, {figures['weights']}"
    title = f"{where}; {answers}, up to {figures['max_tokens']} tokens"
    shown = Table(title=literal(title), caption=LEGEND, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if not heading else "right")
    shown.columns[0].min_width = 18
    for result in figures["results"]:
        plain, concurrency = result["plain"], str(result["concurrency"])
        shown.add_row("plain", concurrency, *_speeds(plain), "1.00×", "", "", f"{plain['bandwidth_use']:.0%}", "")
        for one in result["speculative"]:
            shown.add_row(literal(one["label"]), concurrency, *_speeds(one), *_speculative_cells(one))
        shown.add_section()
    for baseline in figures.get("baselines", ()):
        for run in baseline.get("runs", ()):
            label = f"{baseline['baseline']} {baseline['version']}: {run['label']}"
            length = run.get("acceptance_length_micro")
            accepted = f"{length:.2f}" if length else ""
            shown.add_row(literal(label), str(run["concurrency"]), *_speeds(run), "", accepted, "", "", _same(run))
        if "skipped" in baseline:
            shown.add_row(literal(f"{baseline['baseline']}: {_how_it_ended(baseline)}"))
    return shown


def _speeds(one: dict[str, Any]) -> tuple[str, str]:
    return f"{one['tokens_per_second_per_user']:.1f}", f"{one['tokens_per_second']:.1f}"


def _speculative_cells(one: dict[str, Any]) -> list[str]:
    return [
        f"{one['speed_up']:.2f}×",
        f"{one['acceptance']['acceptance_length_micro']:.2f}",
        f"{one['overhead']:.2f}" if one["overhead"] is not None else "–",
        f"{one['bandwidth_use']:.0%}",
        _same(one),
    ]


def _same(one: dict[str, Any]) -> str:
    check = one.get("identical")
    if check is None:
        return ""
    return "all" if check["same"] == check["of"] else f"[red]{check['same']} of {check['of']}[/]"


def _how_it_ended(baseline: dict[str, Any]) -> str:
    count = len(baseline.get("runs", ()))
    return f"stopped after {count} run{'s' if count > 1 else ''}" if count else "skipped"


def skipped_lines(figures: dict[str, Any]) -> list[str]:
    """One line for each other engine that did not run or did not finish, with the reason."""
    skipped = [one for one in figures.get("baselines", ()) if "skipped" in one]
    return [f"{one['baseline']}, {_how_it_ended(one)}: {one['skipped']}" for one in skipped]


def acceptance_lines(figures: dict[str, Any]) -> list[str]:
    """Acceptance by its other definitions, one line per speculative case."""
    lines = []
    for one in figures["results"][0]["speculative"]:
        accepted = one["acceptance"]
        without = accepted["not_looping"]
        loops = f"{without['acceptance_length_micro']:.2f}" if without else "no such answer"
        rates = " ".join(f"{rate:.0%}" for rate in accepted["by_position"])
        lines.append(
            f"{one['label']}: macro {accepted['acceptance_length_macro']:.2f}, without looping answers {loops} "
            f"({accepted['looping_answers']} loop), accepted by position {rates}"
        )
    return lines


def write(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Writes bench.json and plots; returns the files."""
    write_json(folder / "bench.json", figures)
    files = [folder / "bench.json"]
    if any(result["speculative"] for result in figures["results"]):
        files += [_plot_speed(figures, folder / "speed.png"), _plot_acceptance(figures, folder / "acceptance.png")]
    return files


def _plot_speed(figures: dict[str, Any], path: Path) -> Path:
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6))
    at_once = [result["concurrency"] for result in figures["results"]]
    for axis, key in ((left, "tokens_per_second_per_user"), (right, "tokens_per_second")):
        axis.plot(at_once, [result["plain"][key] for result in figures["results"]], "k--o", markersize=4, label="plain")
        for number, case in enumerate(figures["results"][0]["speculative"]):
            speeds = [result["speculative"][number][key] for result in figures["results"]]
            axis.plot(at_once, speeds, "-o", markersize=4, color=COLOURS[number % len(COLOURS)], label=case["label"])
        axis.set_xscale("log", base=2)
        axis.set_xticks(at_once, list(map(str, at_once)))
        axis.set_ylim(bottom=0)
        axis.set_xlabel("conversations at once")
        axis.set_title("tokens/s per user" if axis is left else "tokens/s in total", fontsize=10)
        axis.grid(alpha=0.25)
    left.legend(fontsize=7, frameon=False)
    return _save(figure, path)


def _plot_acceptance(figures: dict[str, Any], path: Path) -> Path:
    plt = pyplot()
    cases = figures["results"][0]["speculative"]
    categories = list(cases[0]["acceptance"]["by_category"])
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, max(3.6, 0.3 * len(categories) * max(1, len(cases) / 2))))
    thickness = 0.8 / len(cases)
    for number, case in enumerate(cases):
        colour, accepted = COLOURS[number % len(COLOURS)], case["acceptance"]
        rates = accepted["by_position"]
        left.plot(range(1, len(rates) + 1), rates, "-o", markersize=4, color=colour, label=case["label"])
        lengths = [accepted["by_category"][category]["acceptance_length_micro"] for category in categories]
        right.barh([place + number * thickness for place in range(len(categories))], lengths, thickness, color=colour)
    left.set_ylim(0, 1)
    left.set_xticks(range(1, max(len(case["acceptance"]["by_position"]) for case in cases) + 1))
    left.set_title("share of steps that accept at each position", fontsize=10)
    left.legend(fontsize=7, frameon=False)
    left.grid(alpha=0.25)
    right.set_yticks([place + 0.4 - thickness / 2 for place in range(len(categories))], categories, fontsize=8)
    right.set_xlim(left=1)
    right.invert_yaxis()
    right.set_title("acceptance length by category", fontsize=10)
    return _save(figure, path)


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    write_atomically(path, lambda file: figure.savefig(file, dpi=110, format="png"))
    pyplot().close(figure)
    return path
