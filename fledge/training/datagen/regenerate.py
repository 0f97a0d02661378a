"""Lets the target answer the training prompts, so that a drafter learns from its target's own answers.

Each line of the output is one conversation:

    {"id": …, "messages": [user, assistant, user, assistant, …], "looping": false,
     "turns_ids": [{"prompt_ids": […], "answer_ids": […], "finish_reason": "stop"}, …]}

with one entry of `turns_ids` per answer: the whole prompt as the target saw it, and the ids of its answer (the end-of-turn
id last, unless it was cut off). Training reads these ids, so nothing is lost in detokenising.
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

# Self-written prompts: user turns sampled from the target.
SELF_TEMPERATURE = 1.0
SELF_MAX_TOKENS = 256
SELF_AT_ONCE = 32768  # most prompts per round; all are written before the first is answered
# After the time limit no prompt is started. After this fraction of it more, unfinished answers are dropped.
GRACE = 0.1


class PromptsExhausted(DataError):
    """Raised if the target writes hardly any new prompts; those it wrote have been answered."""


class _TimeOver(Exception):
    """Raised at the time limit plus `GRACE`: unfinished answers are dropped."""


class AnswerGenerator(Protocol):
    """Interface of what generates the answers: an engine, a server, or a fake in a test."""

    max_model_len: int  # tokens of prompt and answer
    concurrency: int  # answers generated at once

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

        `prompts`: an iterator may yield None for "nothing yet, ask again". `seed`: a function returns a prompt's seed by its
        index; with a number, equal prompts are still sampled independently.
        The answer's ids include the stop id that ended it.
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

    Conversations are appended to `out_path` as they finish; a second call continues where the first one ended.
    `share`: (number, count): this call takes every `count`-th prompt of the file from `number` on, other processes the rest.
    `processes`: worker processes for text and files; None: decided by the number of prompts, 0: none.
    `decontaminate`: files of prompts; prompts that share thirteen consecutive words with one of them are not answered.
    `template_options`: chat template arguments (enable_thinking …), from which prompts without their own take one.
    `started`: start of the whole command (time.monotonic()), for its report; None: now.
    `max_seconds`: time limit after which no prompt is started. A tenth of it later, unfinished answers are dropped.
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
    # Before the output file is created, because these may raise errors.
    decontamination, stop_ids = Decontamination.of_files(decontaminate), work.chat.stop_ids()
    with AnswerFile(out_path, settings) as file:
        remaining = len(prompts) + (self_prompted or 0) - len(file.done)
        workers = find_workers(work, remaining, generator.concurrency, processes)
        gc.freeze()  # excludes everything loaded so far: a full collection would stall the device for 0.1 s
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
    """One call of `regenerate`. Times are in seconds of `time.monotonic()`."""

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
    deadline: float  # after it, no prompt is started
    last: float  # after it, unfinished answers are dropped

    def __post_init__(self) -> None:
        self.report = RegenerateReport()
        # A resumed run must not repeat the random draws of the first one.
        self.draws = len(self.file.done) * 1009
        self.seen = set(self.file.done)

    def answer_all(self, prompts: list[Prompt], self_prompted: int) -> RegenerateReport:
        report = self.report
        total = len(prompts) + self_prompted
        before = min(total, len(self.file.done))  # done by an earlier run: not counted in the rate
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
        """Chooses a prompt's template options by its id alone, so that a resumed run chooses the same."""
        if prompt.options or len(self.template_options) == 1:
            return replace(prompt, options=prompt.options or self.template_options[0])
        number = int.from_bytes(sha256(prompt.id.encode()).digest()[:4])
        return replace(prompt, options=self.template_options[number % len(self.template_options)])

    # --- prompts -------------------------------------------------------------------------------------------------

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
        """Yields rounds of prompts that the target writes when given the opening of a user's turn (as in Magpie)."""
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
                    "the others are unfinished, too short or repeated): give a file of prompts"
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
        """Records when the first prompt is taken, and checks the time limit: an engine asks for prompts at every step."""
        for prompt in conversations:
            self._end_warm_up()
            self._check_time()
            yield prompt

    def _next_seed(self) -> int:
        """Returns a seed for self-written prompts; hashed, so that runs with neighbouring seeds do not write the same ones."""
        self.draws += 1
        return int.from_bytes(sha256(f"{self.seed} {self.draws}".encode()).digest()[:7])

    def _end_warm_up(self) -> None:
        self.report.warm_up_seconds = self.report.warm_up_seconds or time.monotonic() - self.started
