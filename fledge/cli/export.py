"""`fledge export`: writes a drafter for another server."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from fledge.cli import options


def export(
    drafter: Annotated[
        str,
        typer.Argument(help="Folder, name or hub id of a drafter; or a training checkpoint (.pt), or the folder of a run."),
    ],
    out: Annotated[str, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option("--to", help="One of: vllm, sglang, speculators, fledge.")] = "vllm",
    model: Annotated[str | None, typer.Option("--model", "-m", help="Its target: checks that the two fit.")] = None,
    target_name: Annotated[
        str, typer.Option(help="The target's name in the launch command. Default: --model, or what training recorded.")
    ] = "",
    depth: Annotated[
        int, typer.Option("--depth", "--num-draft-tokens", min=1, help="Tokens drafted per step, in the launch command.")
    ] = 3,
    storage: Annotated[
        str, typer.Option(help="int8: half the size, only --to fledge. plain: unquantised, in the drafter's own type.")
    ] = "plain",
    as_json: options.Json = False,
) -> None:
    """Write a drafter for vLLM, SGLang, Fledge or in the speculators layout, with the command that serves it."""
    from fledge.checkpoints.drafter_files import find_drafter
    from fledge.checkpoints.export import export_drafter
    from fledge.checkpoints.gguf import target_config
    from fledge.training.checkpoint import export_checkpoint, find_best, find_checkpoint

    target = target_config(model) if model else None
    with TemporaryDirectory() as folder:
        checkpoint = None
        if (best := find_best(drafter)) is not None:
            typer.echo(f"the run's best drafter, {best}", err=True)
            drafter = str(best)
        elif (checkpoint := find_checkpoint(drafter)) is not None:
            drafter = str(Path(folder) / "drafter")
            export_checkpoint(checkpoint, Path(drafter))
        name = target_name or model or _recorded_target(find_drafter(drafter)) or "TARGET"
        written = export_drafter(drafter, to, out, name, target=target, num_draft_tokens=depth, storage=storage)
        if checkpoint is not None:
            typer.echo(f"from the training checkpoint {checkpoint}", err=True)
    readme = (written / "README.md").read_text()
    if as_json:
        command = readme.partition("```bash\n")[2].partition("\n```")[0]
        options.print_json({"folder": str(written), "to": to, "command": command})
    else:
        print(readme)


def _recorded_target(folder: Path) -> str:
    """The target that training recorded, under a name that other servers know; "" for a path, valid on one machine only."""
    from fledge import drafters
    from fledge.checkpoints.provenance import Provenance

    name = str(Provenance.read(folder).record.get("target", ""))
    hub_ids = (one for one, its in drafters.DEFAULTS.items() if "/" in one and its == drafters.DEFAULTS.get(name))
    return "" if name.startswith(("/", ".", "~")) else next(hub_ids, name)
