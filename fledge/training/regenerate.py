"""The target answers the training prompts itself: a drafter should learn from what its target really says.

Each line of the output is one conversation:

    {"id": …, "messages": [user, assistant, user, assistant, …], "looping": false,
     "turns_ids": [{"prompt_ids": […], "answer_ids": […], "finish_reason": "stop"}, …]}

with one entry of `turns_ids` for each answer: the whole prompt as the target saw it, and the ids it answered with (its
end-of-turn id last, unless it was cut off). Training reads these ids, so nothing is lost in detokenising.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fledge.errors import UserError
from fledge.tokenizer import Tokenizer
from fledge.training.data import DataError
from fledge.training.loops import is_looping
from fledge.training.prompts import AnswerFile, Prompt, prompt_id, read_prompts
from fledge.training.rendering import Answer, ChatFormat, Message, TemplateError

# What is handed to the generator at once. Large, so that it always has work; follow-up turns join the next wave.
WAVE = 32768
# The user's turns that the target writes: sampled freely, and kept if they look like something a user would send.
SELF_TEMPERATURE = 1.0
SELF_MAX_TOKENS = 256
SELF_MIN_CHARACTERS = 12


class AnswerGenerator(Protocol):
    """Something that continues token ids: an engine on CPU or GPU, or a fake in a test."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int,
        stop_ids: Sequence[int],
    ) -> Iterator[tuple[int, list[int], str]]:
        """Yields (index of the prompt, answer ids, "stop" or "length") as answers finish, in any order.

        The answer's ids end with the stop id that ended it. Equal prompts in one call are sampled independently.
        A generator with a limited context says so in an attribute `max_model_len` (tokens of prompt and answer).
        """
        ...


@dataclass
class RegenerateReport:
    """What came of it; printed at the end."""

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    looping: int = 0
    cut_off: int = 0  # answers that reached max_tokens
    already_done: int = 0
    duplicates: int = 0
    too_long: int = 0  # prompts (or follow-up turns) that leave no room for an answer
    refused: int = 0  # by the chat template
    self_rejected: int = 0  # self-written prompts: too short, unfinished, repeated or looping

    @property
    def settled(self) -> int:
        """Prompts that need nothing more."""
        return self.conversations + self.already_done + self.duplicates + self.too_long + self.refused

    @property
    def tokens_per_second(self) -> float:
        return self.answer_tokens / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        notes = {
            "looping": self.looping,
            "cut off at the limit": self.cut_off,
            "conversations already done": self.already_done,
            "prompts with an id seen before": self.duplicates,
            "prompts too long": self.too_long,
            "prompts refused by the chat template": self.refused,
            "self-written prompts rejected": self.self_rejected,
        }
        text = f"{self.conversations:,} conversations, {self.answers:,} answers, {self.answer_tokens:,} answer tokens "
        text += f"in {self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s)"
        return text + "".join(f"; {count:,} {what}" for what, count in notes.items() if count)


@dataclass
class _Dialogue:
    """A conversation under way."""

    prompt: Prompt
    messages: list[Message]  # so far, with the target's answers
    upcoming: deque[str]  # the user's turns still to come
    turns: list[dict[str, Any]] = field(default_factory=list)  # as they will stand in the file
    prompt_ids: list[int] = field(default_factory=list)  # what is to be answered now
    looping: bool = False  # one of the answers so far

    @classmethod
    def start(cls, prompt: Prompt) -> _Dialogue:
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        return cls(prompt, system, deque(prompt.turns))

    def record(self) -> dict[str, Any]:
        source = {"source": self.prompt.source} if self.prompt.source else {}
        answers = {"messages": self.messages, "looping": self.looping, "turns_ids": self.turns}
        return {"id": self.prompt.id, **source, **answers}


