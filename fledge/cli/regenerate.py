"""`fledge regenerate`: the target answers prompts, its own or given ones, as training data for a drafter."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def regenerate(
    out: Annotated[Path, typer.Option(help="File for the answers (.jsonl). Run again to continue.")],
    model: Annotated[str, typer.Option(help="The target: a folder, a hub id, a GGUF file or a built-in name.")],
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with "turns", "messages" or "prompt" (.jsonl, .jsonl.gz).')
    ] = None,
    self_prompted: Annotated[
        int, typer.Option("--self-prompted", min=0, help="Number of prompts that the target writes itself.")
    ] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling; 1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="For sampling.")] = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first prompts of the file.")] = None,
    decontaminate: Annotated[
        list[Path] | None, typer.Option(help="Evaluation prompts: prompts that share 13 words in a row with one are left out.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Concurrent requests; default: what fits.")] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Speculate while answering: the same answers, sooner. auto: the shipped drafter; a folder; none. "
            "Default: auto on a GPU, none on a CPU, where large batches gain nothing."
        ),
    ] = None,
    depth: Annotated[int, typer.Option(min=1, max=16, help="With a drafter: tokens drafted per step.")] = 3,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Generate training data: the target answers prompts."""
    started = time.monotonic()  # the report's time includes the imports below
    from fledge import sources
    from fledge.engine.build import Speculation
    from fledge.engine.offline import answer_generator, is_gpu
    from fledge.tokenizer import Tokenizer
    from fledge.training.data.chat_files import DataError
    from fledge.training.datagen.regenerate import regenerate as run

    if prompts is None and not self_prompted:
        raise DataError("nothing to answer: give --prompts FILE, --self-prompted N, or both")
    tokenizer = Tokenizer(sources.resolve(model))
    if drafter is None:
        drafter = "auto" if is_gpu(device) else "none"
    speculation = Speculation(drafter, depth)
    generator = answer_generator(model, device=device, concurrency=concurrency, speculation=speculation)
    try:
        report = run(
            generator,
            tokenizer,
            prompts,
            out,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            self_prompted=self_prompted,
            limit=limit,
            decontaminate=decontaminate or (),
            model=model,
            started=started,
        )
    except KeyboardInterrupt:
        typer.echo(f"interrupted; {out} has all finished answers, and the same command continues", err=True)
        raise typer.Exit(130) from None
    if as_json:
        speeds = {"tokens_per_second": report.tokens_per_second, "warm_tokens_per_second": report.warm_tokens_per_second}
        options.print_json({"out": str(out), **vars(report), **speeds})
    else:
        typer.echo(str(report), err=True)
