"""The engine in a thread of its own, and the event loop's side of it.

    event loop                         engine thread
    ----------                         -------------
    submit / abort  --- commands --->  between two steps: check, queue, abort
                                       from the queue into the engine: callers take turns
    Generation      <-- progress ----  after each step, one call into the loop for all requests

What is wrong with one request ends that request. An engine that cannot be trusted any more ends the process. Only the engine
thread touches the engine. The loop's side counts what it handed over, so that the queue is bounded without asking the other
side.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import torch

from fledge.engine.engine import Engine
from fledge.engine.request import Delta, Request, TokenLogprob
from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.serving.errors import ApiError, as_api_error, internal_error, overloaded
from fledge.serving.fair_queue import FairQueue
from fledge.serving.metrics import Metrics

log = logging.getLogger("fledge.serving")

# A step that fails takes its requests with it; after so many in a row the engine is not trusted any more.
MAX_FAILURES = 3

Span = tuple[str, bool]  # a piece of text, and whether the drafter had proposed it


@dataclass(frozen=True)
class Work:
    """One answer to produce."""

    prompt: list[int]
    params: SamplingParams
    speculate: bool = True
    learn: bool = True


@dataclass(frozen=True)
class Progress:
    """What a step added to one answer of a generation."""

    index: int
    spans: list[Span]
    tokens: list[int]
    logprobs: list[TokenLogprob]
    request: Request  # its figures; not to be changed, and complete only when finished
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.spans)


class Generation:
    """The answers to one call, as they come. Leaving it early aborts what is unfinished."""

    def __init__(self, owner: AsyncEngine, works: Sequence[Work], caller: str = "") -> None:
        self.owner, self.works, self.caller = owner, works, caller
        self.arrival = time.perf_counter()
        self.deadline: asyncio.TimerHandle | None = None
        self.events: asyncio.Queue[Progress | ApiError | None] = asyncio.Queue()
        self.unfinished = len(works)

    async def __aiter__(self) -> AsyncIterator[Progress]:
        unread = len(self.works)  # answers whose last piece is still to be read; the engine may be ahead of the reader
        while unread:
            event = await self.events.get()
            if isinstance(event, ApiError):
                raise event
            unread -= event.finish_reason is not None
            yield event

    def deliver(self, event: Progress | ApiError | None) -> None:
        """On the event loop: passes on what the engine thread reports."""
        if isinstance(event, ApiError):
            self.close()
        elif self.unfinished and event is not None and event.finish_reason is not None:
            self.unfinished -= 1
            self.owner.num_in_flight -= 1
            if not self.unfinished and self.deadline is not None:
                self.deadline.cancel()
        self.events.put_nowait(event)

    def close(self) -> None:
        """Frees what is still running, at once; harmless when all is done."""
        if self.deadline is not None:
            self.deadline.cancel()
        if self.unfinished:
            self.owner.num_in_flight -= self.unfinished
            self.unfinished = 0
            self.owner.commands.put(_Abort(self))


@dataclass
class _Tracked:
    """A running answer, on the engine thread's side."""

    generation: Generation
    index: int
    request: Request
    held: list[Span] = field(default_factory=list)  # text not passed on yet: it may begin a stop string
    num_sent: int = 0  # characters passed on
    num_logprobs: int = 0
    started: float | None = None  # when it left the queue
    last_token: float = 0.0

    def failure(self) -> UserError | None:
        """Why a logits processor cannot go on, as a grammar that takes too long."""
        failures = (getattr(processor, "failure", None) for processor in self.request.params.logits_processors)
        return next(filter(None, failures), None)

    def progress(self, delta: Delta) -> Progress:
        request = self.request
        held, self.held = [*self.held, *delta.spans], []
        ready = len(request.text) - request.held_back() - self.num_sent
        kept = len(request.text) - self.num_sent  # less than was held when a stop string was cut off
        spans: list[Span] = []
        for text, drafted in held:
            text = text[: max(kept, 0)]
            kept -= len(text)
            now, later = text[: max(ready, 0)], text[max(ready, 0) :]
            ready -= len(now)
            if now:
                spans.append((now, drafted))
            if later:
                self.held.append((later, drafted))
        self.num_sent += sum(len(text) for text, _ in spans)
        logprobs = request.logprobs[self.num_logprobs :]
        self.num_logprobs = len(request.logprobs)
        return Progress(self.index, spans, delta.tokens, logprobs, request, request.finish_reason)


@dataclass(frozen=True)
class _Add:
    generation: Generation


@dataclass(frozen=True)
class _Abort:
    generation: Generation


class _Stop:
    pass


def not_running() -> ApiError:
    return overloaded("the engine is not running; see the server's log", 60)


def shutting_down() -> ApiError:
    return overloaded("the server is shutting down; try again in a moment", 5)


