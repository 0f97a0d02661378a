"""`fledge inspect`: shows a drafter's settings and the problems in its files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli import options
from fledge.errors import literal

if TYPE_CHECKING:
    from fledge.checkpoints.inspect import DrafterReport


def inspect(
    drafter: Annotated[str, typer.Argument(help="Folder, name or hub id of a drafter.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Its target: checks that the two fit.")] = None,
    as_json: options.Json = False,
) -> None:
    """Show a drafter's version, flags, layers, sizes and every problem in its files."""
    from fledge.checkpoints.gguf import target_config
    from fledge.checkpoints.inspect import inspect_drafter

    report = inspect_drafter(drafter, target_config(model) if model else None)
    if as_json:
        options.print_json(report.as_dict())
    else:
        _print(report)
    if report.problems:
        raise typer.Exit(options.CHECK_FAILED)


def _print(report: DrafterReport) -> None:
    from rich.console import Console
    from rich.table import Table

    from fledge.checkpoints.drafter_config import FLAGS

    console, config = Console(), report.config
    if config is not None:
        table = Table(show_header=False, box=None, pad_edge=False)
        window = f"the last {config.window} tokens" if config.window else "all tokens"
        rows = {
            "version": f"EAGLE {config.version}",
            "layout": report.origin,
            "flags": ", ".join(f"{flag} {'yes' if getattr(config, flag) else 'no'}" for flag in FLAGS),
            "taps": f"after target layers {', '.join(map(str, config.aux_layer_ids))} (0 = the embeddings)",
            "draft layers": f"{config.num_layers}, hidden {config.hidden_size} (target {config.target_hidden_size}), "
            f"{config.attention}, MLP {config.intermediate_size}",
            "vocabulary": f"{config.draft_vocab_size} of {config.vocab_size} "
            f"({config.draft_vocab_size / config.vocab_size:.1%})",
            "embedding": "its own" if config.own_embedding else "the target's",
            "head": "its own" if config.own_head else "the target's",
            "attention": f"{window}, up to position {config.max_positions}, rope theta {config.rope.theta:g}",
            "parameters": f"{report.num_parameters / 1e6:.2f} million, {report.num_bytes / 1e6:.1f} MB, "
            f"{report.storage or ', '.join(report.dtypes)}",
        }
        for name, value in rows.items():
            table.add_row(f"[bold]{name}[/bold]", literal(value))
        console.print(table)
    for note in report.notes:
        console.print(f"note: {literal(note)}")
    for warning in report.warnings:
        console.print(f"[yellow]warning:[/yellow] {literal(warning)}")
    for problem in report.problems:
        console.print(f"[red]problem:[/red] {literal(problem)}")
    if not report.problems:
        console.print("[green]no problem found[/green]")
