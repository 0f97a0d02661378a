"""Checks before anything walks what callers sent: JSON's nesting, size and values, and the size of a grammar."""

from __future__ import annotations

import math
from typing import Any

from fledge.errors import RequestError
from fledge.serving.limits import Limits

# Lists of nothing but these need no look at each item; that is what prompts of token ids are.
_PLAIN = {int, bool, type(None)}


def check_json(data: Any, limits: Limits) -> None:
    """Raises RequestError. Templates, grammars and validation walk what callers send, some of them by recursion."""
    level, depth, num_items = [data], 0, 0
    while level:
        depth += 1
        if depth > limits.max_json_depth:
            raise RequestError(f"the JSON is nested more than {limits.max_json_depth} levels deep")
        num_items += len(level)
        if num_items > limits.max_json_items:
            raise RequestError(f"the JSON holds more than {limits.max_json_items} values; send less")
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
                    raise RequestError("a string holds half a surrogate pair, which is no character") from None
            elif isinstance(item, float) and not math.isfinite(item):
                raise RequestError("NaN and infinities are not JSON numbers")
        level = below


def check_grammar_size(kind: str, num_characters: int, limits: Limits) -> None:
    """Raises RequestError. `kind`: what to call it."""
    longest = limits.max_grammar_characters
    if num_characters > longest:
        raise RequestError(
            f"the {kind} has {num_characters} characters; at most {longest} are taken (--max-grammar-characters)"
        )
