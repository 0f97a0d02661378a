"""Formats with JSON calls: Hermes and Qwen, Llama 3, Mistral and Phi-4."""

from __future__ import annotations

import json

from fledge.serving.tool_parsers.base import Content, JsonCall, ToolEvent, ToolParser, before_marker

START, END = "<tool_call>", "</tool_call>"


class HermesParser(ToolParser):
    """Parses `<tool_call>{"name": …, "arguments": …}</tool_call>`, between other text or several in a row."""

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
        """Continues the call, and sets `self.call` to None at its end."""
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


TAG = "<|python_tag|>"


class Llama3JsonParser(ToolParser):
    """Parses answers that are `{"name": …, "parameters": …}`, several joined by `;`, with or without `<|python_tag|>`."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = ""  # the text before a possible call, which is content if it is none
        self.call: JsonCall | None = None
        self.is_content = False
        self.is_over = False  # other text has followed the calls: it is dropped, and so is all after it

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        events: list[ToolEvent] = []
        while self.buffer:
            if self.is_content:
                events.append(Content(self.buffer))
                self.buffer = ""
            elif self.is_over:
                self.buffer = ""
            elif self.call is None:
                if not self._begin():
                    break
            else:
                events += self._read_call(self.call)
        return events

    def _begin(self) -> bool:
        """Looks for the opening brace. Returns False if more text is needed."""
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
            self.is_over = True
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


ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"


class MarkedJsonParser(ToolParser):
    """Parses content before a marker and calls after it. Text between calls is dropped.

    Mistral                                  [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]
    Mistral, tokenizers from version 11 on   [TOOL_CALLS]f{…}[TOOL_CALLS]g{…}, or f[CALL_ID]id[ARGS]{…}
    Phi-4                                    functools[{"name": "f", "arguments": {…}}, …]
    """

    mark: str
    named = False  # whether a call may be a name followed by its arguments

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
        """Looks for the next call. Returns False if more text is needed."""
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
        if not self.num_calls:  # a marker without a call is content
            self.buffer = self.mark + (self.call.text if self.state == "call" else "") + self.buffer
            return super().finish()
        self.buffer = ""
        return []


class MistralParser(MarkedJsonParser):
    mark, named, needs_special_tokens = "[TOOL_CALLS]", True, True


class Phi4Parser(MarkedJsonParser):
    mark = "functools["
