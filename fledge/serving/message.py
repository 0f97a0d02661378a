"""Splits an assistant's message into reasoning, content and tool calls as its text arrives."""

from __future__ import annotations

from typing import Any

from fledge.serving.reasoning import ReasoningParser
from fledge.serving.tool_parsers.base import CallArguments, CallStart, Content, ToolEvent, ToolParser


class MessageParser:
    """Returns OpenAI's stream deltas for each piece of text, and at the end the whole message."""

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        tools: ToolParser | None = None,
        *,
        parallel: bool = True,
        with_reasoning: bool = True,
    ) -> None:
        self.reasoning, self.tools, self.parallel, self.with_reasoning = reasoning, tools, parallel, with_reasoning
        self.calls: list[dict[str, Any]] = []
        self._thought: list[str] = []
        self._content: list[str] = []
        self._arguments: list[list[str]] = []  # pieces of JSON text, for each call

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def is_answering(self) -> bool:
        """Whether the text that follows is part of the answer: not reasoning, nor the line breaks after it."""
        return self.reasoning is None or (self.reasoning.state == "answering" and not self.reasoning.trims)

    def push(self, text: str) -> list[dict[str, Any]]:
        if self.reasoning is None:
            return self._answer(text)
        thought, content = self.reasoning.push(text)
        return self._think(thought) + self._answer(content)

    def finish(self) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        if self.reasoning is not None:
            thought, content = self.reasoning.finish()
            deltas += self._think(thought) + self._answer(content)
        if self.tools is not None:
            deltas += self._events(self.tools.finish())
        return deltas

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        for call, arguments in zip(self.calls, self._arguments, strict=True):
            call["function"]["arguments"] = "".join(arguments)
        if self.reasoning is not None and self.with_reasoning:
            message["reasoning"] = message["reasoning_content"] = self.thought or None
        if self.calls:
            message["tool_calls"] = self.calls
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if self.calls and reason == "stop" else reason

    def _think(self, text: str) -> list[dict[str, Any]]:
        if text:
            self._thought.append(text)
        return [{"reasoning": text, "reasoning_content": text}] if text and self.with_reasoning else []

    def _answer(self, text: str) -> list[dict[str, Any]]:
        if not text:
            return []
        return self._events([Content(text)] if self.tools is None else self.tools.push(text))

    def _events(self, events: list[ToolEvent]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for one in events:
            match one:
                case Content(text):
                    self._content.append(text)
                    deltas.append({"content": text})
                case CallStart(index, call_id, name) if self.parallel or index == 0:
                    function = {"name": name, "arguments": ""}
                    self.calls.append({"id": call_id, "type": "function", "function": dict(function)})
                    self._arguments.append([])
                    call = {"index": index, "id": call_id, "type": "function", "function": function}
                    deltas.append({"tool_calls": [call]})
                case CallArguments(index, text) if self.parallel or index == 0:
                    self._arguments[index].append(text)
                    deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        return deltas
