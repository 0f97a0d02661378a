"""The `fledge` command: one file per sub-command, imported when it is called."""

from __future__ import annotations

import gc
import os
import sys

import typer

app = typer.Typer(
    name="fledge",
    help="EAGLE 3.1 speculative decoding: serve losslessly, train drafters, see why they drift.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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

    app.command()(demo.demo)
    app.command()(generate.generate)
    app.command()(chat.chat)
    app.command(**serve.COMMAND)(serve.serve)
    app.command()(models.models)
    app.command()(inspect.inspect)
    app.command()(doctor.doctor)
    app.command()(export.export)
    app.command("import")(import_drafter.import_drafter)
    app.command()(make.make)
    app.command()(regenerate.regenerate)
    app.command()(train.train)
    app.command()(bench.bench)
    app.command()(bench_serve.bench_serve)
    app.command()(conform.conform)
    app.command()(drift.drift)
    app.command("learn-report")(learn_report.learn_report)


@app.callback(invoke_without_command=True)
def root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from fledge import __version__

        print(__version__)
        raise typer.Exit


def main() -> None:
    """A user's mistake is one line on standard error and exit code 1; anything else is a bug and shows its traceback."""
    from fledge.errors import UserError, printable
    from fledge.files import NO_SPACE

    # The progress bars and warnings of libraries would drown our own output.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    gc.set_threshold(50_000)  # what is imported stays: looking through it again and again takes a tenth of a second
    try:
        _register()
        app()
    except UserError as error:
        print(f"fledge: {printable(' '.join(str(error).split()))}", file=sys.stderr)
        sys.exit(1)
    except BrokenPipeError:
        sys.exit(141)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        where = f"{error.filename}: " if error.filename is not None else ""
        print(f"fledge: {printable(where + error.strerror)}; free some space, or write elsewhere", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("fledge: interrupted", file=sys.stderr)
        sys.exit(130)
