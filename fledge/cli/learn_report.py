"""`fledge learn-report`: what a server with --learn-dir has learnt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def learn_report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of --learn-dir.")],
    output: Annotated[Path | None, typer.Option("--output", "-o", help="The picture; default DIR/curve.png.")] = None,
) -> None:
    """Draw acceptance over the requests served, with the swaps marked."""
    from fledge.learning.report import report

    print(report(folder, output))
