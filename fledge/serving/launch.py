"""From a command line to a running server: our own engine, or vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from fledge.serving import flags
from fledge.serving.flag_parser import parser
from fledge.serving.foreign_flags import normalise


def launch(arguments: Sequence[str]) -> None:
    if "-h" in arguments or "--help" in arguments:
        parser().print_help()
    elif chosen_engine(normalise(arguments)) == "vllm":
        from fledge.serving import vllm_engine

        vllm_engine.run(arguments)
    else:
        from fledge import sources

        parsed = flags.parse(arguments)
        sources.check_file(parsed.model)
        from fledge.serving import server

        server.run(parsed)


def chosen_engine(words: Sequence[str]) -> str:
    """Before anything else is parsed: vLLM's own flags are not ours to check."""
    for word, following in pairwise([*words, ""]):
        if word == "--engine":
            return following
        if word.startswith("--engine="):
            return word.partition("=")[2]
    return "fledge"
