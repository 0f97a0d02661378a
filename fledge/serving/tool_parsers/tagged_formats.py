"""Formats with calls between tags: Kimi K2 and Qwen3-Coder."""

from __future__ import annotations

import json
from typing import Any

from fledge.serving.tool_parsers.base import CallArguments, Content, ToolEvent, ToolParser, before_marker

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2Parser(ToolParser):
    """Parses a section of calls between special tokens, each with its id `functions.name:index` and JSON arguments."""

    needs_special_tokens = True

    def __init__(self) -> None:
        super().__init__()
        self.state = "content"  # content | section | id | arguments

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        markers = {
            "content": (SECTION,),
            "section": (CALL, SECTION_END),
            "id": (ARGUMENTS,),
            "arguments": (CALL_END, SECTION_END),
        }
        while True:
            before, marker, rest = before_marker(self.buffer, markers[self.state])
            if self.state == "content" and before:
                events.append(Content(before))
            elif self.state == "arguments" and before:
                events.append(CallArguments(self.num_calls - 1, before))
            if not marker:
                # An id must be complete; everything else has been returned.
                self.buffer = self.buffer if self.state == "id" else rest
                return events
            self.buffer = rest
            if marker == ARGUMENTS:
                call_id = before.strip()
                name = call_id.rsplit(":", 1)[0].removeprefix("functions.")
                events.append(self.next_call(name, call_id))
            following = {SECTION: "section", CALL: "id", ARGUMENTS: "arguments", CALL_END: "section", SECTION_END: "content"}
            self.state = following[marker]

    def finish(self) -> list[ToolEvent]:
        if self.state in ("section", "id"):
            self.buffer = ""
        elif self.state == "arguments":
            rest, self.buffer = self.buffer, ""
            return [CallArguments(self.num_calls - 1, rest)] if rest else []
        return super().finish()


START, END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKS = {
    "content": (START, FUNCTION),
    "call": (FUNCTION, END),
    "name": (">",),
    "parameters": (PARAMETER, FUNCTION_END, END),
    "key": (">",),
    "value": (PARAMETER_END,),
}


class Qwen3CoderParser(ToolParser):
    """Parses `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.

    Values are plain text. They are converted to the types in the tool's schema; without a type they stay strings.
    """

    def __init__(self) -> None:
        super().__init__()
        self.state = "content"
        self.name = self.key = ""
        self.num_parameters = 0

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while True:
            before, mark, rest = before_marker(self.buffer, MARKS[self.state])
            if self.state == "content" and before and not (self.num_calls and not before.strip()):
                events.append(Content(before))
            if not mark:
                self.buffer = rest if self.state == "content" else self.buffer  # names, keys and values must be complete
                return events
            self.buffer = rest
            events += self._reached(mark, before)

    def _reached(self, mark: str, before: str) -> list[ToolEvent]:
        match self.state, mark:
            case "content", str(found) if found == START:
                self.state = "call"
            case "content" | "call", str(found) if found == FUNCTION:
                self.state = "name"
            case "name", _:
                self.state, self.name, self.num_parameters = "parameters", before.strip(), 0
                start = self.next_call(self.name)
                return [start, CallArguments(start.index, "{")]
            case "parameters", str(found) if found == PARAMETER:
                self.state = "key"
            case "key", _:
                self.state, self.key = "value", before.strip()
            case "value", _:
                self.state = "parameters"
                return [CallArguments(self.num_calls - 1, self._member(before))]
            case "parameters", _:
                self.state = "content" if mark == END else "call"
                return [CallArguments(self.num_calls - 1, "}")]
            case _:
                self.state = "content"
        return []

    def _member(self, text: str) -> str:
        comma = ", " if self.num_parameters else ""
        self.num_parameters += 1
        value = typed(text.removeprefix("\n").removesuffix("\n"), self._schema())
        return f"{comma}{json.dumps(self.key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"

    def _schema(self) -> Any:
        function = self.functions.get(self.name)
        properties = function.get("properties") if isinstance(function, dict) else None
        return properties.get(self.key) if isinstance(properties, dict) else None

    def finish(self) -> list[ToolEvent]:
        if self.state == "content":
            return super().finish()
        if not self.num_calls:
            self.buffer = (START if self.state == "call" else FUNCTION) + self.buffer
            return super().finish()
        self.buffer = ""
        return []


def typed(text: str, schema: Any) -> Any:
    """Converts a value to its schema's type: parses it as JSON, unless the type is string or it is not JSON."""
    kinds = schema.get("type") if isinstance(schema, dict) else "string"
    kinds = [kinds] if isinstance(kinds, str) else kinds or ["object"]
    if "string" in kinds and not (text == "null" and "null" in kinds):
        return text
    lowered = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        return json.loads(lowered)
    except (json.JSONDecodeError, RecursionError):
        return text
