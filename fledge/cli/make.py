"""`fledge make`: makes a drafter for a model; needs nothing but the model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fledge.cli import options


def make(
    model: Annotated[
        str, typer.Argument(help="The target: a folder, a hub id or a built-in name; toy: a tiny one, to try it.")
    ],
    out: Annotated[Path, typer.Option(help="Folder for everything; run again to continue.")],
    hours: Annotated[float, typer.Option(min=0.001, help="Time for all of it.")] = 1.0,
    prompts: Annotated[
        Path | None,
        typer.Option(help='JSON lines with "turns", "messages" or "prompt"; without it the target writes its own prompts.'),
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="A vLLM server that runs the target and exports hidden states (docs/scaling.md).")
    ] = None,
    endpoint_states: Annotated[
        str | None, typer.Option(help="The server's folder of hidden states, as this machine sees it: a folder or a URL.")
    ] = None,
    decontaminate: Annotated[
        list[Path] | None,
        typer.Option(help="Files of evaluation prompts: text that shares 13 words in a row with one is left out of training."),
    ] = None,
    twin: Annotated[
        bool, typer.Option("--twin", help="Also train an EAGLE 3 drafter on the same batches, to compare with.")
    ] = False,
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Generate data, train a drafter, check it, print the serve commands.

    Several GPUs: torchrun --nproc-per-node 8 -m fledge make MODEL --out DIR
    """
    from dataclasses import asdict

    from fledge import progress
    from fledge.training.make import Interrupted
    from fledge.training.make import make as run

    def log(text: str) -> None:
        if as_json:
            progress.say(text)
        else:
            print(text)

    try:
        made = run(
            model,
            out,
            hours=hours,
            prompts=prompts,
            endpoint=endpoint,
            endpoint_states=endpoint_states,
            decontaminate=decontaminate or (),
            twin=twin,
            device=device,
            log=log,
        )
    except (KeyboardInterrupt, Interrupted):
        typer.echo(f"interrupted; the same command continues from the files in {out}", err=True)
        raise typer.Exit(130) from None
    if as_json and made is not None:
        options.print_json(asdict(made))
