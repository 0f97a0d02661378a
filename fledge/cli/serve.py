"""`fledge serve`: an OpenAI-compatible server that takes vLLM's flags."""

from __future__ import annotations

import typer

# Flags are parsed by `fledge.serving.flags`, spelled as vLLM spells them: everything is passed on as it is.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model over an OpenAI-compatible API, with vLLM's flags and a page to try it."""
    from fledge.serving.launch import launch

    launch(context.args)
