"""`fledge doctor`: is a drafter's acceptance sane for its target, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli.options import CHECK_FAILED, Device, Dtype, Json, MaxTokens, Model, print_json
from fledge.errors import literal

if TYPE_CHECKING:
    from fledge.bench.doctor import Diagnosis


def doctor(
    drafter: Annotated[str, typer.Argument(help="Folder, name or hub id of a drafter.")],
    model: Model = "smollm2-135m",
    max_tokens: MaxTokens = 32,
    device: Device = "auto",
    dtype: Dtype = "auto",
    thorough: Annotated[
        bool, typer.Option("--thorough", help="Try every target layer in place of each tap, even if acceptance is good.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Decode a few prompts, and if few drafts are accepted, try the known mistakes until one explains it."""
    from fledge import progress
    from fledge.bench.doctor import diagnose

    with progress.task("reading the drafter", unit="trials") as shown:
        diagnosis = diagnose(
            drafter,
            model,
            max_tokens=max_tokens,
            device=device,
            dtype=dtype,
            thorough=thorough,
            on_trial=shown.show,
        )
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        _print(diagnosis)
    if not diagnosis.healthy:
        raise typer.Exit(CHECK_FAILED)


def _print(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("drafter", "accepted per step", "first token accepted", box=None)
    if diagnosis.as_it_stands is not None:
        table.add_row("unchanged", f"{diagnosis.as_it_stands.accepted:.2f}", f"{diagnosis.as_it_stands.first:.1%}")
    for trial in sorted(diagnosis.trials, key=lambda trial: -trial.accepted)[:8]:
        table.add_row(literal(f"{trial.fault}: {trial.remedy}"), f"{trial.accepted:.2f}", f"{trial.first:.1%}")
    console.print(table)
    if diagnosis.storage:
        console.print(f"stored in {diagnosis.storage}")
    for problem in diagnosis.problems:
        console.print("[red]problem:[/red]", literal(problem))
    if diagnosis.healthy:
        console.print("[green]healthy:[/green]", literal(diagnosis.explanation))
    else:
        console.print(f"[red]{diagnosis.fault}:[/red]", literal(diagnosis.explanation))
        console.print("[bold]what to do:[/bold]", literal(diagnosis.remedy))
