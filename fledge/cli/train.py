"""`fledge train`: trains a drafter from a recipe."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options
from fledge.errors import UserError
from fledge.files import NO_SPACE


def _help_recipe(wanted: bool) -> None:
    if wanted:
        from fledge.training.recipe import describe_keys

        print(describe_keys(), end="")
        raise typer.Exit


def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file (see recipes/).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Recipe keys to override, such as run.steps=1000.", metavar="[KEY=VALUE]...")
    ] = None,
    help_recipe: Annotated[
        bool,
        typer.Option(
            "--help-recipe", is_eager=True, callback=_help_recipe, help="Print every key of a recipe, its default and meaning."
        ),
    ] = False,
    arms: Annotated[
        list[str] | None,
        typer.Option(
            help="Train several drafters on the same batches of target states; one option per drafter, with its own keys, "
            'such as "eagle3=drafter.version=3 drafter.window=null". Each gets a folder in output.',
            metavar="NAME=[KEY=VALUE ...]",
        ),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Train a drafter from a recipe; the same command resumes an interrupted run.

    Several GPUs: torchrun --nproc-per-node 8 -m fledge train recipe.yaml
    """
    from fledge.training.recipe import load_recipe
    from fledge.training.trainer import train as run
    from fledge.training.trainer import train_arms

    settings = load_recipe(recipe, overrides or [])
    _require_writable("data.cache", settings.data.cache)
    _require_writable("run.hidden_states_folder", settings.run.hidden_states_folder)
    _require_writable("output", settings.output)
    try:
        results = train_arms(settings, arms) if arms else {"": run(settings)}
    except OSError as error:
        if error.filename is None and error.errno not in NO_SPACE:
            raise  # not an error of a file
        where = f"{error.filename}: " if error.filename is not None else ""
        raise UserError(f"{where}{error.strerror}; the same command resumes from the last checkpoint") from error
    if as_json and os.environ.get("RANK", "0") == "0":
        found = {name: vars(result) for name, result in results.items()}
        options.print_json(found if arms else found[""])
    if not all(result.finished for result in results.values()):
        raise typer.Exit(130)


def _require_writable(key: str, folder: str | None) -> None:
    """Checks that a folder can be written, before hours of work: makes a temporary file in it, or in its nearest parent."""
    if folder is None:
        return
    path = Path(folder)
    try:
        existing = next(place for place in (path, *path.parents) if place.exists())
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        raise UserError(f"{key}: nothing can be written to {folder} ({error.strerror}); name another folder") from None
