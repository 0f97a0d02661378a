"""`fledge bench`: compares speculation with plain decoding and with other engines, on the same prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def bench(
    model: Annotated[str, typer.Argument(help="The target: built-in name, folder, GGUF file or hub id.")] = "smollm2-135m",
    drafter: Annotated[list[str] | None, typer.Option("--drafter", "-d", help="Drafters to measure. Default: auto.")] = None,
    data: Annotated[str, typer.Option(help="'builtin', a JSONL file or a folder of them, or a hub id.")] = "builtin",
    category: Annotated[list[str] | None, typer.Option(help="Only these categories.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="Conversations per category; 0: all.")] = 0,
    concurrency: Annotated[str, typer.Option(help="Concurrent conversations: a list such as 1,4,16.")] = "1",
    depth: Annotated[str, typer.Option(help="Speculation depths: a list such as 3,5, or auto.")] = "5",
    adaptive: Annotated[
        bool,
        typer.Option("--adaptive", help="--depth is the maximum, as in serving: lower under load. Default: fixed depth."),
    ] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Measure draft trees as well as chains.")] = False,
    tree_width: options.TreeWidth = 4,
    tree_nodes: options.TreeNodes = 12,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions; the fastest run of each case counts.")] = 1,
    raw: Annotated[bool, typer.Option("--raw", help="Send prompts unchanged, without the chat template.")] = False,
    baseline: Annotated[
        str, typer.Option(help="Other engines to run: transformers, vllm, llama_cpp, or several with commas.")
    ] = "",
    assistant: Annotated[str, typer.Option(help="A small model for transformers' assisted generation.")] = "",
    vllm_python: Annotated[str, typer.Option(help="Python of the environment that has vLLM. Default: this one.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for bench.json and plots.")] = None,
    device: options.Device = "auto",
    threads: options.Threads = 0,
    max_model_len: options.MaxModelLen = 0,
    dtype: options.Dtype = "auto",
    quantization: options.Quantization = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    deterministic: options.Deterministic = False,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Print which kernel each linear uses, and measure nothing.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Measure speed, acceptance, overhead and bandwidth, with plain decoding in the same run and a check of the output."""
    from rich.console import Console

    from fledge import progress, sources
    from fledge.bench.baselines import check_baselines
    from fledge.bench.datasets import load_items
    from fledge.bench.loops import is_looping
    from fledge.bench.matrix import Bench, Case, baselines, run_bench
    from fledge.bench.report import acceptance_lines, skipped_lines, table, write
    from fledge.engine.config import EngineConfig
    from fledge.errors import literal
    from fledge.sampling import SamplingParams
    from fledge.speculation.depth import TreeShape

    if kernels:
        from fledge.bench.kernels import kernel_lines, kernel_table

        asked = EngineConfig(device=device, dtype=dtype, quantization=quantization, deterministic=deterministic)
        found = kernel_lines(model, asked)
        if as_json:
            options.print_json(found)
        else:
            Console().print(kernel_table(found))
        return
    at_once = options.numbers(concurrency, "--concurrency")
    depths = [text if text == "auto" else options.numbers(text, "--depth")[0] for text in depth.split(",")]
    names = [name.strip() for name in baseline.split(",") if name.strip()]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    check_baselines(names, greedy=params.greedy, assistant=assistant)
    assistant = str(sources.resolve(assistant)) if assistant else ""
    items = load_items(data, limit=limit, categories=category or ())
    shapes = [None, TreeShape(tree_width, tree_nodes)] if tree else [None]
    cases = [
        Case(name, one, shape, adaptive)
        for name in drafter or ["auto"]
        for one in depths
        for shape in shapes
        if not (shape is not None and name == "ngram")
    ]
    console = Console()
    with progress.task("loading the target", unit="answers") as shown:
        config = EngineConfig(
            device=device,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            threads=threads,
            max_model_len=max_model_len,
            max_num_seqs=max(at_once),
            prefix_caching=False,  # every run has the same prompts
            deterministic=deterministic,
        )
        loaded = Bench(model, config, items, max_tokens, raw=raw)
        figures = run_bench(
            loaded,
            cases,
            items,
            concurrencies=at_once,
            params=params,
            is_looping=is_looping,
            repeats=repeats,
            on_progress=shown.show,
        )
        files = write(figures, out) if out is not None else []  # written before other engines run, as these may fail
        if names:
            shown.unit = "engines"
            figures["baselines"] = baselines(
                loaded, cases, items, names, at_once, params, vllm_python, assistant, on_progress=shown.show
            )
            files = write(figures, out) if out is not None else []
    if as_json:
        options.print_json(figures)
        return
    console.print(table(figures))
    for line in acceptance_lines(figures):
        console.print(f"[dim]{literal(line)}[/]", highlight=False)
    for line in skipped_lines(figures):
        console.print(f"[yellow]{literal(line)}[/]", highlight=False)
    for file in files:
        print(file)
