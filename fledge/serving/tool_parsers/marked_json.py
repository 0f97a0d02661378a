"""Mistral and Phi-4: a mark, then calls as JSON.

Mistral            [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
Mistral, tokenizers from version 11 on   [TOOL_CALLS]f{…}[TOOL_CALLS]g{…}, or f[CALL_ID]id[ARGS]{…}
Phi-4              functools[{"name": "f", "arguments": {…}}, …]
"""

from __future__ import annotations

import json

from fledge.serving.text import before_marker
from fledge.serving.tool_parsers.base import Content, JsonCall, ToolEvent, ToolParser

ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"


class MarkedJsonParser(ToolParser):
    """Content before the mark, calls after it; what stands between calls is dropped."""

    mark: str
    named = False  # whether a call may be a name before its arguments

    def __init__(self) -> None:
        super().__init__()
        self.state = "content"  # content | calls | call
        self.call = JsonCall()

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while True:
            if self.state == "content":
                content, found, self.buffer = before_marker(self.buffer, (self.mark,))
                if content:
                    events.append(Content(content))
                if not found:
                    return events
                self.state = "calls"
            if self.state == "calls" and not self._begin():
                return events
            events += self._read_call()
            if self.state == "call":
                return events

    def _begin(self) -> bool:
        """Looks for the next call; False when more text is needed."""
        rest = self.buffer.lstrip(" \t\r\n,;").removeprefix(self.mark)
        if self.named and rest and not rest.startswith(("[", "{")):
            head, brace, arguments = rest.partition("{")
            if not brace:
                self.buffer = rest
                return False
            name, _, call_id = head.partition(ARGUMENTS)[0].partition(CALL_ID)
            self.call = JsonCall(ends_with_arguments=True)
            self.call.push(f'{{"name": {json.dumps(name.strip())}, "arguments": ')
            self.call_id: str | None = call_id.strip() or None
            self.buffer, self.state = brace + arguments, "call"
            return True
        at = rest.find("{")
        if at < 0:
            return False
        self.call, self.call_id = JsonCall(), None
        self.buffer, self.state = rest[at:], "call"
        return True

    def _read_call(self) -> list[ToolEvent]:
        events = self.read_call(self.call, self.call_id)
        if self.call.done or self.call.failed:
            self.state = "calls"
        return events

    def finish(self) -> list[ToolEvent]:
        if self.state == "content":
            return super().finish()
        if not self.num_calls:  # a mark without a call is content
            self.buffer = self.mark + (self.call.text if self.state == "call" else "") + self.buffer
            return super().finish()
        self.buffer = ""
        return []


class MistralParser(MarkedJsonParser):
    mark, named, needs_special_tokens = "[TOOL_CALLS]", True, True


class Phi4Parser(MarkedJsonParser):
    mark = "functools["
