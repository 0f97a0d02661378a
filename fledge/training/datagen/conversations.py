"""Runs conversations through the target: prompts are prepared in advance, and finished conversations are written to a file.

prompts → open → [fresh] ─┐                     ┌→ settle → line of the file
                          ├→ the generator asks ┤
         [follow-ups] ────┘                     └→ settle → the next turn: a follow-up

The work on the host (chat templates, tokenising, detecting loops, JSON) takes about as long as the answers take on a GPU. It is
separate in `HostWork`, with plain data as input and output, so that worker processes can do it.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from fledge.bench.loops import is_looping
from fledge.errors import UserError
from fledge.tokenizer import Tokenizer
from fledge.training.data.rendering import Answer, ChatFormat, Message, TemplateError
from fledge.training.data.workers import Workers
from fledge.training.datagen.prompts import AnswerFile, Prompt

# Most batches of answers that wait for workers. If the workers are slower, the generator waits, which limits the memory.
MAX_SETTLING = 256
# Shortest self-written user turn that is kept.
SELF_MIN_CHARACTERS = 12


@dataclass
class Dialogue:
    """A conversation in progress."""

    prompt: Prompt
    messages: list[Message]  # so far, including the target's answers
    upcoming: deque[Message]  # the user's remaining turns
    turns: list[dict[str, Any]] = field(default_factory=list)  # the `turns_ids` of the file
    prompt_ids: list[int] = field(default_factory=list)  # the prompt to answer next
    looping: bool = False  # whether one of the answers so far loops

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
    ids: list[int]  # the answer to its `prompt_ids`
    reason: str


class Settled(NamedTuple):
    """The result of processing a batch of answers."""

    lines: list[tuple[str, str]]  # finished conversations: id and line of the file
    going_on: list[Dialogue]  # unfinished conversations with their next prompt
    looping: int


class HostWork:
    """The work on the host. Each method takes a list, so that one message to a worker carries many small items."""

    def __init__(self, tokenizer: Tokenizer, longest_prompt: int):
        self.tokenizer, self.longest_prompt = tokenizer, longest_prompt
        self.chat = ChatFormat(tokenizer)

    def __reduce__(self) -> tuple:
        return HostWork, (self.tokenizer, self.longest_prompt)

    def open(self, prompts: list[Prompt]) -> list[Dialogue | str]:
        """Returns conversations with their first prompt, or why there is none: "too_long" or "refused" (by the template)."""
        return [self._open_turn(dialogue) or dialogue for dialogue in map(Dialogue.start, prompts)]

    def settle(self, answered: list[Answered]) -> Settled:
        lines, going_on, num_looping = [], [], 0
        for dialogue, ids, reason in answered:
            ids = [int(token_id) for token_id in ids]
            text = self.tokenizer.decode(ids, skip_special_tokens=True)
            dialogue.messages.append({"role": "assistant", "content": text})
            dialogue.turns.append({"prompt_ids": dialogue.prompt_ids, "answer_ids": ids, "finish_reason": reason})
            if is_looping(ids):
                num_looping += 1
                dialogue.looping = True
            if dialogue.upcoming and not self._open_turn(dialogue):
                going_on.append(dialogue)
            else:
                lines.append((dialogue.prompt.id, dialogue.line()))
        return Settled(lines, going_on, num_looping)

    def _open_turn(self, dialogue: Dialogue) -> str:
        """Adds the user's next turn and renders the prompt; returns "". If that fails, returns why and leaves the turn out."""
        dialogue.messages.append(dialogue.upcoming.popleft())
        problem = ""
        try:
            answers = [Answer(ids=turn["answer_ids"]) for turn in dialogue.turns]
            given = sum(message["role"] == "assistant" for message in dialogue.messages) - len(answers)
            answers = [Answer()] * given + answers
            dialogue.prompt_ids = self.chat.prompt_ids(dialogue.messages, answers, dialogue.prompt.options)
            if len(dialogue.prompt_ids) > self.longest_prompt:
                problem = "too_long"
        except TemplateError:
            problem = "refused"
        if problem:
            dialogue.messages.pop()
        return problem

    def written(self, answers: list[tuple[list[int], str]]) -> list[str | None]:
        """Returns the text of user turns that the target wrote; None for unusable ones."""
        return [self._written(ids, reason) for ids, reason in answers]

    def _written(self, ids: list[int], reason: str) -> str | None:
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        inner = ids[:-1]  # without the end of the turn
        unusable = reason != "stop" or len(text) < SELF_MIN_CHARACTERS or any(map(self.chat.is_special, inner))
        return None if unusable or is_looping(inner) else text


@dataclass
class RegenerateReport:
    """The counts of a run, printed at the end."""

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0  # of the whole command
    warm_up_seconds: float = 0.0  # part of `seconds` before the first prompt: loading, compiling, capturing CUDA graphs
    looping: int = 0
    cut_off: int = 0  # answers that reached max_tokens
    already_done: int = 0
    duplicates: int = 0
    too_long: int = 0  # prompts (or follow-up turns) that leave no room for an answer
    refused: int = 0  # by the chat template
    contaminated: int = 0  # prompts that share text with those of `decontaminate`
    self_rejected: int = 0  # self-written prompts: too short, unfinished, repeated, looping, or contaminated

    @property
    def settled(self) -> int:
        """Prompts that are done, for any reason."""
        return self.conversations + self.already_done + self.duplicates + self.too_long + self.refused + self.contaminated

    @property
    def tokens_per_second(self) -> float:
        return self.answer_tokens / self.seconds if self.seconds else 0.0

    @property
    def warm_tokens_per_second(self) -> float:
        warm_seconds = self.seconds - self.warm_up_seconds
        return self.answer_tokens / warm_seconds if warm_seconds > 0 else 0.0

    def __str__(self) -> str:
        notes = {
            "looping": self.looping,
            "cut off at the limit": self.cut_off,
            "conversations already done": self.already_done,
            "prompts with an id seen before": self.duplicates,
            "prompts too long": self.too_long,
            "prompts refused by the chat template": self.refused,
            "prompts left out for overlap with the evaluation": self.contaminated,
            "self-written prompts rejected": self.self_rejected,
        }
        text = f"{self.conversations:,} conversations, {self.answers:,} answers, {self.answer_tokens:,} answer tokens "
        text += f"in {self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s; {self.warm_tokens_per_second:,.0f} "
        text += f"after the {self.warm_up_seconds:.1f} s before the first prompt)"
        return text + "".join(f"; {count:,} {what}" for what, count in notes.items() if count)


