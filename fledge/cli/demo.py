"""`fledge demo`: see speculation at work, and that it changes nothing but the speed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


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
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Decode eight prompts plainly and speculatively: speed, acceptance, and proof that the output is the same."""
    from rich.console import Console
    from rich.table import Table

    from fledge import sources

    sources.check_file(model)
    from fledge.bench.comparison import against_llamacpp, compare, summarise
    from fledge.bench.prompts import DEMO
    from fledge.bench.provenance import provenance, write_json
    from fledge.cli.render import figures, print_delta
    from fledge.errors import literal
    from fledge.sampling import SamplingParams

    console = Console()
    # Each prompt is decoded twice: the second time should be as much work as the first.
    settings = {"dtype": dtype, "quantization": quantization, "device": device, "prefix_caching": False}
    settings["kv_cache_dtype"] = kv_cache_dtype
    llm = options.load(model, drafter, depth, tree=tree, **settings)
    described = llm.engine.drafter.description if llm.engine.drafter is not None else "none"
    about = f"{llm.engine.config.device}, {llm.engine.config.weights}; drafter: {described}"
    console.print(f"[bold]{literal(model)}[/] on {literal(about)}\n")
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    console.print(f"[bold]{DEMO[0].text}[/]  [dim](accepted draft tokens in [/][green]green[/][dim])[/]\n")
    completion = llm.chat([{"role": "user", "content": DEMO[0].text}], params, on_delta=print_delta)
    console.print(f"\n[dim]{literal(figures(completion))}[/]\n", highlight=False)

    with console.status("decoding each prompt plainly, then speculatively …") as status:
        done = iter(range(1, len(DEMO) + 1))
        results = compare(llm, DEMO, params, lambda _: status.update(f"{next(done)} of {len(DEMO)} prompts decoded both ways"))
    table = Table(title=f"batch 1, greedy, up to {max_tokens} tokens")
    table.add_column("prompt")
    for heading in ("tokens", "plain tok/s", "spec. tok/s", "speed-up", "acceptance length", "identical output"):
        table.add_column(heading, justify="right")
    for result in results:
        table.add_row(
            result.prompt.category,
            str(len(result.plain.token_ids)),
            f"{result.plain.tokens_per_second:.1f}",
            f"{result.speculative.tokens_per_second:.1f}",
            f"{result.speed_up:.2f}×",
            f"{result.speculative.stats.acceptance_length:.2f}",
            "yes" if result.identical else "[red]NO[/]",
        )
    whole = summarise(results)
    table.add_section()
    table.add_row(
        "all",
        str(sum(len(result.plain.token_ids) for result in results)),
        f"{whole.plain_tokens_per_second:.1f}",
        f"{whole.speculative_tokens_per_second:.1f}",
        f"[bold]{whole.speed_up:.2f}×[/]",
        f"{whole.acceptance_length:.2f}",
        "[bold]yes[/]" if whole.identical else "[red]NO[/]",
    )
    console.print(table)
    console.print(f"identical output: {'yes' if whole.identical else 'no'}")
    with console.status("llama.cpp decodes the same prompts …"):
        llamacpp = against_llamacpp(llm, model, results, max_tokens)
    if llamacpp is not None:
        console.print(llamacpp.describe(), highlight=False)
    if json_file is not None:
        write_json(
            json_file,
            {
                "model": model,
                "drafter": described,
                "depth": depth,
                "tree": tree,
                "dtype": llm.engine.config.dtype,
                "quantization": quantization,
                "summary": whole.to_dict(),
                "llama_cpp": None if llamacpp is None else llamacpp.to_dict(),
                "prompts": [result.to_dict() for result in results],
                "provenance": provenance([prompt.text for prompt in DEMO]),
            },
        )
    if not whole.identical and llm.engine.config.dtype == "float32":
        raise typer.Exit(1)
