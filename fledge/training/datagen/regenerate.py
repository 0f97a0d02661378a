"""The target answers the training prompts itself: a drafter should learn from what its target really says.

Each line of the output is one conversation:

    {"id": …, "messages": [user, assistant, user, assistant, …], "looping": false,
     "turns_ids": [{"prompt_ids": […], "answer_ids": […], "finish_reason": "stop"}, …]}

with one entry of `turns_ids` for each answer: the whole prompt as the target saw it, and the ids it answered with (its
end-of-turn id last, unless it was cut off). Training reads these ids, so nothing is lost in detokenising.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from fledge import progress
from fledge.tokenizer import Tokenizer
from fledge.training.data.chat_files import Decontamination
from fledge.training.data.loading import DataError
from fledge.training.data.rendering import Options
from fledge.training.data.workers import Workers, find_workers
from fledge.training.datagen.conversations import Conversations
from fledge.training.datagen.dialogues import HostWork
from fledge.training.datagen.prompts import AnswerFile, Prompt, prompt_id, read_prompts

# What is handed at once to a generator that takes lists. Large, so that it always has work; follow-up turns join the next.
WAVE = 32768
# The user's turns that the target writes: sampled freely.
SELF_TEMPERATURE = 1.0
SELF_MAX_TOKENS = 256
# When the time is over no prompt is begun; this share of it later, what is still being answered is dropped.
GRACE = 0.1


class PromptsExhausted(DataError):
    """The target writes no new prompts any more; what it wrote is answered."""


class _TimeOver(Exception):
    """What is still being answered is not waited for."""


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


@runtime_checkable
class StreamGenerator(AnswerGenerator, Protocol):
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
        """Takes a stream as well as a list: an iterator whose None means "nothing yet, ask again", with a function from
        index to seed."""
        ...


@dataclass
class RegenerateReport:
    """What came of it; printed at the end."""

    conversations: int = 0
    answers: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0  # of the whole command
    warm_up_seconds: float = 0.0  # of these, before the first prompt went in: loading, compiling, recording
    looping: int = 0
    cut_off: int = 0  # answers that reached max_tokens
    already_done: int = 0
    duplicates: int = 0
    too_long: int = 0  # prompts (or follow-up turns) that leave no room for an answer
    refused: int = 0  # by the chat template
    contaminated: int = 0  # prompts that share text with those of `decontaminate`
    self_rejected: int = 0  # self-written prompts: too short, unfinished, repeated, looping, or to be contaminated

    @property
    def settled(self) -> int:
        """Prompts that need nothing more."""
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
            "prompts left out for text of the evaluation": self.contaminated,
            "self-written prompts rejected": self.self_rejected,
        }
        text = f"{self.conversations:,} conversations, {self.answers:,} answers, {self.answer_tokens:,} answer tokens "
        text += f"in {self.seconds:.1f} s ({self.tokens_per_second:,.0f} tokens/s; {self.warm_tokens_per_second:,.0f} "
        text += f"after the {self.warm_up_seconds:.1f} s before the first prompt)"
        return text + "".join(f"; {count:,} {what}" for what, count in notes.items() if count)


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
    wave: int = WAVE,
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
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    last = None if max_seconds is None else time.monotonic() + max_seconds * (1 + GRACE)
    started = time.monotonic() if started is None else started
    if prompts_path is None and not self_prompted:
        raise DataError("nothing to answer: give a file of prompts, a number of self-written prompts, or both")
    if max_tokens < 1 or temperature < 0 or not 0 < top_p <= 1 or (self_prompted or 0) < 0:
        raise DataError("regenerating needs max_tokens >= 1, temperature >= 0, 0 < top_p <= 1 and self_prompted >= 0")
    number, count = share
    prompts = list(islice(read_prompts(prompts_path), limit))[number::count] if prompts_path is not None else []
    settings = {"model": model, "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    settings["chat_template"] = tokenizer.chat_template or ""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p}
    max_model_len = getattr(generator, "max_model_len", None)
    work = HostWork(tokenizer, None if max_model_len is None else max_model_len - max_tokens)
    decontamination, stop_ids = (
        Decontamination.of_files(decontaminate),
        work.chat.stop_ids(),
    )  # refusals come before there is a file
    with AnswerFile(out_path, settings) as file:
        remaining = len(prompts) + (self_prompted or 0) - len(file.done)
        workers = find_workers(work, remaining, getattr(generator, "concurrency", 0), processes)
        gc.freeze()  # what is loaded by now stays: a look through all of it would stop the device for a tenth of a second
        try:
            run = _Run(generator, work, workers, file, sampling, seed, wave, started, decontamination, stop_ids)
            run.template_options, run.deadline, run.last = list(template_options), deadline, last
            return run.answer_all(prompts, self_prompted or 0)
        finally:
            gc.unfreeze()
            workers.close()


class _Run:
    """One call of `regenerate`."""

    def __init__(
        self,
        generator: AnswerGenerator,
        work: HostWork,
        workers: Workers,
        file: AnswerFile,
        sampling: dict[str, Any],
        seed: int,
        wave: int,
        started: float,
        decontaminate: Decontamination | None,
        stop_ids: Sequence[int],
    ):
        self.generator, self.chat, self.workers, self.file = generator, work.chat, workers, file
        self.sampling, self.seed, self.wave, self.started, self.decontaminate = sampling, seed, wave, started, decontaminate
        self.stop_ids = stop_ids
        self.template_options: list[Options] = [{}]
        self.deadline: float | None = None  # time.monotonic() after which no prompt is begun
        self.last: float | None = None  # and after which no answer is waited for
        self.report = RegenerateReport()
        # A resumed run must not draw again what the first one drew.
        self.waves = len(file.done) * 1009
        self.seen = set(file.done)

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
        return self.deadline is not None and time.monotonic() > self.deadline

    def _check_time(self) -> None:
        if self.last is not None and time.monotonic() > self.last:
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
                if self.decontaminate is not None and self.decontaminate.has(prompt.turns):
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
            asked = min(self.wave, missing + missing // 4 + 8)  # some will be rejected
            prompts: list[Prompt] = []
            for text in self._written_turns(asked):
                name = "self-" + prompt_id([" ".join((text or "").casefold().split())])
                if not text or name in self.seen or (self.decontaminate is not None and self.decontaminate.has([text])):
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
            for index, ids, reason in self._generate(conversations):
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

    def _generate(self, conversations: Conversations) -> Iterable[tuple[int, list[int], str]]:
        if not isinstance(self.generator, StreamGenerator):
            return self._in_waves(conversations)
        stream = self._watched(conversations)
        return self.generator.generate(stream, seed=conversations.seed, stop_ids=self.stop_ids, **self.sampling)

    def _watched(self, conversations: Conversations) -> Iterator[list[int] | None]:
        """Notes when the first prompt goes in, and when the time is over: it is asked at every step of an engine."""
        for prompt in conversations:
            self._end_warm_up()
            self._check_time()
            yield prompt

    def _next_seed(self) -> int:
        """Of the next wave: no other seed's waves have it, or files of neighbouring seeds would hold the same prompts."""
        self.waves += 1
        return int.from_bytes(sha256(f"{self.seed} {self.waves}".encode()).digest()[:7])

    def _end_warm_up(self) -> None:
        self.report.warm_up_seconds = self.report.warm_up_seconds or time.monotonic() - self.started

    def _in_waves(self, conversations: Conversations) -> Iterator[tuple[int, list[int], str]]:
        first = 0
        prompts = self._watched(conversations)
        while wave := list(_until_none(islice(prompts, self.wave))):
            seed = self._next_seed()
            for index, ids, reason in self.generator.generate(wave, seed=seed, stop_ids=self.stop_ids, **self.sampling):
                yield first + index, ids, reason
            first += len(wave)


def _until_none(prompts: Iterable[list[int] | None]) -> Iterator[list[int]]:
    for prompt in prompts:
        if prompt is None:
            return
        yield prompt