class Conversations(Iterator["list[int] | None"]):
    """The generator's input: yields prompts, or None if it should continue with the ones it has and ask again later."""

    def __init__(
        self,
        prompts: Iterator[Prompt],
        workers: Workers,
        file: AnswerFile,
        report: RegenerateReport,
        seed: int,
    ) -> None:
        self._prompts, self._workers, self._file, self._report, self._seed = prompts, workers, file, report, seed
        self._opening: deque[Future] = deque()
        self._num_opening = 0  # number of prompts in `_opening`
        self._fresh: deque[Dialogue] = deque()
        self._follow_ups: deque[Dialogue] = deque()  # answered before `_fresh`, so that conversations finish early
        self._asked: dict[int, Dialogue] = {}
        self._num_asked = 0
        self._answered: list[Answered] = []  # collected for the next batch to a worker
        self._settling: deque[Future] = deque()
        self._advance()  # starts preparing prompts while the generator is still loading

    def __next__(self) -> list[int] | None:
        self._hand_over()
        self._advance()
        while not (self._follow_ups or self._fresh):
            if self._asked:
                return None
            if not (self._opening or self._settling):
                raise StopIteration
            wait([*islice(self._opening, 1), *islice(self._settling, 1)], return_when=FIRST_COMPLETED)
            self._advance()
        dialogue = (self._follow_ups or self._fresh).popleft()
        self._asked[self._num_asked] = dialogue
        self._num_asked += 1
        return dialogue.prompt_ids

    def seed(self, index: int) -> int:
        """Returns a seed for each turn of each prompt, so that an answer does not depend on when it was generated."""
        dialogue = self._asked[index]
        name = f"{self._seed}/{len(dialogue.turns)}/{dialogue.prompt.id}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    def answer(self, index: int, ids: list[int], reason: str) -> None:
        self._answered.append(Answered(self._asked.pop(index), ids, reason))
        if len(self._answered) >= self._workers.batch:
            self._hand_over()

    def finish(self) -> None:
        """Waits for all remaining host work, after the generator has finished."""
        if self._asked:
            answered = self._num_asked - len(self._asked)
            raise UserError(f"the generator answered {answered} of {self._num_asked} prompts; run again to continue")
        self._hand_over()
        while self._settling:
            self._take_settled(self._settling.popleft().result())

    def abandon(self) -> None:
        """Ends at the time limit: conversations end with their last answered turn; those without one are dropped."""
        begun = [dialogue for dialogue in [*self._asked.values(), *self._follow_ups] if dialogue.turns]
        self._asked.clear()
        self._follow_ups.clear()
        self.finish()
        begun += self._follow_ups
        for dialogue in begun:
            dialogue.messages.pop()  # the user's unanswered turn
        self._file.append([(dialogue.prompt.id, dialogue.line()) for dialogue in begun])
        self._report.conversations += len(begun)

    def salvage(self) -> None:
        """Writes the answers so far to the file after an error, as far as that is still possible."""
        try:
            self._hand_over()
            while self._settling:
                self._take_settled(self._settling.popleft().result(timeout=60))
        except Exception:
            pass  # the first error is the one to report

    # --- workers ------------------------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        if self._answered:
            self._settling.append(self._workers.submit(self._settle, self._answered))
            self._answered = []
        while len(self._settling) > MAX_SETTLING:
            self._take_settled(self._settling.popleft().result())

    def _settle(self, answered: list[Answered]) -> Settled:
        settled = self._workers.call("settle", answered)
        self._file.append(settled.lines)
        return settled

    def _advance(self) -> None:
        """Takes results from the workers, and gives them more prompts to open."""
        while self._settling and self._settling[0].done():
            self._take_settled(self._settling.popleft().result())
        self._take_opened()
        while len(self._follow_ups) + len(self._fresh) + self._num_opening < self._workers.ahead:
            prompts = list(islice(self._prompts, self._workers.batch))
            if not prompts:
                return
            self._opening.append(self._workers.submit(self._workers.call, "open", prompts))
            self._num_opening += len(prompts)
            self._take_opened()

    def _take_opened(self) -> None:
        """Takes opened prompts, in their order."""
        while self._opening and self._opening[0].done():
            opened = self._opening.popleft().result()
            self._num_opening -= len(opened)
            for dialogue in opened:
                if isinstance(dialogue, Dialogue):
                    self._fresh.append(dialogue)
                else:
                    setattr(self._report, dialogue, getattr(self._report, dialogue) + 1)

    def _take_settled(self, settled: Settled) -> None:
        self._follow_ups.extend(settled.going_on)
        self._report.conversations += len(settled.lines)
        self._report.looping += settled.looping
