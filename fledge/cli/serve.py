"""`fledge serve`: starts an OpenAI-compatible server that accepts vLLM's flags."""

from __future__ import annotations

import typer

# typer passes all arguments on unchanged: `fledge.serving.flags` parses them, in vLLM's spelling.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def serve(context: typer.Context) -> None:
    """Serve a model over an OpenAI-compatible API, with vLLM's flags and a web page to try it."""
    from fledge.serving import flags
    from fledge.serving.flag_parser import parser
    from fledge.serving.foreign_flags import normalise

    arguments = context.args
    if "-h" in arguments or "--help" in arguments:
        parser().print_help()
    elif flags.chosen_engine(normalise(arguments)) == "vllm":
        from fledge.serving import vllm_engine

        vllm_engine.run(arguments)
    else:
        from fledge import sources

        parsed = flags.parse(arguments)
        sources.check_file(parsed.model)
        from fledge.serving import server

        server.run(parsed)
