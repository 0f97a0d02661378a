"""`fledge import`: converts another trainer's drafter to the layout that Fledge and vLLM read."""

from __future__ import annotations

from typing import Annotated

import typer

from fledge.cli import options
from fledge.errors import ModelError, printable


def import_drafter(
    drafter: Annotated[str, typer.Argument(help="Folder or hub id of a checkpoint.")],
    out: Annotated[str, typer.Argument(help="Folder to write.")],
    model: Annotated[str | None, typer.Option("--model", "-m", help="Its target: checks that the two fit.")] = None,
    layers: Annotated[
        str | None, typer.Option(help="Overrides the tapped layers: 2,14,25 (0 = embeddings, i = after i layers).")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Read a checkpoint of SafeAILab, SpecForge, TorchSpec, NeMo, AngelSlim or speculators; write the raw layout."""
    from fledge.checkpoints.export import import_drafter as convert
    from fledge.checkpoints.gguf import target_config

    try:
        layer_ids = tuple(int(part) for part in layers.split(",")) if layers else None
    except ValueError:
        raise ModelError(f"--layers {layers}: give numbers separated by commas, such as 2,14,25") from None
    folder, notes = convert(drafter, out, target=target_config(model) if model else None, layer_ids=layer_ids)
    if as_json:
        options.print_json({"folder": str(folder), "notes": notes})
        return
    for note in notes:
        print(printable(note))
    print(printable(f"written to {folder}"))
