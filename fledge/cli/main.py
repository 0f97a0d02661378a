"""The `fledge` command. Each sub-command has its own file, which imports what it needs when it runs."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand

GUIDE = """\
Fledge decodes with an EAGLE drafter: a small network proposes tokens, and the
model checks several at once. The text is the same, and it comes sooner.

What do you want to do?

  See it work:
    fledge demo
  Serve a model over an OpenAI-compatible API:
    fledge serve MODEL --port 8000
  Chat in the terminal:
    fledge chat --model MODEL
  Make a drafter for your model:
    fledge make MODEL --out my-drafter --hours 1
  Find out why acceptance is low:
    fledge doctor DRAFTER --model MODEL
    fledge drift MODEL --drafter DRAFTER --out report --quick

MODEL is a folder, a GGUF file, a hub id (org/name) or a built-in name: try
smollm2-135m. DRAFTER is a folder, a hub id or a name. `fledge models` lists the
names, `fledge --help` all commands; `fledge COMMAND --help` explains one.
"""
# The exit codes of all commands; a test reads this list.
EXIT_CODES = {
    0: "Done. For a check: it passed",
    1: "Failed. One line on standard error says why and what to do. A traceback is a bug",
    2: "Usage: an unknown command or flag, or a missing argument",
    3: "A check did not pass: doctor, inspect, conform, demo (other output), bench-serve (failed requests)",
    130: "Interrupted. Run make, train or regenerate again to continue",
    141: "The reader of standard output has gone",
}
EPILOG = "\n\n".join(["Exit codes:", *(f"{code}: {meaning}." for code, meaning in EXIT_CODES.items())])

app = typer.Typer(
    name="fledge",
    help="EAGLE 3.1 speculative decoding: serve losslessly, train drafters, see why they drift.",
    epilog=EPILOG,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Command(TyperCommand):
    """A command whose help shows no type for switches, where typer writes <bool>."""

    def get_params(self, ctx: Any) -> Any:
        found = super().get_params(ctx)
        for parameter in found:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return found


def _register() -> None:
    from fledge.cli import (
        bench,
        bench_serve,
        chat,
        conform,
        demo,
        doctor,
        drift,
        export,
        generate,
        import_drafter,
        inspect,
        learn_report,
        make,
        models,
        regenerate,
        serve,
        train,
    )

    app.command(cls=Command)(demo.demo)
    app.command(cls=Command)(generate.generate)
    app.command(cls=Command)(chat.chat)
    app.command(context_settings=serve.CONTEXT_SETTINGS, add_help_option=False)(serve.serve)
    app.command(cls=Command)(models.models)
    app.command(cls=Command)(inspect.inspect)
    app.command(cls=Command)(doctor.doctor)
    app.command(cls=Command)(export.export)
    app.command("import", cls=Command)(import_drafter.import_drafter)
    app.command(cls=Command)(make.make)
    app.command(cls=Command)(regenerate.regenerate)
    app.command(cls=Command)(train.train)
    app.command(cls=Command)(bench.bench)
    app.command(cls=Command)(bench_serve.bench_serve)
    app.command(cls=Command)(conform.conform)
    app.command(cls=Command)(drift.drift)
    app.command("learn-report", cls=Command)(learn_report.learn_report)


@app.callback(invoke_without_command=True)
def root(context: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from fledge import __version__

        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(GUIDE, end="")


def main() -> None:
    """Runs the command. A user error is one line on standard error and exit code 1; other errors are bugs with a traceback."""
    from fledge import progress
    from fledge.errors import UsageError, UserError, printable
    from fledge.files import NO_SPACE

    # Progress bars and warnings of libraries would hide Fledge's own output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.set_threshold(50_000)  # imports create many long-lived objects: scanning them repeatedly takes 0.1 s
    try:
        _register()
        app(prog_name="fledge")
    except UserError as error:
        progress.close()
        print(f"fledge: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        progress.close()
        where = f"{error.filename}: " if error.filename is not None else ""
        print(
            f"fledge: {printable(where + (error.strerror or str(error)))}; free some space, or write elsewhere", file=sys.stderr
        )
        sys.exit(1)
    except KeyboardInterrupt:
        progress.close()
        print("fledge: interrupted", file=sys.stderr)
        sys.exit(130)
