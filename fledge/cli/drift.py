"""`fledge drift`: measures how far drafters drift, and how acceptance changes under stress."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fledge.cli import options

if TYPE_CHECKING:
    from rich.console import Console


def drift(
    model: Annotated[str, typer.Argument(help="The target: built-in name, folder, GGUF file or hub id.")],
    drafter: Annotated[list[str], typer.Option("--drafter", "-d", help="A drafter to measure; repeat to compare several.")],
    out: Annotated[Path, typer.Option(help="Folder for report.html, report.json and plots.")],
    quick: Annotated[bool, typer.Option("--quick", help="A few prompts of everything: minutes on a CPU.")] = False,
    data: Annotated[str, typer.Option(help="Prompts: 'builtin', a JSONL file or folder, or a hub id.")] = "builtin",
    documents: Annotated[
        Path | None, typer.Option(help="Folder of .txt or .md texts for long contexts. Default: Python's own documentation.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens. 0: 128, or 32 when quick.")] = 0,
    max_model_len: Annotated[int, typer.Option(help="Longest context to measure. 0: the model's limit.")] = 0,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    as_json: options.Json = False,
) -> None:
    """See where drafters drift: states, attention and acceptance by depth, under other templates, prompts and lengths."""
    from dataclasses import replace

    from rich.console import Console

    from fledge import progress
    from fledge.drift.lab import run_lab
    from fledge.drift.report import write_report
    from fledge.drift.suites import Settings
    from fledge.errors import UserError, printable

    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder for the report")
    settings = Settings.quick() if quick else Settings()
    if max_tokens:
        settings = replace(settings, max_tokens=max_tokens)
    with progress.task("starting", unit="prompts") as shown:
        figures = run_lab(
            model,
            drafter,
            settings=settings,
            data=data,
            documents=documents,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            on_progress=shown.show,
        )
        shown.show("writing the report")
        page = write_report(figures, out)
    if as_json:
        options.print_json(figures | {"report": str(page)})
        return
    _print(Console(), figures)
    print(printable(f"report: {page}"))


def _print(console: Console, figures: dict[str, Any]) -> None:
    """Prints the verdicts on each drafter, and its acceptance length in the baseline and worst condition of each suite."""
    from rich.table import Table

    from fledge.drift.results import shown_depth, verdict_table
    from fledge.errors import literal

    names = [one["name"] for one in figures["drafters"]]
    sink = figures["sink"]
    took = f"; {figures['seconds']:.0f} s" if "seconds" in figures else ""
    model = literal(figures["model"])
    console.print(f"[bold]{model}[/]: sink at column {sink['column']}, {sink['share']:.0%} of its attention{took}")
    head, rows = verdict_table(figures)
    table = Table(*map(literal, head), box=None)
    for row in rows:
        table.add_row(*map(literal, row))
    for suite in figures["suites"]:
        depth = shown_depth(suite["depths"])
        cells = []
        for name in names:
            lengths = {c["name"]: c["drafters"][name]["acceptance_length"][depth] for c in suite["conditions"]}
            worst = min(lengths, key=lambda condition: lengths[condition])
            base = suite["baseline"] or max(lengths, key=lambda condition: lengths[condition])
            fall = f" … {lengths[worst]:.2f} ({worst})" if lengths[worst] < lengths[base] else ""
            cells.append(f"{lengths[base]:.2f}{fall}")
        table.add_row(f"{suite['name']}, depth {depth}: baseline … worst", "", *map(literal, cells))
    console.print(table)
