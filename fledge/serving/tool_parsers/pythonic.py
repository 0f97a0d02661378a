"""The format of Llama 3.2 and 4 and Olmo: the whole answer is a Python list of calls, `[get_weather(city="Paris"), now()]`."""

from __future__ import annotations

import ast
import json
import re

from fledge.serving.tool_parsers.base import CallArguments, Content, ToolEvent, ToolParser

OPENING = re.compile(r"\s*\[\s*[A-Za-z_][\w.]*\s*\(")
MAY_OPEN = re.compile(r"\s*(\[\s*([A-Za-z_][\w.]*\s*)?)?")


class PythonicParser(ToolParser):
    """Parses a list of Python calls. A call is returned at its closing parenthesis: only whole values convert to JSON."""

    def __init__(self) -> None:
        super().__init__()
        self.state = "beginning"  # beginning | calls | content | over
        self.depth = 0
        self.quote = ""
        self.escaped = False
        self.scanned = 0  # number of characters of the buffer scanned

    def push(self, text: str) -> list[ToolEvent]:
        self.buffer += text
        if self.state == "beginning":
            if OPENING.match(self.buffer):
                self.state = "calls"
                self.buffer = self.buffer[self.buffer.index("[") + 1 :]
            elif not MAY_OPEN.fullmatch(self.buffer):
                self.state = "content"
        if self.state == "content":
            return super().finish()
        return self._read_calls() if self.state == "calls" else []

    def _read_calls(self) -> list[ToolEvent]:
        events: list[ToolEvent] = []
        while self.scanned < len(self.buffer):
            char = self.buffer[self.scanned]
            self.scanned += 1
            if self.quote:
                if self.escaped:
                    self.escaped = False
                elif char == "\\":
                    self.escaped = True
                elif char == self.quote:
                    self.quote = ""
            elif char in "'\"":
                self.quote = char
            elif char in "([{":
                self.depth += 1
            elif char in ")]}" and self.depth:
                self.depth -= 1
            elif char in ",]" and not self.depth:
                events += self._call(self.buffer[: self.scanned - 1])
                self.buffer, self.scanned = self.buffer[self.scanned :], 0
                if char == "]":
                    self.state, self.buffer = "over", ""
        return events

    def _call(self, source: str) -> list[ToolEvent]:
        try:
            call = ast.parse(source.strip(), mode="eval").body
            if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
                raise ValueError("not a call with named arguments")
            arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
            text = json.dumps(arguments, ensure_ascii=False)
        except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
            return [Content(source)] if source.strip() else []
        start = self.next_call(ast.unparse(call.func))
        return [start, CallArguments(start.index, text)]

    def finish(self) -> list[ToolEvent]:
        if self.state == "calls":
            self.buffer = "" if self.num_calls else "[" + self.buffer
        return super().finish()
