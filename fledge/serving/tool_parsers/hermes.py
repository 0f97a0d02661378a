"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, between other text or several in a row."""

from __future__ import annotations

from fledge.serving.text import before_marker
from fledge.serving.tool_parsers.base import Content, JsonCall, ToolEvent, ToolParser

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self.call: JsonCall | None = None

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
                self.call = JsonCall()
            events += self._read_call(self.call)
            if self.call is not None:
                return events

    def _read_call(self, call: JsonCall) -> list[ToolEvent]:
        """Goes on with the call; leaves `self.call` None when it is over."""
        events: list[ToolEvent] = []
        if not call.done:
            events = self.read_call(call)
            if call.failed and not call.started:  # not a call after all
                self.call = None
                return [*events, Content(START + call.text)]
        if call.done or call.failed:
            _, marker, rest = before_marker(self.buffer, (END,))
            self.buffer = rest if marker else self.buffer
            self.call = None if marker else call
        return events

    def finish(self) -> list[ToolEvent]:
        if self.call is None:
            return super().finish()
        self.buffer = "" if self.call.started else START + self.call.text
        return super().finish()
