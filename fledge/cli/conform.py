"""`fledge conform`: checks that a server gives the same answers with speculation as without."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def conform(
    url: Annotated[str, typer.Argument(help="Where the server is, such as http://localhost:8000.")],
    against: Annotated[
        str | None,
        typer.Option(help="A server of the same model without speculation. Default: switch it off per request, if possible."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name in requests. Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    against_api_key: Annotated[
        str | None, typer.Option(envvar="FLEDGE_AGAINST_API_KEY", help="The other server's key.")
    ] = None,
    out: Annotated[list[Path] | None, typer.Option(help="Write a report: .json, .html or .md; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One prompt of each kind, and shorter answers.")] = False,
    users: Annotated[int, typer.Option(min=2, help="Concurrent requests in the check under load.")] = 16,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one request may take.")] = 120.0,
    as_json: options.Json = False,
) -> None:
    """Check any OpenAI-compatible server: same answers with and without speculation, streamed or whole, alone or under load."""
    import asyncio

    from rich.console import Console

    from fledge import progress
    from fledge.bench.conform import ConformSettings, run_conformance
    from fledge.bench.conform_report import check_suffix, print_report, write_report

    for path in out or ():
        check_suffix(path)
    settings = ConformSettings(url, against, model, api_key, against_api_key, quick, users, timeout)
    with progress.task("asking the server", unit="scenarios") as shown:
        report = asyncio.run(run_conformance(settings, shown.show))
    print_report(report, Console(quiet=as_json))
    for path in out or ():
        write_report(report, path)
    if as_json:
        options.print_json(report.to_dict())
    if not report.passed:
        raise typer.Exit(options.CHECK_FAILED)
