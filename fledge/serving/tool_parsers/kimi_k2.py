"""Kimi K2: a section of calls between special tokens, each with its id `functions.name:index` and JSON arguments."""

from __future__ import annotations

from fledge.serving.text import before_marker
from fledge.serving.tool_parsers.base import CallArguments, Content, ToolEvent, ToolParser

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"


class KimiK2Parser(ToolParser):
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
                # An id is wanted whole; everything else has been passed on.
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
