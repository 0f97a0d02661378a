"""`fledge bench-serve`: measures any running OpenAI-compatible server under load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def bench_serve(
    url: Annotated[str, typer.Argument(help="Where the server is, such as http://localhost:8000.")],
    data: Annotated[str, typer.Option(help="Prompts: a JSONL file, a text file with one per line, or 'builtin'.")],
    concurrency: Annotated[str, typer.Option(help="Concurrent requests: levels, run one after the other.")] = "1,4,16",
    request_rate: Annotated[float | None, typer.Option(help="Requests per second, at random times (Poisson).")] = None,
    num_prompts: Annotated[int, typer.Option(min=0, help="Prompts per level; 0: all.")] = 0,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Answers of full length, if the server supports it.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Also measure without speculation, on a Fledge server.")] = False,
    processes: Annotated[
        int, typer.Option(min=0, help="Client processes; 0: one per 16 users, at most half of the cores.")
    ] = 0,
    model: Annotated[str | None, typer.Option(help="Model name in requests. Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write all figures to this JSON file.")] = None,
    picture: Annotated[Path | None, typer.Option("--png", help="Draw throughput against speed per user.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure throughput, tokens/s per user, TTFT, TPOT, ITL and acceptance of an OpenAI-compatible server."""
    from rich.console import Console

    from fledge import progress
    from fledge.bench.load import LoadSettings
    from fledge.bench.load_report import load_table, plot, read_conversations, run_levels
    from fledge.bench.provenance import provenance, write_json
    from fledge.errors import UserError, literal

    levels = options.numbers(concurrency, "--concurrency")
    if request_rate is not None and request_rate <= 0:
        raise UserError("--request-rate must be positive")
    conversations = read_conversations(data)
    conversations = conversations[:num_prompts] if num_prompts else conversations
    settings = LoadSettings(
        url,
        model=model,
        api_key=api_key,
        max_tokens=max_tokens,
        temperature=temperature,
        ignore_eos=ignore_eos,
        request_rate=request_rate,
        processes=processes,
    )
    console = Console(quiet=as_json)
    with progress.task("connecting", unit="requests") as shown:
        runs = run_levels(settings, conversations, levels, plain, shown.show)
    console.print(load_table(settings.url, runs, console.width))
    errors = [error for _, reports in runs for report in reports for error in report.errors]
    for error in errors[:3]:
        console.print(f"[red]{literal(error)}[/]", highlight=False)
    results = {name: [report.to_dict() for report in reports] for name, reports in runs}
    figures = {"url": settings.url, "runs": results, "provenance": provenance(conversations)}
    if out is not None:
        write_json(out, figures)
    if picture is not None:
        plot(runs, picture)
    if as_json:
        options.print_json(figures)
    if errors:
        raise typer.Exit(options.CHECK_FAILED)
