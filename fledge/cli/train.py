"""`fledge train`: a drafter from a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file (see recipes/).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings that differ, as in run.steps=1000.", metavar="[KEY=VALUE]...")
    ] = None,
) -> None:
    """Train a drafter; the same command goes on with a run that was interrupted.

    Several GPUs: torchrun --nproc-per-node 8 -m fledge train recipe.yaml
    """
    from fledge.training.recipe import load_recipe
    from fledge.training.trainer import train as run

    result = run(load_recipe(recipe, overrides or []))
    if not result.finished:
        raise typer.Exit(130)
