"""`fledge learn-report`: shows how acceptance changed on a server with --learn-dir."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def learn_report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of --learn-dir.")],
    out: Annotated[Path | None, typer.Option("--out", "--output", "-o", help="The picture; default DIR/curve.png.")] = None,
    as_json: options.Json = False,
) -> None:
    """Draw acceptance length over the requests served, with drafter swaps marked."""
    from fledge.learning.report import report

    events, text = report(folder, out)
    if as_json:
        points = [event for event in events if event["event"] == "point"]
        lengths = {"first": points[0]["acceptance_length"], "last": points[-1]["acceptance_length"]}
        options.print_json({"acceptance_length": lengths, "requests": points[-1]["requests"], "events": events})
    else:
        print(text)
