"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, between other text or several in a row."""

from __future__ import annotations

from fledge.serving.text import before_marker
from fledge.serving.tool_parsers.base import CallArguments, Content, JsonCall, ToolEvent, ToolParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self.call: JsonCall | None = None
        self.index: int | None = None

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while True:
            if self.call is None:
                content, marker, self.buffer = before_marker(self.buffer, (START,))
                if self.num_calls and not content.strip():
                    content = ""  # line breaks between calls
                if content:
                    events.append(Content(content))
                if not marker:
                    return events
                self.call, self.index = JsonCall(), None
            events += self._read_call(self.call)
            if self.call is not None:
                return events

    def _read_call(self, call: JsonCall) -> list[ToolEvent]:
        """Goes on with the call; leaves `self.call` None when it is over."""
        events: list[ToolEvent] = []
        if not call.done:
            arguments, self.buffer = call.push(self.buffer)
            if call.name is not None and self.index is None:
                start = self.next_call(call.name)
                self.index = start.index
                events.append(start)
            if arguments:
                assert self.index is not None, "arguments come after the name"
                events.append(CallArguments(self.index, arguments))
            if call.failed and self.index is None:  # not a call after all
                events.append(Content(START + call.text))
                self.call = None
                return events
        if call.done or call.failed:
            _, marker, rest = before_marker(self.buffer, (END,))
            self.buffer = rest if marker else self.buffer
            self.call = None if marker else call
        return events

    def finish(self) -> list[ToolEvent]:
        if self.call is None:
            return super().finish()
        self.buffer = "" if self.index is not None else START + self.call.text
        return super().finish()
