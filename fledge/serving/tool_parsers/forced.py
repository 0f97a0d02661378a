"""Calls that the request forces: a grammar makes the text exact, so it is only taken apart here."""

from __future__ import annotations

from typing import Any

from fledge.errors import RequestError
from fledge.serving.tool_parsers.base import CallArguments, JsonCall, ToolEvent, ToolParser


class NamedParser(ToolParser):
    """`tool_choice` names a function: the whole text is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def push(self, text: str) -> list[ToolEvent]:
        if not text:
            return []
        start = [] if self.num_calls else [self.next_call(self.name)]
        return [*start, CallArguments(0, text)]


class RequiredParser(ToolParser):
    """`tool_choice: required`: a JSON list of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.call: JsonCall | None = None

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while self.buffer:
            if self.call is None:
                at = self.buffer.find("{")
                self.buffer = self.buffer[at:] if at >= 0 else ""
                if at < 0:
                    break
                self.call = JsonCall()
            events += self.read_call(self.call)
            if self.call.done or self.call.failed:
                self.call = None
        return events


def required_schema(tools: list[tuple[str, dict[str, Any] | None]], parallel: bool) -> dict[str, Any]:
    """The schema of a list of calls to any of these (name, parameters). Definitions move to the top, where `$ref` looks."""
    definitions: dict[str, Any] = {}
    calls = []
    for name, parameters in tools:
        parameters = dict(parameters or {"type": "object", "properties": {}})
        own = parameters.pop("$defs", None) or {}
        if not isinstance(own, dict):
            raise RequestError(f"the parameters of tool {name!r:.80}: $defs must be an object")
        definitions |= own
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": parameters},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    if not parallel:
        schema["maxItems"] = 1
    return schema | ({"$defs": definitions} if definitions else {})
