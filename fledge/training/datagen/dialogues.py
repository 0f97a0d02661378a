"""Conversations while the target answers them, and the work on the host between its answers.

That work (chat templates, tokens, text, loops, JSON) takes about as long as a GPU takes to answer. So it is kept apart:
plain data in, plain data out, to be done by any process.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fledge.bench.loops import is_looping
from fledge.tokenizer import Tokenizer
from fledge.training.data.rendering import Answer, ChatFormat, Message, TemplateError
from fledge.training.datagen.prompts import Prompt

# User's turns that the target writes are kept if they look like something a user would send.
SELF_MIN_CHARACTERS = 12


@dataclass
class Dialogue:
    """A conversation under way."""

    prompt: Prompt
    messages: list[Message]  # so far, with the target's answers
    upcoming: deque[Message]  # the user's turns still to come
    turns: list[dict[str, Any]] = field(default_factory=list)  # as they will stand in the file
    prompt_ids: list[int] = field(default_factory=list)  # what is to be answered now
    looping: bool = False  # one of the answers so far

    @classmethod
    def start(cls, prompt: Prompt) -> Dialogue:
        if prompt.messages:
            return cls(prompt, list(prompt.messages[:-1]), deque(prompt.messages[-1:]))
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        return cls(prompt, system, deque({"role": "user", "content": turn} for turn in prompt.turns))

    def line(self) -> str:
        source = {"source": self.prompt.source} if self.prompt.source else {}
        answers = {"messages": self.messages, "looping": self.looping, "turns_ids": self.turns}
        options = dict(self.prompt.options)
        tools = {"tools": options.pop("tools")} if "tools" in options else {}
        given = tools | ({"chat_template_kwargs": options} if options else {})
        record = {"id": self.prompt.id, **source, **given, **answers}
        return json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"


class Answered(NamedTuple):
    dialogue: Dialogue
    ids: list[int]  # of the answer to its `prompt_ids`
    reason: str


class Settled(NamedTuple):
    """What became of a few answers."""

    lines: list[tuple[str, str]]  # finished conversations: id, and how they stand in the file
    going_on: list[Dialogue]  # with their next prompt
    looping: int


class HostWork:
    """Each method takes a list, so that many small pieces can travel together."""

    def __init__(self, tokenizer: Tokenizer, longest_prompt: int | None):
        self.tokenizer, self.longest_prompt = tokenizer, longest_prompt
        self.chat = ChatFormat(tokenizer)

    def __reduce__(self) -> tuple:
        return HostWork, (self.tokenizer, self.longest_prompt)

    def open(self, prompts: list[Prompt]) -> list[Dialogue | str]:
        """Conversations with their first prompt; or why there is none: "too_long" or "refused" (by the template)."""
        dialogues = map(Dialogue.start, prompts)
        return [self._open_turn(dialogue) or dialogue for dialogue in dialogues]

    def settle(self, answered: list[Answered]) -> Settled:
        settled = Settled([], [], 0)
        looping = 0
        for dialogue, ids, reason in answered:
            ids = [int(token_id) for token_id in ids]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            dialogue.messages.append({"role": "assistant", "content": text})
            dialogue.turns.append({"prompt_ids": dialogue.prompt_ids, "answer_ids": ids, "finish_reason": reason})
            if is_looping(ids):
                looping += 1
                dialogue.looping = True
            if dialogue.upcoming and not self._open_turn(dialogue):
                settled.going_on.append(dialogue)
            else:
                settled.lines.append((dialogue.prompt.id, dialogue.line()))
        return settled._replace(looping=looping)

    def _open_turn(self, dialogue: Dialogue) -> str:
        """Adds the user's next turn and renders the prompt. Where that is not possible, says why and changes nothing."""
        dialogue.messages.append(dialogue.upcoming.popleft())
        problem = ""
        try:
            answers = [Answer(ids=turn["answer_ids"]) for turn in dialogue.turns]
            given = sum(message["role"] == "assistant" for message in dialogue.messages) - len(answers)
            answers = [Answer()] * given + answers
            dialogue.prompt_ids = self.chat.prompt_ids(dialogue.messages, answers, dialogue.prompt.options)
            if self.longest_prompt is not None and len(dialogue.prompt_ids) > self.longest_prompt:
                problem = "too_long"
        except TemplateError:
            problem = "refused"
        if problem:
            dialogue.messages.pop()
        return problem

    def written(self, answers: list[tuple[list[int], str]]) -> list[str | None]:
        """User's turns that the target wrote: their text, or None for those of no use."""
        return [self._written(ids, reason) for ids, reason in answers]

    def _written(self, ids: list[int], reason: str) -> str | None:
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        inner = ids[:-1]  # without the end of the turn
        unusable = reason != "stop" or len(text) < SELF_MIN_CHARACTERS or any(map(self.chat.is_special, inner))
        return None if unusable or is_looping(inner) else text
