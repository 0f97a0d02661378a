"""The answers to one HTTP request: takes their tokens from the engine and turns them into text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fledge.engine.request import TokenLogprob
from fledge.sampling import SamplingParams
from fledge.serving.errors import ApiError, as_api_error
from fledge.serving.messages import Finish, Output, Span
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import Tokenizer

if TYPE_CHECKING:
    from fledge.serving.async_engine import AsyncEngine


class Work(NamedTuple):
    """One answer to produce. Answers to one prompt share its list and its parameters."""

    prompt: list[int]
    params: SamplingParams
    seed: int | None = None


@dataclass(frozen=True)
class CallOptions:
    """Options that all answers of a call share, besides sampling parameters."""

    caller: str = ""
    speculate: bool = True
    learn: bool = True  # whether `--learn` may train on the call
    with_details: bool = False  # report with each step which tokens were drafted
    grammar: int | None = None  # the number that `AsyncEngine.compile` returned
    begin_mark: list[int] | None = None  # the grammar applies after these tokens; None: from the beginning


class Answer:
    """One answer: its figures, and the decoder that turns its tokens into text."""

    def __init__(self, index: int, work: Work, tokenizer: Tokenizer, arrival: float) -> None:
        self.index, self.prompt, self.params, self.arrival = index, work.prompt, work.params, arrival
        self.decoder = tokenizer.incremental_decoder(work.params.skip_special_tokens)
        self.num_tokens = 0
        self.num_cached: int | None = None  # prompt tokens found in the prefix cache
        self.stats = AcceptanceStats()
        self.first_token_time: float | None = None
        self.finish_time: float | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self, output: Output) -> Progress:
        finish = output.finish
        self.num_tokens += len(output.tokens)
        if output.num_cached is not None:
            self.num_cached = output.num_cached
        if output.progress is not None:
            self.stats.steps, self.stats.accepted = output.progress
        if finish is not None:
            self.stats = AcceptanceStats(*finish.stats)
            self.finish_reason, self.stop_reason = finish.reason, finish.stop_reason
            self.first_token_time, self.finish_time = finish.first_token_time, finish.finish_time
        if output.spans is not None:
            spans = output.spans
        elif output.drafted is not None:
            spans = self._spans(output.tokens, output.drafted, finish)
        else:
            text = self._text(output.tokens, finish)
            spans = [(text, False)] if text else []
        return Progress(self, spans, output.tokens, output.logprobs or [], self.finish_reason)

    def _text(self, tokens: list[int], finish: Finish | None) -> str:
        if finish is None:
            return self.decoder.feed(tokens)
        if finish.reason != "stop":
            return self.decoder.feed(tokens) + self.decoder.flush()
        if self.params.include_stop_str_in_output:
            return self.decoder.feed(tokens)
        return self.decoder.feed(tokens[:-1]) + self.decoder.flush()  # the last token is the one that ended the answer

    def _spans(self, tokens: list[int], drafted: list[bool], finish: Finish | None) -> list[Span]:
        """Decodes token by token, and returns the text of each with whether it was drafted."""
        last = len(tokens) - 1
        pieces = [self._text([token], finish if at == last else None) for at, token in enumerate(tokens)]
        return [(piece, from_draft) for piece, from_draft in zip(pieces, drafted, strict=True) if piece]


class Progress(NamedTuple):
    """The text and tokens that one or more steps added to an answer."""

    answer: Answer
    spans: list[Span]
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return self.spans[0][0] if len(self.spans) == 1 else "".join(text for text, _ in self.spans)


class Generation:
    """The answers of one call in progress. `close` aborts those that are unfinished."""

    def __init__(self, owner: AsyncEngine, number: int, works: Sequence[Work], tokenizer: Tokenizer, caller: str = "") -> None:
        self.owner, self.number, self.caller = owner, number, caller
        self.arrival = time.perf_counter()
        self.answers = [Answer(index, work, tokenizer, self.arrival) for index, work in enumerate(works)]
        self.unfinished = len(works)
        self.taken: asyncio.Future[None] = owner.event_loop.create_future()
        self.deadline: asyncio.TimerHandle | None = None
        self._push: Callable[[Progress], object] | None = None
        self._on_end: Callable[[Exception | None], None] = lambda _: None
        self._unread: list[Output] = []  # outputs that arrived before `attach`
        self._error: ApiError | None = None

    def attach(self, push: Callable[[Progress], object], on_end: Callable[[Exception | None], None]) -> None:
        """Calls `push` with each progress as it arrives, then `on_end` with the error, or None if all answers are complete."""
        if self._error is not None:
            return on_end(self._error)
        self._push, self._on_end = push, on_end
        return self.deliver(())

    async def consume(self, push: Callable[[Progress], object]) -> None:
        """Calls `push` with each progress, and returns when all answers are complete. Raises the error if there is one."""
        done: asyncio.Future[None] = self.owner.event_loop.create_future()

        def on_end(error: Exception | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        self.attach(push, on_end)
        await done

    def deliver(self, outputs: Sequence[Output]) -> None:
        """Hot path: runs for every request of every step. `outputs`: outputs of this generation, one or more per answer."""
        self._unread += outputs
        if self._push is None or not self.unfinished:
            return
        outputs, self._unread = self._unread, []
        try:
            for output in outputs if len(outputs) < 2 else _merged(outputs):
                self._push(self.answers[output.index].take(output))
                if output.finish is not None:
                    self._finish_one()
        except Exception as error:
            self.fail(as_api_error(error))

    def _finish_one(self) -> None:
        self.unfinished -= 1
        self.owner.num_in_flight -= 1
        if self.unfinished:
            return
        if self.deadline is not None:
            self.deadline.cancel()
        self.owner.forget(self)
        self._on_end(None)

    def fail(self, error: ApiError, tell_engine: bool = True) -> None:
        if not self.unfinished:
            return
        self.close(tell_engine)
        self._error = error
        if not self.taken.done():
            self.taken.set_exception(error)
        self._on_end(error)

    def close(self, tell_engine: bool = True) -> None:
        """Aborts unfinished answers at once and delivers nothing more. Has no effect if all answers are complete."""
        if self.deadline is not None:
            self.deadline.cancel()
        if self.unfinished:
            self.owner.num_in_flight -= self.unfinished
            self.unfinished = 0
            self.owner.forget(self, abort=tell_engine)


def _merged(outputs: Sequence[Output]) -> list[Output]:
    """Merges the outputs of each answer into one, so that an HTTP process that is behind catches up with fewer writes."""
    by_index: dict[int, Output] = {}
    for output in outputs:
        before = by_index.get(output.index)
        if before is None:
            by_index[output.index] = output
            continue
        before.tokens += output.tokens
        before.finish = output.finish
        before.progress = output.progress
        for name in ("spans", "logprobs", "drafted"):
            if getattr(output, name) is not None:
                setattr(before, name, [*(getattr(before, name) or ()), *getattr(output, name)])
    return list(by_index.values())
