"""Parsers of calls that the request forces. A grammar guarantees the format."""

from __future__ import annotations

from typing import Any

from fledge.serving.tool_parsers.base import CallArguments, JsonCall, ToolEvent, ToolParser


class NamedParser(ToolParser):
    """Parses answers to a `tool_choice` that names a function: the whole text is its arguments."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def push(self, text: str) -> list[ToolEvent]:
        if not text:
            return []
        start = [] if self.num_calls else [self.next_call(self.name)]
        return [*start, CallArguments(0, text)]


class RequiredParser(ToolParser):
    """Parses answers to `tool_choice: required`: a JSON list of calls."""

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
    """Returns the schema of a list of calls to any of `tools`, which are (name, parameters). Each tool's schema becomes a
    definition, and its references are changed to point into it."""
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, parameters) in enumerate(tools):
        place, own = f"tool_{number}", dict(parameters or {"type": "object", "properties": {}})
        own.pop("$id", None)  # only the root of a schema may have an id, and this is no root now
        definitions[place] = _moved(own, f"#/$defs/{place}")
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "parameters": {"$ref": f"#/$defs/{place}"}},
                "required": ["name", "parameters"],
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, "$defs": definitions}
    return schema if parallel else schema | {"maxItems": 1}


# Keywords whose values are data, in which `$ref` has no meaning.
_DATA = ("const", "enum", "default", "examples", "example")


def _moved(node: Any, place: str, is_schema: bool = True) -> Any:
    """Returns a schema with references changed for its new `place` in another. `is_schema`: False for maps of names."""
    if isinstance(node, list):
        return [_moved(one, place) for one in node]
    if not isinstance(node, dict):
        return node
    moved = {}
    for key, value in node.items():
        if is_schema and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = place + value[1:]
        elif not (is_schema and key in _DATA):
            names = is_schema and key in ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
            value = _moved(value, place, not names)
        moved[key] = value
    return moved
