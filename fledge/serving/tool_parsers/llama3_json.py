"""Llama 3: the whole answer is `{"name": …, "parameters": …}`, several joined by `;`, with or without `<|python_tag|>`."""

from __future__ import annotations

from fledge.serving.tool_parsers.base import Content, JsonCall, ToolEvent, ToolParser

TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    def __init__(self) -> None:
        super().__init__()
        self.taken = ""  # what was read of a possible call, to give it back as content
        self.call: JsonCall | None = None
        self.is_content = False

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while self.buffer:
            if self.is_content:
                events.append(Content(self.buffer))
                self.buffer = ""
            elif self.call is None:
                if not self._begin():
                    break
            else:
                events += self._read_call(self.call)
        return events

    def _begin(self) -> bool:
        """Looks for the opening brace; False when more text is needed."""
        stripped = self.buffer.lstrip(" \t\r\n;," if self.num_calls else None)
        if not stripped or (TAG.startswith(stripped) and stripped != TAG):
            return False
        rest = stripped.removeprefix(TAG).lstrip()
        if not rest:
            return False
        if rest[0] == "{":
            self.taken = self.buffer[: len(self.buffer) - len(rest)]
            self.buffer, self.call = rest, JsonCall()
        elif self.num_calls:
            self.buffer = ""  # remarks after the calls
        else:
            self.is_content = True
        return True

    def _read_call(self, call: JsonCall) -> list[ToolEvent]:
        events = self.read_call(call)
        if call.failed and not call.started:
            self.buffer = self.taken + call.text + self.buffer
            self.is_content, self.call = True, None
        elif call.done or call.failed:
            self.call = None
        return events

    def finish(self) -> list[ToolEvent]:
        if self.call is not None and not self.call.started:
            self.buffer = self.taken + self.call.text
        elif self.num_calls:
            self.buffer = ""
        return super().finish()
