"""The engine as the event loop sees it: calls go out, tokens come in, over a socket.

An HTTP process counts what it handed over, so that the queue is bounded without asking the other side. Streams are written
from `_receive` itself: no task is woken for a token.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fledge.errors import UserError
from fledge.serving.channel import Channel
from fledge.serving.engine_host import EngineHost
from fledge.serving.errors import ApiError, internal_error, overloaded
from fledge.serving.fair_queue import room_for
from fledge.serving.generation import CallOptions, Generation, Work
from fledge.serving.messages import (
    Abort,
    Add,
    Answer,
    AskFigures,
    Compile,
    Compiled,
    Failed,
    Figures,
    Forget,
    Observe,
    Open,
    Output,
    Prepared,
    Ready,
    Refused,
    Step,
    Taken,
    ToApiServer,
    as_error,
    pack_params,
)
from fledge.tokenizer import Tokenizer

log = logging.getLogger("fledge.serving")

# How often the event loop is looked at, and how often what was seen is reported.
LAG_SECONDS, REPORT_SECONDS = 0.1, 1.0
JOIN_SECONDS = 10.0


async def _nothing() -> None:
    pass


def not_running() -> ApiError:
    return overloaded("the engine is not running; see the server's log", 60)


def shutting_down() -> ApiError:
    return overloaded("the server is shutting down; try again in a moment", 5)


class AsyncEngine:
    """`host`: runs the engine; None in an HTTP process that another one has started. `prepare` is called in a thread when the
    engine is ready, and gives the tokenizer."""

    def __init__(
        self,
        channel: Channel[ToApiServer],
        host: EngineHost | None,
        prepare: Callable[[Ready], Tokenizer],
        max_queue: int,
        request_timeout: float = 0.0,
    ) -> None:
        self.channel, self.host, self.max_queue, self.request_timeout = channel, host, max_queue, request_timeout
        self.state = "loading"  # loading | ready | failing | stopped
        self.is_open = False  # the other HTTP processes are ready too
        self.failure: UserError | None = None  # why the process must end
        self.info: Ready | None = None
        self.tokenizer: Tokenizer | None = None
        self.num_in_flight = 0  # answers handed over and not finished
        self.others_in_flight = 0  # those of other HTTP processes, when the engine last said
        self.draining = False  # SIGTERM has come: what runs may finish
        self.on_failure: Callable[[], None] = lambda: None
        self.before_stop: Callable[[], Awaitable[None]] = _nothing  # other HTTP processes need the engine until they have ended
        self.event_loop: asyncio.AbstractEventLoop
        self._prepare = prepare
        self._generations: dict[int, Generation] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # for grammars and figures
        self._numbers = itertools.count(1)
        self._latency = [0.0, 0]  # seconds and number of calls
        self._num_rejected = 0
        self._is_writing = False
        self._ending: asyncio.Task[None] | None = None  # looks for the reason of the engine's end

    def start(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        if self.host is not None:
            self.host.start()
        self.event_loop.add_reader(self.channel.fileno(), self._receive)

    async def stop(self) -> None:
        """Tells whoever waits, and hangs up: an engine whose first HTTP process has gone ends."""
        if self.state != "stopped":
            await self.before_stop()
            was_loading = self.state == "loading"
            self.state = "stopped"
            self._fail_all(shutting_down())
            self._close()
            if self._ending is not None:
                await self._ending
            if self.host is not None and not was_loading:  # loading cannot be hurried, and ends with the process
                await asyncio.to_thread(self.host.join, JOIN_SECONDS)

    async def stop_after(self, seconds: float) -> None:
        """The limit of a graceful end: what runs longer is told so instead of being cut off."""
        await asyncio.sleep(seconds)
        self.state = "stopping"
        self._fail_all(shutting_down())

    def _close(self) -> None:
        if self.channel.fileno() >= 0:
            self.event_loop.remove_reader(self.channel.fileno())
            self.event_loop.remove_writer(self.channel.fileno())
            self.channel.close()

    # Room

    @property
    def capacity(self) -> int:
        return (self.info.max_num_seqs if self.info is not None else 0) + self.max_queue

    def check_ready(self) -> Ready:
        if self.state == "loading":
            raise overloaded("the model is still loading; try again in a moment", 5)
        if self.state in ("stopping", "stopped"):
            raise shutting_down()
        if self.state != "ready" or self.info is None:
            raise not_running()
        return self.info

    def check_capacity(self, num_answers: int, caller: str = "") -> None:
        """Refuses what there is no room for, before anything is made for it."""
        info = self.check_ready()
        if num_answers > self.capacity:
            raise ApiError(
                f"the request asks for {num_answers} answers and the server takes {self.capacity} at once; ask for fewer"
            )
        in_flight = self.num_in_flight + self.others_in_flight
        held = sum(one.unfinished for one in self._generations.values() if one.caller == caller)
        if in_flight + num_answers > room_for(num_answers, held, info.max_num_seqs, self.max_queue):
            self.count_rejected()
            raise overloaded(f"the server is busy with {in_flight} answers; try again later", self._retry_after())

    def count_rejected(self) -> None:
        """A request was turned away because a queue is full: for /metrics."""
        self._num_rejected += 1

    @property
    def status(self) -> str:
        """The server's state: it is loading until every HTTP process takes requests, as the next one may reach any of them."""
        return "loading" if self.state == "ready" and not self.is_open else self.state

    @property
    def is_accepting(self) -> bool:
        """Whether a request would be taken now."""
        in_flight = self.num_in_flight + self.others_in_flight
        return self.status == "ready" and not self.draining and in_flight < self.capacity

    def _retry_after(self) -> int:
        rounds = (self.num_in_flight + self.others_in_flight) / max(1, self.capacity - self.max_queue)
        mean = self._latency[0] / self._latency[1] if self._latency[1] else 1.0
        return max(1, min(60, round(rounds * mean)))

    # Calls

    async def submit(
        self,
        works: Sequence[Work],
        options: CallOptions = CallOptions(),  # noqa: B008 - frozen
        deadline: float | None = None,
    ) -> Generation:
        """Hands the works to the engine and returns when it has taken them; refuses when the queue is full.

        `deadline`: when it fails if it is not complete, by the event loop's clock.
        """
        try:
            self.check_capacity(len(works), options.caller)
        except ApiError:
            if options.grammar is not None:
                self.release(options.grammar)
            raise
        assert self.tokenizer is not None
        generation = Generation(self, next(self._numbers), works, self.tokenizer, options.caller)
        self._generations[generation.number] = generation
        self.num_in_flight += len(works)
        if deadline is not None:
            generation.deadline = self.event_loop.call_at(deadline, generation.fail, self.late())
        try:
            self._send(_add(generation, works, options))
            await generation.taken
        except BaseException:
            generation.close()
            raise
        return generation

    def new_deadline(self) -> float | None:
        """Of a request that comes now, by the event loop's clock."""
        return self.event_loop.time() + self.request_timeout if self.request_timeout else None

    def late(self) -> ApiError:
        return ApiError(f"the answer took longer than {self.request_timeout:g} s", 504, code="timeout")

    def forget(self, generation: Generation, abort: bool = False) -> None:
        """It is complete, or it was cancelled."""
        if self._generations.pop(generation.number, None) is None:
            return
        if abort:
            self._send(Abort(generation.number))
        else:
            self._latency[0] += time.perf_counter() - generation.arrival
            self._latency[1] += 1

    async def compile(self, kind: str, value: str | list[str] | None, caller: str) -> int:
        """A grammar's number, for one call; `release` it if that call is not made."""
        self.check_ready()
        number = next(self._numbers)
        try:
            await self._answer(Compile(number, caller, kind, value), number)
        except asyncio.CancelledError:  # the caller has gone, or it took too long
            self.release(number)
            raise
        return number

    def release(self, grammar: int) -> None:
        self._send(Forget(grammar))

    async def figures(self, of_learning: bool = False) -> bytes:
        """For /metrics, or for /learning; empty: the server does not learn."""
        number = next(self._numbers)
        return await self._answer(AskFigures(number, of_learning), number)

    async def _answer(self, message: object, number: int) -> Any:
        self._waiting[number] = self.event_loop.create_future()
        try:
            self._send(message)
            return await self._waiting[number]
        finally:
            del self._waiting[number]

    def cancel_waiting(self) -> None:
        """Those that wait for a grammar are told that there will be none."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(shutting_down())

    async def watch_event_loop(self) -> None:
        """Measures how long the event loop is kept busy by one thing: every stream waits as long."""
        loop, lags = self.event_loop, []
        while True:
            due = loop.time() + LAG_SECONDS
            await asyncio.sleep(LAG_SECONDS)
            lags.append(max(0.0, loop.time() - due))
            if len(lags) * LAG_SECONDS >= REPORT_SECONDS and self.info is not None:
                self._send(Observe(lags, self._num_rejected))
                lags, self._num_rejected = [], 0

    # Messages

    def _send(self, message: object) -> None:
        if self.channel.is_closed:
            return
        self.channel.send(message)
        self._watch_writing()

    def _watch_writing(self) -> None:
        if self.channel.has_unsent and not self._is_writing:
            self._is_writing = True
            self.event_loop.add_writer(self.channel.fileno(), self._flush)

    def _flush(self) -> None:
        self.channel.flush()
        if not self.channel.has_unsent and self._is_writing:
            self._is_writing = False
            self.event_loop.remove_writer(self.channel.fileno())

    def _receive(self) -> None:
        """Hot path: runs after every step. What came in several messages meanwhile is passed on together."""
        messages = self.channel.receive()
        steps = [message for message in messages if type(message) is Step]
        by_call: dict[int, list[Output]] = {}
        for step in steps:
            for output in step.outputs:
                if (before := by_call.get(output.id)) is None:
                    by_call[output.id] = [output]
                else:
                    before.append(output)
        if steps:
            self.others_in_flight = steps[-1].others_in_flight
        if len(steps) < len(messages):
            for message in messages:
                if type(message) is not Step:
                    # What a call was sent before it failed has been dropped with it; what comes after is dropped.
                    self._take(message)
        for number, outputs in by_call.items():
            if (generation := self._generations.get(number)) is not None:
                generation.deliver(outputs)
        if self.channel.is_closed:
            self._close()
            if self.failure is None and self.state != "stopped":
                self.state = "failing"
                self._fail_all(not_running())
                self._ending = self.event_loop.create_task(self._end_with_reason())

    async def _end_with_reason(self) -> None:
        """In a thread: a process may take seconds to end, and its callers are told meanwhile."""
        reason = await asyncio.to_thread(self.host.why_ended) if self.host is not None else "the engine has gone"
        self._die(UserError(reason), not_running())

    def _take(self, message: ToApiServer) -> None:
        match message:
            case Ready():
                self.info = message
                self.event_loop.create_task(self._get_ready(message))
            case Open():
                self.is_open = True
            case Failed(reason):
                self._die(UserError(reason), internal_error())
            case Taken(number):
                if (generation := self._generations.get(number)) is not None and not generation.taken.done():
                    generation.taken.set_result(None)
            case Refused():
                if (generation := self._generations.get(message.id)) is not None:
                    generation.fail(as_error(message), tell_engine=False)
                elif (future := self._waiting.get(message.id)) is not None and not future.done():
                    future.set_exception(as_error(message))
            case Compiled(number) | Figures(number):
                if (future := self._waiting.get(number)) is not None and not future.done():
                    future.set_result(message.text if isinstance(message, Figures) else None)

    async def _get_ready(self, info: Ready) -> None:
        try:
            self.tokenizer = await asyncio.to_thread(self._prepare, info)
        except UserError as error:
            self._die(error, not_running())
        except Exception:
            log.exception("the tokenizer could not be loaded")
            self._die(UserError("the tokenizer could not be loaded; the log above says why"), not_running())
        else:
            if self.state == "loading":
                self.state = "ready"
                self._send(Prepared())

    def fail(self, reason: str) -> None:
        """For what else must not go on without."""
        if self._ending is None:  # else it is a consequence: the reason is on its way
            self._die(UserError(reason), not_running())

    def _die(self, reason: UserError, error: ApiError) -> None:
        """Nothing can be answered any more: everyone is told, and the process is asked to end."""
        if self.failure is None:
            self.failure, self.state = reason, "failing"
            self._fail_all(error)
            self.on_failure()

    def _fail_all(self, error: ApiError) -> None:
        for generation in list(self._generations.values()):
            generation.fail(error)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)


def _add(generation: Generation, works: Sequence[Work], options: CallOptions) -> Add:
    """Prompts and parameters that answers share go once."""
    prompts = {id(work.prompt): work.prompt for work in works}
    params = {id(work.params): work.params for work in works}
    prompt_place = {key: place for place, key in enumerate(prompts)}
    params_place = {key: place for place, key in enumerate(params)}
    return Add(
        generation.number,
        options.caller,
        generation.arrival,
        list(prompts.values()),
        [pack_params(one) for one in params.values()],
        [Answer(prompt_place[id(work.prompt)], params_place[id(work.params)], work.seed) for work in works],
        options.speculate,
        options.learn,
        options.with_details,
        options.grammar,
        options.begin_mark,
    )
