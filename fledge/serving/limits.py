"""Limits on requests, and checks that run before other code walks a request. Every limit is a flag of `fledge serve`;
docs/serving.md has a table of them."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from fledge.errors import RequestError


def _limit(default: float, text: str, kind: Callable[[str], Any] = int) -> Any:
    return field(default=default, metadata={"help": text, "kind": kind})


@dataclass(frozen=True)
class Limits:
    """The limits on requests. Each field is a flag: `max_stop_strings` is `--max-stop-strings`."""

    # The connection
    max_connections: int = _limit(1024, "connections at a time; more are turned away with a 503")
    header_timeout: float = _limit(10.0, "seconds for a request's headers to arrive", float)
    body_timeout: float = _limit(60.0, "seconds for a request's body to arrive", float)
    write_timeout: float = _limit(60.0, "seconds that a caller may leave an answer unread", float)
    idle_timeout: float = _limit(60.0, "seconds that a connection may stay open between two requests", float)
    # The body
    max_request_bytes: int = _limit(4 << 20, "bytes of a request's body")
    max_json_depth: int = _limit(64, "levels of nesting in a body, a schema or a tool call's arguments")
    max_json_items: int = _limit(1 << 18, "values in a body, token ids not counted")
    max_messages: int = _limit(2048, "messages of a conversation")
    max_tools: int = _limit(256, "tools of a request")
    # The request
    max_prompts: int = _limit(128, "prompts of a completions request")
    max_answers: int = _limit(1024, "prompts times n of a request")
    max_stop_strings: int = _limit(64, "stop strings")
    max_stop_characters: int = _limit(8192, "characters of all stop strings together")
    max_stop_token_ids: int = _limit(1024, "stop token ids")
    max_logit_bias: int = _limit(1024, "tokens with a bias")
    max_bad_words: int = _limit(64, "bad words")
    max_tokenize_bytes: int = _limit(1 << 20, "bytes of text for /tokenize")
    max_tokenizer_queue: int = _limit(
        32 << 20, "characters queued for the tokenizer; +25 %% reserved for clients with few queued"
    )
    request_timeout: float = _limit(3600.0, "seconds from a request's arrival to the end of its answer; 0: no limit", float)
    # Grammars
    max_grammar_characters: int = _limit(64 << 10, "characters of a schema, regular expression, grammar or choice")
    max_grammar_seconds: float = _limit(10.0, "seconds to compile a grammar, in a process of its own", float)
    max_grammar_memory: int = _limit(512 << 20, "bytes of memory to compile a grammar")
    max_grammars_compiling: int = _limit(4, "grammars that are compiled at the same time")
    max_mask_seconds: float = _limit(0.05, "CPU seconds to find which tokens a grammar allows next", float)


def add_flags(group: argparse._ArgumentGroup, whole: Callable[[str], int]) -> None:
    """Adds a flag for each limit. `whole`: parses integers, 4k and 4K too."""
    for one in fields(Limits):
        kind = whole if one.metadata["kind"] is int else float
        assert one.default is not MISSING
        metavar = "N" if kind is whole else "SECONDS"
        flag = f"--{one.name.replace('_', '-')}"
        group.add_argument(flag, type=kind, default=one.default, metavar=metavar, help=one.metadata["help"])


def from_flags(given: argparse.Namespace) -> Limits:
    return Limits(**{one.name: getattr(given, one.name) for one in fields(Limits)})


# Lists of these types alone, such as prompts of token ids, are not checked item by item.
_PLAIN = {int, bool, type(None)}


def check_json(data: Any, limits: Limits) -> None:
    """Raises RequestError for JSON that is too deep, too large or invalid. Later code walks it, in part by recursion."""
    level, depth, num_items = [data], 0, 0
    while level:
        depth += 1
        if depth > limits.max_json_depth:
            raise RequestError(f"the JSON is nested more than {limits.max_json_depth} levels deep")
        num_items += len(level)
        if num_items > limits.max_json_items:
            raise RequestError(f"the JSON has more than {limits.max_json_items} values; send less")
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below += item.keys()
                below += item.values()
            elif isinstance(item, list):
                if not set(map(type, item)) <= _PLAIN:
                    below += item
            elif isinstance(item, str) and not item.isascii():
                try:
                    item.encode()
                except UnicodeEncodeError:
                    raise RequestError("a string contains half of a surrogate pair, which is not a character") from None
            elif isinstance(item, float) and not math.isfinite(item):
                raise RequestError("NaN and infinities are not JSON numbers")
        level = below


def check_grammar_size(kind: str, num_characters: int, limits: Limits) -> None:
    """Raises RequestError if a grammar is too long. `kind`: its name in the message."""
    longest = limits.max_grammar_characters
    if num_characters > longest:
        raise RequestError(
            f"the {kind} has {num_characters} characters; at most {longest} are taken (--max-grammar-characters)"
        )
