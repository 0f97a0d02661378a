"""`fledge doctor`: checks whether a drafter's acceptance is normal for its target, and if not, says why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli.options import CHECK_FAILED, Device, Dtype, Json, MaxTokens, print_json
from fledge.errors import literal

if TYPE_CHECKING:
    from fledge.bench.doctor import Diagnosis


def doctor(
    drafter: Annotated[str, typer.Argument(help="Folder, name or hub id of a drafter.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The drafter's target: built-in name, folder, GGUF file or hub id.")
    ],
    max_tokens: MaxTokens = 32,
    device: Device = "auto",
    dtype: Dtype = "auto",
    thorough: Annotated[
        bool,
        typer.Option(
            "--thorough", help="Search the target's layers even if the first draft is accepted in 60 % of the steps or more."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Draft with the drafter unchanged and with each known mistake undone; say which mistake explains low acceptance."""
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
    for name, trial in (("unchanged", diagnosis.unchanged), ("repaired", diagnosis.repaired)):
        if trial is not None:
            table.add_row(name, f"{trial.accepted:.2f}", f"{trial.first:.1%}")
    console.print(table)
    if diagnosis.storage:
        console.print(f"stored in {diagnosis.storage}")
    for problem in diagnosis.problems:
        console.print("[red]problem:[/red]", literal(problem))
    if diagnosis.healthy:
        console.print("[green]healthy:[/green]", literal(diagnosis.explanation))
        console.print(f"[dim]{len(diagnosis.trials)} changes tried at length, none clearly better (--json lists them)[/]")
    else:
        console.print(f"[red]{diagnosis.fault}:[/red]", literal(diagnosis.explanation))
        console.print("[bold]what to do:[/bold]", literal(diagnosis.remedy))
