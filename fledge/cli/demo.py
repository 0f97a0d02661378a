"""`fledge demo`: shows what speculation gains, and that the output stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fledge.cli import options

if TYPE_CHECKING:
    from rich.table import Table

    from fledge.bench.comparison import Comparison

WIDE = 78  # terminal columns that the whole table needs


def demo(
    model: options.Model = "smollm2-135m",
    drafter: options.DrafterName = "auto",
    depth: options.Depth = "auto",
    tree: options.Tree = False,
    max_tokens: options.MaxTokens = 128,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    device: options.Device = "auto",
    threads: options.Threads = 0,
    max_model_len: options.MaxModelLen = 0,
    out: Annotated[Path | None, typer.Option(help="Also write the figures to this JSON file.")] = None,
    as_json: options.Json = False,
) -> None:
    """Decode eight prompts plainly and speculatively: speed, acceptance, and proof that the output is the same."""
    from rich.console import Console

    from fledge import progress, sources

    sources.check_file(model)
    from fledge.bench.comparison import against_llamacpp, compare, summarise
    from fledge.bench.prompts import DEMO
    from fledge.bench.provenance import provenance, write_json
    from fledge.cli.render import figures, print_delta
    from fledge.errors import literal
    from fledge.sampling import SamplingParams

    console = Console(quiet=as_json)
    # No prefix caching: each prompt is decoded twice, and both runs must do the same work.
    llm = options.load(
        model,
        drafter,
        depth,
        tree=tree,
        dtype=dtype,
        quantization=quantization,
        device=device,
        threads=threads,
        max_model_len=max_model_len,
        prefix_caching=False,
        kv_cache_dtype=kv_cache_dtype,
    )
    about = "{device}, {weights}; drafter: {drafter}".format(**options.resolved(llm))
    console.print(f"[bold]{literal(model)}[/] on {literal(about)}\n")
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    console.print(f"[bold]{DEMO[0].text}[/]  [dim](accepted draft tokens in [/][green]green[/][dim])[/]\n")
    completion = llm.chat([{"role": "user", "content": DEMO[0].text}], params, on_delta=None if as_json else print_delta)
    console.print(f"\n[dim]{literal(figures(completion))}[/]\n", highlight=False)

    with progress.task("decoding each prompt both ways", len(DEMO), "prompts") as shown:
        results = compare(llm, DEMO, params, lambda _: shown.advance())
    whole = summarise(results)
    console.print(table(results, max_tokens, console.width))
    console.print(f"identical output: {'yes' if whole.identical else 'no'}")
    with progress.task("llama.cpp decodes the same prompts"):
        llamacpp = against_llamacpp(llm, model, results, max_tokens)
    if llamacpp is not None:
        console.print(llamacpp.describe(), highlight=False)
    content = {
        "model": model,
        "tree": tree,
        **options.resolved(llm),
        "summary": whole.to_dict(),
        "llama_cpp": None if llamacpp is None else llamacpp.to_dict(),
        "prompts": [result.to_dict() for result in results],
        "provenance": provenance([prompt.text for prompt in DEMO]),
    }
    if out is not None:
        write_json(out, content)
    if as_json:
        options.print_json(content)
    if not whole.identical:
        raise typer.Exit(options.CHECK_FAILED)


def table(results: Sequence[Comparison], max_tokens: int, width: int) -> Table:
    """One row per prompt and one for all. A narrow terminal gets fewer columns; text is never cut."""
    from rich import box
    from rich.table import Table

    from fledge.bench.comparison import summarise

    whole = summarise(results)
    rows = [
        (
            result.prompt.category,
            len(result.plain.token_ids),
            result.plain.tokens_per_second,
            result.speculative.tokens_per_second,
            result.speed_up,
            result.speculative.stats.acceptance_length,
            result.identical,
        )
        for result in results
    ]
    tokens = sum(len(result.plain.token_ids) for result in results)
    speeds = (whole.plain_tokens_per_second, whole.speculative_tokens_per_second, whole.speed_up)
    rows.append(("all", tokens, *speeds, whole.acceptance_length, whole.identical))
    is_wide = width >= WIDE
    made = Table(title=f"batch 1, greedy, up to {max_tokens} tokens", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ["prompt", "tokens", "plain\ntok/s", "speculative\ntok/s", "speed-up", "acceptance\nlength", "identical\noutput"]
    for heading in headings if is_wide else (headings[0], *headings[2:6]):
        made.add_column(heading, justify="left" if heading == "prompt" else "right", no_wrap=True)
    for name, tokens, plain, speculative, speed_up, length, identical in rows:
        if name == "all":
            made.add_section()
        cells = [name, f"{tokens:,}", f"{plain:.1f}", f"{speculative:.1f}", f"{speed_up:.2f}×", f"{length:.2f}"]
        cells.append("yes" if identical else "[red]NO[/]")
        made.add_row(*(cells if is_wide else (cells[0], *cells[2:6])), style="bold" if name == "all" else None)
    return made