def regenerate(
    generator: AnswerGenerator,
    tokenizer: Tokenizer,
    prompts_path: str | Path | None,
    out_path: str | Path,
    *,
    max_tokens: int = 512,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    self_prompted: int | None = None,
    limit: int | None = None,
    model: str = "",
    chat_template: str | None = None,
    wave: int = WAVE,
    show_progress: bool = True,
) -> RegenerateReport:
    """Answers the prompts of a file, then `self_prompted` prompts that the target writes itself.

    Conversations are appended to `out_path` as they finish; a second call goes on where the first one ended.
    """
    if prompts_path is None and not self_prompted:
        raise DataError("nothing to answer: give a file of prompts, a number of self-written prompts, or both")
    if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1 or (self_prompted or 0) < 0:
        raise DataError("regenerating needs max_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and self_prompted >= 0")
    prompts = list(islice(read_prompts(prompts_path), limit)) if prompts_path is not None else []
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    settings["chat_template"] = chat_template or tokenizer.chat_template or ""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    with AnswerFile(out_path, settings) as file:
        run = _Run(generator, ChatFormat(tokenizer, chat_template), file, sampling, seed, wave)
        return run.answer_all(prompts, self_prompted or 0, show_progress)


class _Run:
    """One call of `regenerate`."""

    def __init__(self, generator: AnswerGenerator, chat: ChatFormat, file: AnswerFile, sampling: dict, seed: int, wave: int):
        self.generator, self.chat, self.file, self.sampling, self.wave = generator, chat, file, sampling, wave
        self.stop_ids = chat.stop_ids()
        self.report = RegenerateReport()
        # A resumed run must not draw again what the first one drew.
        self.next_seed = seed + len(file.done) * 1009
        self.seen = set(file.done)

    def answer_all(self, prompts: list[Prompt], self_prompted: int, show_progress: bool) -> RegenerateReport:
        report, started = self.report, time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        console = Console(stderr=True)
        with Progress(*columns, TimeRemainingColumn(), console=console, disable=not show_progress) as progress:
            task = progress.add_task("answering", total=len(prompts) + self_prompted, note="")
            source = chain(self._from_file(prompts), self._self_written(self_prompted))
            waiting: deque[_Dialogue] = deque()  # for the answer to their next turn
            while True:
                waiting.extend(map(_Dialogue.start, islice(source, max(0, self.wave - len(waiting)))))
                if not waiting:
                    break
                # Prompts are rendered before the generator starts: between its answers it should not have to wait.
                wave = [waiting.popleft() for _ in range(min(self.wave, len(waiting)))]
                for dialogue in self._answer([dialogue for dialogue in wave if self._open_turn(dialogue)]):
                    if dialogue.upcoming:
                        waiting.append(dialogue)
                    else:
                        self._finish(dialogue)
                    if (now := time.monotonic() - started) > report.seconds + 0.2:
                        report.seconds = now
                        note = f"{report.tokens_per_second:,.0f} tokens/s, {report.looping:,} looping"
                        progress.update(task, completed=report.settled, note=note)
            progress.update(task, completed=report.settled)
        report.seconds = time.monotonic() - started
        return report

    def _call(self, prompts: list[list[int]], stop_ids: list[int], **sampling: Any) -> Iterator[tuple[int, list[int], str]]:
        self.next_seed += 1
        return self.generator.generate(prompts, seed=self.next_seed, stop_ids=stop_ids, **sampling)

    # --- where prompts come from ---------------------------------------------------------------------------------

    def _from_file(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        for prompt in prompts:
            if prompt.id not in self.seen:
                self.seen.add(prompt.id)
                yield prompt
            elif prompt.id in self.file.done:
                self.report.already_done += 1
            else:
                self.report.duplicates += 1

    def _self_written(self, wanted: int) -> Iterator[Prompt]:
        """The target is given the opening of a user's turn, and writes what a user would (as in Magpie)."""
        if not wanted:
            return
        already = sum(done.startswith("self-") for done in self.file.done)
        self.report.already_done += min(already, wanted)
        missing, fruitless = wanted - already, 0
        opening, ends = self.chat.user_opening()
        sampling = {"max_tokens": SELF_MAX_TOKENS, "temperature": SELF_TEMPERATURE, "top_p": 1.0}
        while missing > 0:
            accepted = 0
            asked = min(self.wave, missing + missing // 4 + 8)  # some will be rejected
            # All of them before the first is answered: the generator does one thing at a time.
            for _, ids, reason in list(self._call([opening] * asked, ends, **sampling)):
                prompt = self._self_prompt(ids, reason)
                if prompt is None or accepted == missing:
                    self.report.self_rejected += prompt is None
                    continue
                self.seen.add(prompt.id)
                accepted += 1
                yield prompt
            missing -= accepted
            fruitless = fruitless + 1 if accepted < asked / 50 else 0
            if fruitless == 3:
                raise DataError(
                    f"the target writes hardly any usable prompts of its own ({wanted - missing} of {wanted} so far; "
                    "the others are unfinished, too short or repeated): give it a file of prompts"
                )

    def _self_prompt(self, ids: list[int], reason: str) -> Prompt | None:
        text = self.chat.tokenizer.decode(ids, skip_special_tokens=True).strip()
        inner = ids[:-1]  # without the end of the turn
        unusable = reason != "stop" or len(text) < SELF_MIN_CHARACTERS or any(map(self.chat.is_special, inner))
        if unusable or is_looping(inner):
            return None
        name = "self-" + prompt_id([" ".join(text.casefold().split())])
        return None if name in self.seen else Prompt(name, (text,), source="self-prompted")

    # --- answering -----------------------------------------------------------------------------------------------

    def _open_turn(self, dialogue: _Dialogue) -> bool:
        """Adds the user's next turn and renders the prompt. False if that is not possible: the conversation ends."""
        dialogue.messages.append({"role": "user", "content": dialogue.upcoming.popleft()})
        answers = [Answer(ids=turn["answer_ids"]) for turn in dialogue.turns]
        max_model_len = getattr(self.generator, "max_model_len", None)
        problem = ""
        try:
            dialogue.prompt_ids = self.chat.prompt_ids(dialogue.messages, answers)
            if max_model_len is not None and len(dialogue.prompt_ids) + self.sampling["max_tokens"] > max_model_len:
                problem = "too_long"
        except TemplateError:
            problem = "refused"
        if problem and dialogue.turns:  # what was answered so far is worth keeping
            dialogue.messages.pop()
            self._finish(dialogue)
        elif problem:
            setattr(self.report, problem, getattr(self.report, problem) + 1)
        return not problem

    def _answer(self, dialogues: list[_Dialogue]) -> Iterator[_Dialogue]:
        if not dialogues:
            return
        prompts = [dialogue.prompt_ids for dialogue in dialogues]
        answered = 0
        for index, ids, reason in self._call(prompts, self.stop_ids, **self.sampling):
            ids = [int(token_id) for token_id in ids]
            if reason == "stop" and self.stop_ids and (not ids or ids[-1] not in self.stop_ids):
                ids.append(self.stop_ids[0])
            dialogue = dialogues[index]
            text = self.chat.tokenizer.decode(ids, skip_special_tokens=True)
            dialogue.messages.append({"role": "assistant", "content": text})
            dialogue.turns.append({"prompt_ids": dialogue.prompt_ids, "answer_ids": ids, "finish_reason": reason})
            self.report.answers += 1
            self.report.answer_tokens += len(ids)
            self.report.cut_off += reason == "length"
            if is_looping(ids):
                self.report.looping += 1
                dialogue.looping = True
            answered += 1
            yield dialogue
        if answered != len(dialogues):
            raise UserError(f"the generator answered {answered} of {len(dialogues)} prompts; run again to go on")

    def _finish(self, dialogue: _Dialogue) -> None:
        self.file.append(dialogue.record())
        self.report.conversations += 1
