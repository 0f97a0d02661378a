"""The target answers the training prompts itself: a drafter should learn from what its target really says.

Each line of the output is one conversation:

    {"id": …, "messages": [user, assistant, user, assistant, …], "looping": false,
     "turns_ids": [{"prompt_ids": […], "answer_ids": […], "finish_reason": "stop"}, …]}

with one entry of `turns_ids` for each answer: the whole prompt as the target saw it, and the ids it answered with (its
end-of-turn id last, unless it was cut off). Training reads these ids, so nothing is lost in detokenising.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Protocol

from fledge import progress
from fledge.tokenizer import Tokenizer
from fledge.training.data.chat_files import DataError, Decontamination
from fledge.training.data.rendering import ChatFormat, Options
from fledge.training.data.workers import Workers, find_workers
from fledge.training.datagen.conversations import Conversations, HostWork, RegenerateReport
from fledge.training.datagen.prompts import AnswerFile, Prompt, prompt_id, read_prompts

# The user's turns that the target writes: sampled freely.
SELF_TEMPERATURE = 1.0
SELF_MAX_TOKENS = 256
SELF_AT_ONCE = 32768  # all of them are written before the first is answered
# When the time is over no prompt is begun; this share of it later, what is still being answered is dropped.
GRACE = 0.1


class PromptsExhausted(DataError):
    """The target writes no new prompts any more; what it wrote is answered."""


class _TimeOver(Exception):
    """What is still being answered is not waited for."""


class AnswerGenerator(Protocol):
    """Something that continues token ids: an engine, a server, or a fake in a test."""

    max_model_len: int  # tokens of prompt and answer
    concurrency: int  # answers under way at once

    def generate(
        self,
        prompts: Sequence[list[int]] | Iterator[list[int] | None],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        seed: int | Callable[[int], int],
        stop_ids: Sequence[int],
    ) -> Iterator[tuple[int, list[int], str]]:
        """Yields (index of the prompt, answer ids, "stop" or "length") as answers finish, in any order.

        `prompts`: of an iterator, None means "nothing yet, ask again". `seed`: a function gives each prompt its own, by its
        index; with a number, equal prompts are sampled independently all the same.
        The answer's ids end with the stop id that ended it.
        """
        ...


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
    share: tuple[int, int] = (0, 1),
    decontaminate: Sequence[str | Path] = (),
    model: str = "",
    template_options: Sequence[Options] = ({},),
    processes: int | None = None,
    started: float | None = None,
    max_seconds: float | None = None,
) -> RegenerateReport:
    """Answers the prompts of a file, then `self_prompted` prompts that the target writes itself.

    Conversations are appended to `out_path` as they finish; a second call goes on where the first one ended.
    `share`: (number, count): this call takes every `count`-th prompt of the file, another process the others.
    `processes`: how many work beside this one on text and files; None: by the number of prompts, 0: none.
    `decontaminate`: files of prompts; what shares thirteen words in a row with one of them is not answered.
    `template_options`: what the chat template gets too (enable_thinking …); each prompt without its own takes one of them.
    `started`: when the whole command did (time.monotonic()), for its report; None: now.
    `max_seconds`: from now on, after which no prompt is begun. A tenth of that later, what is still being answered is dropped.
    """
    began = time.monotonic()
    if prompts_path is None and not self_prompted:
        raise DataError("nothing to answer: give a file of prompts, a number of self-written prompts, or both")
    if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1 or (self_prompted or 0) < 0:
        raise DataError("regenerating needs max_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and self_prompted >= 0")
    number, count = share
    prompts = list(islice(read_prompts(prompts_path), limit))[number::count] if prompts_path is not None else []
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    settings = {"model": model, **sampling, "chat_template": tokenizer.chat_template or ""}
    work = HostWork(tokenizer, generator.max_model_len - max_tokens)
    # Refusals come before there is a file.
    decontamination, stop_ids = Decontamination.of_files(decontaminate), work.chat.stop_ids()
    with AnswerFile(out_path, settings) as file:
        remaining = len(prompts) + (self_prompted or 0) - len(file.done)
        workers = find_workers(work, remaining, generator.concurrency, processes)
        gc.freeze()  # what is loaded by now stays: a look through all of it would stop the device for a tenth of a second
        try:
            run = _Run(
                generator,
                work.chat,
                workers,
                file,
                sampling,
                seed,
                stop_ids,
                decontamination,
                template_options,
                started=began if started is None else started,
                deadline=math.inf if max_seconds is None else began + max_seconds,
                last=math.inf if max_seconds is None else began + max_seconds * (1 + GRACE),
            )
            return run.answer_all(prompts, self_prompted or 0)
        finally:
            gc.unfreeze()
            workers.close()


@dataclass
class _Run:
    """One call of `regenerate`. Its times are those of `time.monotonic()`."""

    generator: AnswerGenerator
    chat: ChatFormat
    workers: Workers
    file: AnswerFile
    sampling: dict[str, Any]
    seed: int
    stop_ids: Sequence[int]
    decontamination: Decontamination
    template_options: Sequence[Options]
    started: float
    deadline: float  # no prompt is begun after it
    last: float  # no answer is waited for after it

    def __post_init__(self) -> None:
        self.report = RegenerateReport()
        # A resumed run must not draw again what the first one drew.
        self.draws = len(self.file.done) * 1009
        self.seen = set(self.file.done)

    def answer_all(self, prompts: list[Prompt], self_prompted: int) -> RegenerateReport:
        report = self.report
        total = len(prompts) + self_prompted
        before = min(total, len(self.file.done))  # by an earlier run: they do not count for the rate
        with progress.task("answering", total, "prompts", done=before) as shown:

            def show() -> None:
                if (now := time.monotonic() - self.started) > report.seconds + 0.2:
                    report.seconds = now
                    note = f"{report.tokens_per_second:,.0f} tokens/s, {report.looping:,} looping"
                    shown.update(report.settled, note=note)

            for source in chain([self._from_file(prompts)], self._self_written(self_prompted)):
                self._answer(takewhile(lambda _: not self._is_late, source), show)
        report.seconds = time.monotonic() - self.started
        return report

    @property
    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _check_time(self) -> None:
        if time.monotonic() > self.last:
            raise _TimeOver

    def _with_options(self, prompt: Prompt) -> Prompt:
        """By its id alone, so that a resumed run chooses the same."""
        if prompt.options or len(self.template_options) == 1:
            return replace(prompt, options=prompt.options or self.template_options[0])
        number = int.from_bytes(sha256(prompt.id.encode()).digest()[:4])
        return replace(prompt, options=self.template_options[number % len(self.template_options)])

    # --- where prompts come from ---------------------------------------------------------------------------------

    def _from_file(self, prompts: list[Prompt]) -> Iterator[Prompt]:
        done_before = frozenset(self.file.done)
        for prompt in prompts:
            if prompt.id not in self.seen:
                self.seen.add(prompt.id)
                if self.decontamination.has(prompt.turns):
                    self.report.contaminated += 1
                else:
                    yield self._with_options(prompt)
            elif prompt.id in done_before:
                self.report.already_done += 1
            else:
                self.report.duplicates += 1

    def _self_written(self, wanted: int) -> Iterator[list[Prompt]]:
        """The target is given the opening of a user's turn, and writes what a user would (as in Magpie)."""
        if not wanted:
            return
        already = sum(done.startswith("self-") for done in self.file.done)
        self.report.already_done += min(already, wanted)
        missing, fruitless = wanted - already, 0
        while missing > 0 and not self._is_late:
            asked = min(SELF_AT_ONCE, missing + missing // 4 + 8)  # some will be rejected
            prompts: list[Prompt] = []
            for text in self._written_turns(asked):
                name = "self-" + prompt_id([" ".join((text or "").casefold().split())])
                if not text or name in self.seen or self.decontamination.has([text]):
                    self.report.self_rejected += 1
                elif len(prompts) < missing:
                    self.seen.add(name)
                    prompts.append(self._with_options(Prompt(name, (text,), source="self-prompted")))
            yield prompts
            missing -= len(prompts)
            fruitless = fruitless + 1 if len(prompts) < asked / 50 else 0
            if fruitless == 3:
                raise PromptsExhausted(
                    f"the target writes hardly any usable prompts of its own ({wanted - missing} of {wanted} so far; "
                    "the others are unfinished, too short or repeated): give it a file of prompts"
                )

    def _written_turns(self, count: int) -> list[str | None]:
        opening, ends = self.chat.user_opening()
        answers = self.generator.generate(
            [opening] * count,
            max_tokens=SELF_MAX_TOKENS,
            temperature=SELF_TEMPERATURE,
            top_p=1.0,
            seed=self._next_seed(),
            stop_ids=ends,
        )
        pieces = ((list(ids), reason) for _, ids, reason in answers)
        read = []
        while batch := list(islice(pieces, self.workers.batch)):
            self._end_warm_up()
            read.append(self.workers.submit(self.workers.call, "written", batch))
        return [text for future in read for text in future.result()]

    # --- answering -----------------------------------------------------------------------------------------------

    def _answer(self, prompts: Iterator[Prompt], show: Callable[[], None]) -> None:
        report = self.report
        conversations = Conversations(prompts, self.workers, self.file, report, self.seed)
        try:
            stream = self._watched(conversations)
            answers = self.generator.generate(stream, seed=conversations.seed, stop_ids=self.stop_ids, **self.sampling)
            for index, ids, reason in answers:
                if reason == "stop" and self.stop_ids and (not ids or ids[-1] not in self.stop_ids):
                    ids = [*ids, self.stop_ids[0]]
                report.answers += 1
                report.answer_tokens += len(ids)
                report.cut_off += reason == "length"
                conversations.answer(index, ids, reason)
                show()
                self._check_time()
            conversations.finish()
        except _TimeOver:
            conversations.abandon()
        except BaseException:
            conversations.salvage()
            raise

    def _watched(self, conversations: Conversations) -> Iterator[list[int] | None]:
        """Notes when the first prompt goes in, and when the time is over: it is asked at every step of an engine."""
        for prompt in conversations:
            self._end_warm_up()
            self._check_time()
            yield prompt

    def _next_seed(self) -> int:
        """For prompts that the target writes: no other seed has it, or files of neighbouring seeds would hold the same ones."""
        self.draws += 1
        return int.from_bytes(sha256(f"{self.seed} {self.draws}".encode()).digest()[:7])

    def _end_warm_up(self) -> None:
        self.report.warm_up_seconds = self.report.warm_up_seconds or time.monotonic() - self.started
