"""The engine's client in an HTTP process: sends calls to the engine over a socket and receives their tokens.

An HTTP process counts the answers it has submitted, so it can bound the queue without asking the engine. Streams are written
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

# How often the event loop's lag is measured, and how often the measurements are sent to the engine.
LAG_SECONDS, REPORT_SECONDS = 0.1, 1.0
JOIN_SECONDS = 10.0


async def _nothing() -> None:
    pass


def not_running() -> ApiError:
    return overloaded("the engine is not running; see the server's log", 60)


def shutting_down() -> ApiError:
    return overloaded("the server is shutting down; try again in a moment", 5)


class AsyncEngine:
    """The connection of one HTTP process to the engine. `host`: runs the engine; None in an HTTP process that another one has
    started. `prepare` is called in a thread when the engine is ready, and returns the tokenizer."""

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
        self.is_open = False  # every HTTP process accepts requests
        self.failure: UserError | None = None  # why the process has to exit
        self.info: Ready | None = None
        self.tokenizer: Tokenizer | None = None
        self.num_in_flight = 0  # answers submitted and not finished
        self.others_in_flight = 0  # the same in other HTTP processes, as the engine last reported
        self.draining = False  # SIGTERM was received: running requests may finish
        self.on_failure: Callable[[], None] = lambda: None
        self.before_stop: Callable[[], Awaitable[None]] = _nothing  # waits for other HTTP processes, which need the engine
        self.event_loop: asyncio.AbstractEventLoop
        self._prepare = prepare
        self._generations: dict[int, Generation] = {}
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # for compiled grammars and figures, by message id
        self._numbers = itertools.count(1)
        self._latency = [0.0, 0]  # summed seconds, and number of finished calls
        self._num_rejected = 0
        self._is_writing = False
        self._ending: asyncio.Task[None] | None = None  # finds out why the engine ended

    def start(self) -> None:
        self.event_loop = asyncio.get_running_loop()
        if self.host is not None:
            self.host.start()
        self.event_loop.add_reader(self.channel.fileno(), self._receive)

    async def stop(self) -> None:
        """Fails all waiting calls and closes the connection. The engine exits when the main HTTP process disconnects."""
        if self.state != "stopped":
            await self.before_stop()
            was_loading = self.state == "loading"
            self.state = "stopped"
            self._fail_all(shutting_down())
            self._close()
            if self._ending is not None:
                await self._ending
            if self.host is not None and not was_loading:  # loading cannot be interrupted; it ends with the process
                await asyncio.to_thread(self.host.join, JOIN_SECONDS)

    async def stop_after(self, seconds: float) -> None:
        """Limits a graceful shutdown: requests that still run after `seconds` get an error instead of a closed connection."""
        await asyncio.sleep(seconds)
        self.state = "stopping"
        self._fail_all(shutting_down())

    def _close(self) -> None:
        if self.channel.fileno() >= 0:
            self.event_loop.remove_reader(self.channel.fileno())
            self.event_loop.remove_writer(self.channel.fileno())
            self.channel.close()

    # Capacity

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
        """Raises ApiError if the queue has no room for the answers, before any work is done for them."""
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
        """Counts a request that was refused because a queue is full, for /metrics."""
        self._num_rejected += 1

    @property
    def status(self) -> str:
        """The server's state: "loading" until every HTTP process accepts requests, as a request may reach any of them."""
        return "loading" if self.state == "ready" and not self.is_open else self.state

    @property
    def is_accepting(self) -> bool:
        """Whether a request would be accepted now."""
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
        """Sends the answers to produce to the engine and returns when it has accepted them. ApiError: the queue is full.

        `deadline`: the time on the event loop's clock at which an incomplete generation fails.
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
        """Returns the deadline of a request that arrives now, on the event loop's clock; None: no limit."""
        return self.event_loop.time() + self.request_timeout if self.request_timeout else None

    def late(self) -> ApiError:
        return ApiError(f"the answer took longer than {self.request_timeout:g} s", 504, code="timeout")

    def forget(self, generation: Generation, abort: bool = False) -> None:
        """Drops a generation that is complete or, with `abort`, was cancelled."""
        if self._generations.pop(generation.number, None) is None:
            return
        if abort:
            self._send(Abort(generation.number))
        else:
            self._latency[0] += time.perf_counter() - generation.arrival
            self._latency[1] += 1

    async def compile(self, kind: str, value: str | list[str] | None, caller: str) -> int:
        """Compiles a grammar and returns its number, which is valid for one call; `release` it if that call is not made."""
        self.check_ready()
        number = next(self._numbers)
        try:
            await self._answer(Compile(number, caller, kind, value), number)
        except asyncio.CancelledError:  # the client disconnected, or the request timed out
            self.release(number)
            raise
        return number

    def release(self, grammar: int) -> None:
        self._send(Forget(grammar))

    async def figures(self, of_learning: bool = False) -> bytes:
        """Returns the body of /metrics, or with `of_learning` of /learning; empty: the server does not learn."""
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
        """Fails the requests that wait for a grammar or for figures."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(shutting_down())

    async def watch_event_loop(self) -> None:
        """Measures how late the event loop runs a timer: all streams stall for that long."""
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
        """Hot path: runs after every step. Delivers the outputs of all messages that have arrived, grouped by call."""
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
                    # If this message fails a call, the call's outputs in `by_call` are dropped below: its generation is gone.
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
        """Finds out why the engine ended. In a thread: its process may take seconds to exit."""
        reason = await asyncio.to_thread(self.host.why_ended) if self.host is not None else "the engine has gone"
        self._shut_down(UserError(reason), not_running())

    def _take(self, message: ToApiServer) -> None:
        match message:
            case Ready():
                self.info = message
                self.event_loop.create_task(self._get_ready(message))
            case Open():
                self.is_open = True
            case Failed(reason):
                self._shut_down(UserError(reason), internal_error())
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
            self._shut_down(error, not_running())
        except Exception:
            log.exception("the tokenizer could not be loaded")
            self._shut_down(UserError("the tokenizer could not be loaded; the log above says why"), not_running())
        else:
            if self.state == "loading":
                self.state = "ready"
                self._send(Prepared())

    def fail(self, reason: str) -> None:
        """Shuts the server down because a part that it needs has ended, such as another HTTP process."""
        if self._ending is None:  # else the engine has ended, which caused this; `_end_with_reason` reports why
            self._shut_down(UserError(reason), not_running())

    def _shut_down(self, reason: UserError, error: ApiError) -> None:
        """Fails all calls and starts the shutdown of this process. `reason`: for the log; `error`: for clients."""
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
    """Builds the message of a call; prompts and parameters that answers share are sent once."""
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
