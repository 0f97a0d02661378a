"""The base class of tool parsers, the search for markers, and the parser of JSON calls that most formats share.

A parser takes pieces of text as they arrive and returns events. A complete answer is parsed as a single piece, so streamed and
complete responses are the same by construction.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JSON_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


ToolEvent = Content | CallStart | CallArguments


class ToolParser:
    needs_special_tokens = False  # whether its markers are special tokens, which decoding skips by default
    functions: Mapping[str, Any] = {}  # the request's tools: JSON schemas of their parameters by name

    def __init__(self) -> None:
        self.buffer = ""
        self.num_calls = 0

    def push(self, text: str) -> list[ToolEvent]:
        raise AssertionError("every format implements this")

    def finish(self) -> list[ToolEvent]:
        """Returns the rest at the end of the answer: an incomplete call adds nothing, other text is content."""
        rest, self.buffer = self.buffer, ""
        return [Content(rest)] if rest else []

    def next_call(self, name: str, call_id: str | None = None) -> CallStart:
        self.num_calls += 1
        return CallStart(self.num_calls - 1, call_id or new_call_id(), name)

    def read_call(self, call: JsonCall, call_id: str | None = None) -> list[ToolEvent]:
        """Continues a call with the buffer. Returns its start once the name is known, then its arguments as they arrive."""
        events: list[ToolEvent] = []
        arguments, self.buffer = call.push(self.buffer)
        if call.name is not None and not call.started:
            call.started = True
            events.append(self.next_call(call.name, call_id))
        if arguments:
            events.append(CallArguments(self.num_calls - 1, arguments))
        return events


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def before_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """Splits text that may continue at its first marker. Returns (text before the marker, the marker, text after it).

    Without a marker, an end of the text that may be the beginning of one is returned as the last part: `a <th` gives
    (`a `, ``, `<th`).
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    held = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), held, -1):
            if text.endswith(marker[:size]):
                held = size
                break
    return text[: len(text) - held], "", text[len(text) - held :]


class JsonCall:
    """Parses `{"name": "f", "arguments": {…}}` as it arrives, with the keys in any order.

    Once the name is known, the arguments are passed on unchanged as they arrive. `failed` is set if the text cannot be such a
    call, `done` at its closing brace. `text` is all text parsed so far.
    """

    def __init__(
        self, argument_keys: tuple[str, ...] = ("arguments", "parameters"), *, ends_with_arguments: bool = False
    ) -> None:
        """`ends_with_arguments`: the call ends after its arguments, without a closing brace."""
        self.argument_keys, self.ends_with_arguments = argument_keys, ends_with_arguments
        self.text = ""
        self.name: str | None = None
        self.done = self.failed = False
        self.started = False  # whether its CallStart was returned
        self._state = "open"  # open | key | colon | value | comma
        self._key = ""
        self._token = ""  # the key or value being read
        self._depth = 0
        self._in_string = self._escaped = False
        self._pending = ""  # arguments that arrived before the name
        self._has_arguments = False

    def push(self, text: str) -> tuple[str, str]:
        """Returns (new text of the arguments, text after the call)."""
        arguments = ""
        for at, char in enumerate(text):
            if self.done or self.failed:
                return arguments, text[at:]
            self.text += char
            arguments += self._take(char)
        return arguments, ""

    def _take(self, char: str) -> str:
        if self._state == "value" or (self._state == "key" and self._token):
            return self._inside(char)
        if char in JSON_SPACE:
            return ""
        match self._state, char:
            case "open", "{":
                self._state = "key"
            case "key", '"':
                self._token, self._in_string = '"', True
            case "colon", ":":
                self._state, self._token = "value", ""
            case "comma", ",":
                self._state = "key"
            case "comma" | "key", "}":
                return self._end()
            case _:
                self.failed = True
        return ""

    def _inside(self, char: str) -> str:
        """Takes a character of a key or a value."""
        if not self._token:
            if char in JSON_SPACE:
                return ""
            self._depth, self._in_string, self._escaped = 0, False, False
        if not self._in_string and self._depth == 0 and self._token and char in ",}" + JSON_SPACE:
            scalar = self._value_ends("")  # a number, true, false, null
            return scalar + (self._take(char) if char not in JSON_SPACE else "")
        self._token += char
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        ended = not self._in_string and self._depth == 0 and self._token[0] in '"{['
        if self._state == "key":
            if ended:
                self._key, self._token, self._state = _unquoted(self._token), "", "colon"
            return ""
        if ended:
            return self._value_ends(char)
        return self._pass_on(char) if self._is_arguments() and self._token[0] == "{" else ""

    def _is_arguments(self) -> bool:
        return self._key in self.argument_keys

    def _value_ends(self, last: str) -> str:
        token, self._token, self._state = self._token, "", "comma"
        if self._key == "name":
            if token[0] == '"':
                self.name = _unquoted(token)
            self.failed = not self.name
            ready, self._pending = self._pending, ""
            return ready
        if not self._is_arguments():
            return ""
        self._has_arguments = True
        self.done = self.ends_with_arguments
        if token[0] == "{":
            return self._pass_on(last)
        # Some models write the arguments as a string of JSON, or null for none.
        return self._pass_on(_unquoted(token) if token[0] == '"' else "{}" if token == "null" else token)

    def _pass_on(self, text: str) -> str:
        if self.name is None:
            self._pending += text
            return ""
        return text

    def _end(self) -> str:
        self.done, self.failed = self.name is not None, self.name is None
        return "{}" if self.done and not self._has_arguments else ""


def _unquoted(text: str) -> str:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError:
        return text[1:-1]
