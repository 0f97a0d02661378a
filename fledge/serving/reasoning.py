"""Splits a model's text into reasoning and content as it arrives."""

from __future__ import annotations

from typing import NamedTuple

from fledge.serving.tool_parsers.base import before_marker


class Thought(NamedTuple):
    reasoning: str
    content: str


class ReasoningParser:
    """Parses reasoning between `<think>` and `</think>`. The chat template may have put the opening tag into the prompt."""

    start, end = "<think>", "</think>"
    thinks_first = False  # whether an answer without tags begins with reasoning
    also_ends: tuple[str, ...] = ()  # markers that end reasoning too, and stay in the content
    needs_special_tokens = False  # whether its tags are special tokens, which decoding skips by default

    def __init__(self, prompt: str = "") -> None:
        opened, closed = prompt.rfind(self.start), prompt.rfind(self.end)
        # Only tags at the end of the prompt count: reasoning of earlier turns is closed.
        open_in_prompt = opened > closed and not prompt[opened + len(self.start) :].strip()
        closed_in_prompt = closed > opened >= 0 and not prompt[closed + len(self.end) :].strip()
        self.state = "beginning"  # beginning | thinking | answering
        if open_in_prompt or (self.thinks_first and not closed_in_prompt):
            self.state = "thinking"
        elif closed_in_prompt:
            self.state = "answering"
        self.may_open = True  # whether the opening tag may still come
        self.trims = False  # whether line breaks are dropped, after the closing tag
        self.buffer = ""

    def push(self, text: str) -> Thought:
        self.buffer += text
        reasoning = ""
        if self.state != "answering" and self.may_open:
            stripped = self.buffer.lstrip()
            if stripped.startswith(self.start):
                self.state, self.may_open = "thinking", False
                self.buffer = stripped[len(self.start) :]
            elif not self.start.startswith(stripped):
                self.may_open = False
                if self.state == "beginning":
                    self.state = "answering"
            else:
                return Thought("", "")
        if self.state == "thinking":
            reasoning, mark, rest = before_marker(self.buffer, (self.end, *self.also_ends))
            self.buffer = rest
            if mark:
                self.state, self.trims = "answering", True
                self.buffer = rest if mark == self.end else mark + rest
        content = ""
        if self.state == "answering":
            content, self.buffer = self.buffer, ""
            if self.trims:
                content = content.lstrip("\n")
                self.trims = not content
        return Thought(reasoning, content)

    def finish(self) -> Thought:
        """Returns the text that was held back as a possible tag."""
        rest, self.buffer = self.buffer, ""
        return Thought(rest, "") if self.state == "thinking" else Thought("", rest)


class Qwen3(ReasoningParser):
    """Reasons if the answer or the template opens the tag."""


class DeepSeekR1(ReasoningParser):
    """Always reasons first; older templates omit the opening tag."""

    thinks_first = True


class KimiK2(ReasoningParser):
    """May begin a tool call without closing its reasoning."""

    also_ends = ("<|tool_calls_section_begin|>",)


class Mistral(ReasoningParser):
    """Magistral's format."""

    start, end, needs_special_tokens = "[THINK]", "[/THINK]", True


REASONING_PARSERS: dict[str, type[ReasoningParser]] = {
    "qwen3": Qwen3,
    "deepseek_r1": DeepSeekR1,
    "kimi_k2": KimiK2,
    "mistral": Mistral,
}
