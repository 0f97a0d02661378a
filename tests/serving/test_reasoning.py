"""Reasoning is split from answers, with the text as a whole and in pieces of 1 and 3 characters."""

from __future__ import annotations

import pytest

from fledge.serving.reasoning import REASONING_PARSERS

CASES = [
    ("qwen3", "", "<think>\nhm</think>\n\nyes", "\nhm", "yes"),
    ("qwen3", "", "just an answer", "", "just an answer"),
    ("qwen3", "user: x<think>\n", "hm</think>yes", "hm", "yes"),
    ("qwen3", "<think>\n\n</think>\n\n", "yes", "", "yes"),
    ("qwen3", "", "<think>cut off", "cut off", ""),
    ("qwen3", "", "<thin air", "", "<thin air"),
    ("qwen3", "<think>old</think> earlier answer, user: go on", "<think>new</think>yes", "new", "yes"),
    ("deepseek_r1", "", "hm</think>yes", "hm", "yes"),
    ("deepseek_r1", "", "<think>hm</think>yes </think> no", "hm", "yes </think> no"),
    ("deepseek_r1", "", "hm </thin ice", "hm </thin ice", ""),
    ("kimi_k2", "", "<think>hm<|tool_calls_section_begin|>x", "hm", "<|tool_calls_section_begin|>x"),
    ("kimi_k2", "", "yes", "", "yes"),
    ("mistral", "[INST]x[/INST]", "[THINK]hm[/THINK]yes", "hm", "yes"),
    ("mistral", "[SYSTEM_PROMPT][THINK]so[/THINK] then answer[/SYSTEM_PROMPT]", "[TH]is", "", "[TH]is"),
]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_split(name: str, prompt: str, text: str, reasoning: str, content: str, size: int) -> None:
    parser = REASONING_PARSERS[name](prompt)
    parts = [parser.push(text[at : at + size]) for at in range(0, len(text), size)] + [parser.finish()]
    assert "".join(part.reasoning for part in parts) == reasoning
    assert "".join(part.content for part in parts) == content