class AsyncEngine:
    def __init__(self, build: Callable[[], Engine], metrics: Metrics, max_queue: int, request_timeout: float = 0.0) -> None:
        self.metrics, self.max_queue, self.request_timeout = metrics, max_queue, request_timeout
        self.state = "loading"  # loading | ready | failing | stopped; set by the engine thread
        self.failure: UserError | None = None  # why the process must end
        self.num_in_flight = 0  # answers handed over and not finished; the event loop's own count
        self.commands: queue.SimpleQueue = queue.SimpleQueue()
        self.engine: Engine | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.before_step: Callable[[], None] = lambda: None
        self.draining = False  # SIGTERM has come: what runs may finish
        self._build = build
        self._tracked: dict[str, _Tracked] = {}
        self._waiting: FairQueue[tuple[Generation, int]] = FairQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failures = 0
        metrics.num_queued = self._waiting.__len__

    # The event loop's side

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        self.commands.put(_Stop())
        if self.state != "loading":  # loading cannot be hurried, and ends with the process
            await asyncio.to_thread(self._thread.join)

    async def stop_after(self, seconds: float) -> None:
        """The limit of a graceful end: what runs longer is told so instead of being cut off."""
        await asyncio.sleep(seconds)
        self.commands.put(_Stop())

    @property
    def capacity(self) -> int:
        return (self.engine.config.max_num_seqs if self.engine is not None else 0) + self.max_queue

    def check_ready(self) -> Engine:
        if self.state == "loading":
            raise overloaded("the model is still loading; try again in a moment", 5)
        if self.state != "ready":
            raise not_running()
        return self.engine

    def check_capacity(self, num_answers: int) -> None:
        """Refuses what there is no room for, before anything is made for it."""
        self.check_ready()
        if num_answers > self.capacity:
            raise ApiError(
                f"the request asks for {num_answers} answers and the server takes {self.capacity} at once; ask for fewer"
            )
        if self.num_in_flight + num_answers > self.capacity:
            self.metrics.rejected.inc()
            raise overloaded(f"the server is busy with {self.num_in_flight} answers; try again later", self._retry_after())

    @property
    def is_accepting(self) -> bool:
        """Whether a request would be taken now."""
        return self.state == "ready" and not self.draining and self.num_in_flight < self.capacity

    async def submit(self, works: Sequence[Work], caller: str = "") -> Generation:
        """Hands the works to the engine and returns when it has taken them; refuses when the queue is full."""
        self.check_capacity(len(works))
        generation = Generation(self, works, caller)
        self.num_in_flight += len(works)
        self.commands.put(_Add(generation))
        if self.state == "stopped":  # else the engine thread will find it, at the latest when it stops
            generation.close()
            raise shutting_down()
        try:
            taken = await generation.events.get()
        except asyncio.CancelledError:
            generation.close()
            raise
        if isinstance(taken, ApiError):
            raise taken
        if self.request_timeout:
            late = ApiError(f"the answer took longer than {self.request_timeout:g} s", 504, code="timeout")
            generation.deadline = self._loop.call_later(self.request_timeout, generation.deliver, late)
        return generation

    def _retry_after(self) -> int:
        rounds = self.num_in_flight / max(1, self.capacity - self.max_queue)
        return max(1, min(60, round(rounds * self.metrics.mean_latency())))

    # The engine thread's side

    def _run(self) -> None:
        try:
            self.engine = self._build()
        except UserError as error:
            self._die(error)
        except BaseException:
            log.exception("the engine could not be built")
            self._die(UserError("the engine could not be built; the log above says why"))
        else:
            self.metrics.watch(self.engine)
            self.state = "ready"
            try:
                self._work()
            except BaseException:  # whatever it is, requests must not hang on a thread that has gone
                log.exception("the engine's thread failed")
                self._die(UserError("the engine failed; the log above says why"))
        while self.state != "stopped":
            match self.commands.get():
                case _Stop():
                    self.state = "stopped"
                case _Add(generation):
                    self._deliver([(generation, not_running())])
        while not self.commands.empty():
            command = self.commands.get()
            if isinstance(command, _Add):
                self._deliver([(command.generation, shutting_down())])

    def _work(self) -> None:
        while self.state == "ready":
            self._take_commands()
            self._admit()
            if self.engine.has_unfinished() and self.state == "ready":
                self._step()
        if self.state == "stopped":
            self._fail_all(shutting_down())

    def _die(self, reason: UserError) -> None:
        """The engine is not trusted any more: everyone is told, and the process is asked to end."""
        self.failure, self.state = reason, "failing"
        generations = {id(one.generation): one.generation for one in self._tracked.values()}
        generations |= {id(generation): generation for generation, _ in self._waiting.remove(lambda _: True)}
        self._tracked.clear()
        self._deliver([(generation, internal_error()) for generation in generations.values()])
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.on_failure)

    def _take_commands(self) -> None:
        """All that are waiting; when there is nothing else to do, waits for one."""
        block = not self.engine.has_unfinished() and not self._waiting
        while block and self.commands.empty() and self.engine.idle():
            pass
        while True:
            try:
                command = self.commands.get(block=block)
            except queue.Empty:
                return
            block = False
            match command:
                case _Stop():
                    self.state = "stopped"
                    return
                case _Add(generation):
                    self._add(generation)
                case _Abort(generation):
                    self._abort_all(generation)

    def _add(self, generation: Generation) -> None:
        """Into the queue, if all of its answers can be produced."""
        answer: ApiError | None = None
        try:
            # Answers to one prompt share all that is checked: a thousand of them must not hold up a step.
            alike = {(id(work.prompt), id(work.params.logit_bias), work.params.max_tokens): work for work in generation.works}
            for work in alike.values():
                self.engine.check_request(work.prompt, work.params)
        except UserError as error:
            answer = ApiError(str(error))
        except Exception:
            log.exception("a request could not be checked")
            answer = internal_error()
        else:
            for index in range(len(generation.works)):
                self._waiting.push(generation.caller, (generation, index))
        self._deliver([(generation, answer)])

    def _admit(self) -> None:
        """From the queue into the engine: as many as it decodes together, and a few for it to go on with."""
        together = self.engine.config.max_num_seqs
        while self._waiting and len(self._tracked) < together + max(1, together // 8):
            generation, index = self._waiting.pop()
            work = generation.works[index]
            try:
                request = self.engine.add_request(
                    work.prompt, work.params, speculate=work.speculate, learn=work.learn, client=generation.caller
                )
            except Exception as error:
                self._fail(generation, as_api_error(error))
                continue
            request.arrival = generation.arrival
            request.prompt = work.prompt  # one list for all answers to it
            self._tracked[request.id] = _Tracked(generation, index, request)

    def _abort(self, tracked: _Tracked) -> None:
        self.engine.abort(tracked.request)
        self._tracked.pop(tracked.request.id, None)
        self.metrics.finished(tracked.request, tracked.started)

    def _abort_all(self, generation: Generation) -> None:
        self._waiting.remove(lambda item: item[0] is generation)
        for tracked in [one for one in self._tracked.values() if one.generation is generation]:
            self._abort(tracked)

    def _fail(self, generation: Generation, error: ApiError) -> None:
        """Ends one call, with all its answers."""
        self._abort_all(generation)
        self._deliver([(generation, error)])

    def _step(self) -> None:
        begin = time.perf_counter()
        self.before_step()
        try:
            deltas = self.engine.step()
        except Exception as error:
            log.exception("an engine step failed")
            self._failures += 1
            is_dead = self._failures >= MAX_FAILURES or _is_device_error(error)
            if is_dead:
                self.state = "failing"  # before anyone is told, and asks
            self._fail_all(internal_error())
            if is_dead:
                self._die(UserError("the engine failed; the log above says why"))
            return None
        self._failures = 0
        now = time.perf_counter()
        for request in self.engine.scheduler.running:
            tracked = self._tracked.get(request.id)
            if tracked is not None and tracked.started is None:
                tracked.started = begin
        events, failed = [], {}
        for delta in deltas:
            tracked = self._tracked.get(delta.request.id)
            if tracked is None:  # of a request that was aborted while its step was under way
                continue
            tracked.started = tracked.started or begin
            self.metrics.progressed(delta, now - (tracked.last_token or delta.request.arrival), first=not tracked.last_token)
            tracked.last_token = now
            if (failure := tracked.failure()) is not None:
                failed[id(tracked.generation)] = (tracked.generation, ApiError(str(failure)))
            elif delta.request.failure is not None:
                log.error("a request failed in a step", exc_info=delta.request.failure)
                failed[id(tracked.generation)] = (tracked.generation, internal_error())
            else:
                events.append((tracked.generation, tracked.progress(delta)))
            if delta.finished:
                del self._tracked[delta.request.id]
                self.metrics.finished(delta.request, tracked.started)
        for generation, error in failed.values():
            self._fail(generation, error)
        return self._deliver([event for event in events if id(event[0]) not in failed])

    def _fail_all(self, error: ApiError) -> None:
        generations = {id(tracked.generation): tracked.generation for tracked in self._tracked.values()}
        generations |= {id(generation): generation for generation, _ in self._waiting.remove(lambda _: True)}
        for tracked in list(self._tracked.values()):
            self._abort(tracked)
        self._deliver([(generation, error) for generation in generations.values()])

    def _deliver(self, events: list[tuple[Generation, Progress | ApiError | None]]) -> None:
        def deliver() -> None:
            for generation, event in events:
                generation.deliver(event)

        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(deliver)


def _is_device_error(error: Exception) -> bool:
    """After one of these every further call on the device fails."""
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in str(error)
