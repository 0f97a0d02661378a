"""The engine loop: takes calls from one or more HTTP processes, steps the engine, and sends each process its new tokens.

    HTTP processes   Add, Abort  --->  between two steps: check, queue, abort
                                       from the queue into the engine: round-robin over clients
                     Step        <---  after each step, one message to each process that has tokens in it

It runs in a process of its own, or in a thread of the only HTTP process. It never blocks on an HTTP process. An error in one
call ends that call alone. An engine failure ends the loop, and every HTTP process gets the reason.
"""

from __future__ import annotations

import json
import logging
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from fledge.engine.engine import Engine
from fledge.engine.request import Delta
from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.serving.engine_calls import ApiServer, Call, Tracked
from fledge.serving.errors import ApiError, as_api_error, internal_error, overloaded
from fledge.serving.fair_queue import FairQueue, room_for
from fledge.serving.flags import ServeFlags
from fledge.serving.grammar_jobs import GrammarJobs
from fledge.serving.messages import (
    Abort,
    Add,
    AskFigures,
    Compile,
    Compiled,
    Failed,
    Figures,
    Forget,
    Observe,
    Open,
    Prepared,
    Ready,
    Step,
    Taken,
    ToEngine,
    refusal,
)
from fledge.serving.metrics import Metrics

if TYPE_CHECKING:
    from fledge.serving.structured import Grammar

log = logging.getLogger("fledge.serving")

# A failed step fails its requests; after this many failed steps in a row the engine stops.
MAX_FAILURES = 3
# Seconds without requests before the engine captures CUDA graphs, during which a new request would wait 0.1 s. Requests come in
# bursts: with 16 users, capturing a graph in the pause between two bursts cost 13 % of the second burst's tokens/s.
QUIET_SECONDS = 2.0
LONGEST_WAIT = 3600.0  # seconds to wait for the hook's next work: poll() takes at most 2^31 ms
# Time to send the reason of a failure to the HTTP processes before the engine exits.
SEND_FAILURE_SECONDS = 2.0


class EngineLoop:
    """Runs the engine for all HTTP processes. `connections`: one each; when that of the main one closes, the loop ends."""

    def __init__(
        self,
        flags: ServeFlags,
        connections: Sequence[socket.socket],
        build: Callable[[ServeFlags, Metrics], tuple[Engine, dict]],
    ) -> None:
        self.flags, self._build = flags, build
        self.metrics = Metrics(flags.names[0])
        self._engine: Engine | None = None  # None until it is built
        self.failure: UserError | None = None
        self.api_servers = [ApiServer(connection) for connection in connections]
        self._grammar_jobs: GrammarJobs | None = None
        self._main = self.api_servers[0]
        self._waiting: FairQueue[tuple[Call, int]] = FairQueue()
        self._busy_until: float  # set when the engine starts
        self._tracked: dict[str, Tracked] = {}
        self._unstarted: dict[str, Tracked] = {}
        self._calls: dict[tuple[ApiServer, int], Call] = {}
        self._grammars: dict[tuple[ApiServer, int], Grammar] = {}
        self._failures = 0
        self._wake, self._woken = socket.socketpair()  # threads that compile grammars wake the loop
        self._poll = select.poll()
        self._by_descriptor = {api_server.fileno(): api_server for api_server in self.api_servers}
        for descriptor in (*self._by_descriptor, self._woken.fileno()):
            self._poll.register(descriptor, select.POLLIN)
        self.metrics.num_queued = self._waiting.__len__

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "it is not built yet"
        return self._engine

    @property
    def grammars(self) -> GrammarJobs:
        assert self._grammar_jobs is not None, "the engine is not built yet"
        return self._grammar_jobs

    @property
    def has_masks_left(self) -> bool:
        """Whether a thread still computes a grammar mask that timed out."""
        return self._grammar_jobs is not None and self._grammar_jobs.is_busy

    def run(self) -> UserError | None:
        """Runs until the main HTTP process disconnects. Returns the error if the engine failed before that."""
        try:
            self._start()
            while not self._main.is_closed:
                self._take_messages()
                self._admit()
                if self.engine.has_unfinished():
                    self._step()
                if len(self.api_servers) > 1:
                    self._report_in_flight()
                if not self.flags.disable_log_stats:
                    self.metrics.log_when_due(self.flags.log_interval)
        except UserError as error:
            self.failure = error
        except BaseException:  # any error: no request may wait for a loop that has ended
            log.exception("the engine failed")
            self.failure = UserError("the engine failed; the log above says why")
        if self.failure is not None:
            self._send_failure(Failed(str(self.failure)))
        if self._grammar_jobs is not None:
            self._grammar_jobs.close()
        for api_server in self.api_servers:
            api_server.close()
        if self._engine is not None and self._engine.hook is not None:
            self._engine.hook.close()
        return self.failure

    def _start(self) -> None:
        try:
            engine, defaults = self._build(self.flags, self.metrics)
        except UserError:
            raise
        except BaseException:
            log.exception("the engine could not be built")
            raise UserError("the engine could not be built; the log above says why") from None
        assert engine.tokenizer is not None, "a server's engine has a tokenizer"
        self._engine = engine
        self.metrics.engine = engine
        self._grammar_jobs = GrammarJobs(engine, self.flags.limits, self.flags.max_queue, lambda: self._wake.send(b"w"))
        ready = Ready(
            vocab_size=engine.model.vocab_size,
            eos_token_ids=list(engine.model.eos_token_ids),
            max_model_len=engine.config.max_model_len,
            max_num_seqs=engine.config.max_num_seqs,
            drafter=engine.drafter.description if engine.drafter is not None else None,
            tokenizer=str(engine.tokenizer.path),
            defaults=defaults,
        )
        for api_server in self.api_servers:
            api_server.send(ready)
        self._busy_until = time.monotonic()

    def _send_failure(self, message: Failed) -> None:
        for api_server in self.api_servers:
            api_server.send(message)
        deadline = time.monotonic() + SEND_FAILURE_SECONDS
        while any(api_server.has_unsent for api_server in self.api_servers) and time.monotonic() < deadline:
            time.sleep(0.01)
            for api_server in self.api_servers:
                api_server.flush()

    # Messages

    def _take_messages(self) -> None:
        """Handles all messages that have arrived. Without any work, lets the engine do idle work, or waits for a message."""
        ready = self._poll.poll(0)
        now = time.monotonic()
        if self.engine.has_unfinished() or self._waiting:
            self._busy_until = now
        elif not ready and not self.engine.idle(is_quiet=now >= self._busy_until + QUIET_SECONDS):
            has_activity = self.metrics.has_activity()
            ready = self._poll.poll(self._poll_timeout(now, has_activity))
            if not has_activity:
                self.metrics.resume()
        for descriptor, events in ready:
            if descriptor == self._woken.fileno():
                self._woken.recv(4096)
                self._take_grammars()
                continue
            api_server = self._by_descriptor[descriptor]
            if events & select.POLLOUT:
                api_server.flush()
            if events & ~select.POLLOUT:
                for message in api_server.receive():
                    self._take(api_server, message)
            self._watch(api_server)

    def _poll_timeout(self, now: float, has_activity: bool) -> float | None:
        """Returns the milliseconds until quiet time begins, the hook has work or a log line is due; None: wait for ever."""
        if now < self._busy_until + QUIET_SECONDS:
            return 1000 * (self._busy_until + QUIET_SECONDS - now)
        hook = self.engine.hook
        waits = [self.flags.log_interval] if has_activity and not self.flags.disable_log_stats else []
        if hook is not None and (due := hook.due_in()) is not None:
            waits.append(min(due, LONGEST_WAIT))
        return 1000 * min(waits) if waits else None

    def _watch(self, api_server: ApiServer) -> None:
        """Polls for writing while data for the HTTP process is unsent. Removes a disconnected process and its calls."""
        if api_server.is_closed:
            if self._by_descriptor.pop(api_server.fileno(), None) is not None:
                self._poll.unregister(api_server.fileno())
                self.api_servers.remove(api_server)
                for call in [call for (owner, _), call in self._calls.items() if owner is api_server]:
                    self._abort(call)
                for key in [key for key in self._grammars if key[0] is api_server]:
                    del self._grammars[key]
            return
        self._poll.modify(api_server.fileno(), select.POLLIN | select.POLLOUT if api_server.has_unsent else select.POLLIN)

    def _send(self, api_server: ApiServer, message: object) -> None:
        if api_server.is_closed:
            return
        api_server.send(message)
        if api_server.has_unsent or api_server.is_closed:
            self._watch(api_server)

    def _take(self, api_server: ApiServer, message: ToEngine) -> None:
        match message:
            case Add():
                self._add(api_server, message)
            case Abort(call):
                if (found := self._calls.get((api_server, call))) is not None:
                    self._abort(found)
            case Compile():
                try:
                    self.grammars.start((api_server, message.id), message)
                except ApiError as error:
                    self.metrics.observed([], 1)
                    self._send(api_server, refusal(message.id, error))
            case Forget(number):
                self.grammars.forget((api_server, number))
                self._grammars.pop((api_server, number), None)
            case Observe(lags, rejected):
                self.metrics.observed(lags, rejected)
            case AskFigures(number, of_learning):
                self._send(api_server, Figures(number, self._learning_history() if of_learning else self.metrics.render()))
            case Prepared():
                api_server.is_prepared = True
                if all(other.is_prepared for other in self.api_servers):
                    for other in list(self.api_servers):
                        self._send(other, Open())

    def _learning_history(self) -> bytes:
        hook = self.engine.hook
        return b"" if hook is None else json.dumps(hook.history()).encode()

    def _take_grammars(self) -> None:
        for (api_server, number), result in self.grammars.finished():
            if isinstance(result, ApiError):
                self._send(api_server, refusal(number, result))
            elif not api_server.is_closed:
                self._grammars[api_server, number] = result
                self._send(api_server, Compiled(number))

    # Calls

    def _add(self, api_server: ApiServer, message: Add) -> None:
        """Queues the answers of a call, or refuses the call if any of them cannot be produced."""
        grammar = self._grammars.pop((api_server, message.grammar), None) if message.grammar is not None else None
        try:
            self._check_capacity(len(message.answers), message.caller)
            assert message.grammar is None or grammar is not None
            # Each prompt is checked once, not for each of its answers: a thousand answers must not delay a step.
            params = [SamplingParams(**one) for one in message.params]
            for prompt, one in {(answer.prompt, answer.params) for answer in message.answers}:
                self.engine.check_request(message.prompts[prompt], params[one])
        except Exception as error:
            return self._send(api_server, refusal(message.id, as_api_error(error)))
        call = Call(api_server, message, params, grammar, len(message.answers))
        self._calls[api_server, message.id] = call
        api_server.num_in_flight += len(message.answers)
        for index in range(len(message.answers)):
            self._waiting.push(message.caller, (call, index))
        return self._send(api_server, Taken(message.id))

    def _check_capacity(self, num_answers: int, caller: str) -> None:
        """Raises ApiError if the queue is full. HTTP processes check too, but each may fill the last place at the same time."""
        in_flight = sum(api_server.num_in_flight for api_server in self.api_servers)
        held = sum(call.num_unfinished for call in self._calls.values() if call.message.caller == caller)
        if in_flight + num_answers > room_for(num_answers, held, self.engine.config.max_num_seqs, self.flags.max_queue):
            self.metrics.observed([], 1)
            raise overloaded(f"the server is busy with {in_flight} answers; try again later", 1)

    def _admit(self) -> None:
        """Moves answers from the queue into the engine: as many as it decodes together, and an eighth more to be ready next."""
        together = self.engine.config.max_num_seqs
        while self._waiting and len(self._tracked) < together + max(1, together // 8):
            call, index = self._waiting.pop()
            message, answer = call.message, call.message.answers[index]
            prompt = message.prompts[answer.prompt]
            try:
                processors = []
                if call.grammar is not None:
                    # A call's answers leave the queue in order, so only index 0 starts a new call.
                    processors = [self.grammars.processor(call.grammar, message.begin_mark, message.caller, is_new=index == 0)]
                params = call.params[answer.params].for_answer(answer.seed, processors)
                request = self.engine.add_request(
                    prompt, params, speculate=message.speculate, learn=message.learn, client=message.caller, with_text=False
                )
            except Exception as error:
                self._fail(call, as_api_error(error))
                continue
            request.arrival = message.arrival
            request.prompt = prompt  # one list for all answers to the prompt
            self._tracked[request.id] = self._unstarted[request.id] = Tracked(call, index, request)

    def _finished(self, tracked: Tracked) -> None:
        call = tracked.call
        self._tracked.pop(tracked.request.id, None)
        self._unstarted.pop(tracked.request.id, None)
        self.metrics.finished(tracked.request, tracked.started)
        call.num_unfinished -= 1
        call.api_server.num_in_flight -= 1
        if not call.num_unfinished:
            self._calls.pop((call.api_server, call.message.id), None)

    def _abort(self, call: Call) -> None:
        self._calls.pop((call.api_server, call.message.id), None)
        self._waiting.remove(lambda item: item[0] is call)
        for tracked in [one for one in self._tracked.values() if one.call is call]:
            self.engine.abort(tracked.request)
            self._finished(tracked)
        # Answers that were still queued, and one whose admission failed: it is neither in the queue nor tracked.
        call.api_server.num_in_flight -= call.num_unfinished
        call.num_unfinished = 0

    def _fail(self, call: Call, error: ApiError) -> None:
        """Ends one call with an error, and all its answers."""
        self._abort(call)
        self._send(call.api_server, refusal(call.message.id, error))

    # Steps

    def _step(self) -> None:
        begin = time.perf_counter()
        self.grammars.new_step()
        try:
            deltas = self.engine.step()
        except Exception as error:
            log.exception("an engine step failed")
            self._failures += 1
            if self._failures >= MAX_FAILURES or _is_device_error(error):
                raise UserError("the engine failed; the log above says why") from None
            for call in {id(one.call): one.call for one in self._tracked.values()}.values():  # not queued calls
                self._fail(call, internal_error())
            return
        self._failures = 0
        self._deliver(deltas, begin, time.perf_counter())

    def _deliver(self, deltas: list[Delta], begin: float, now: float) -> None:
        """Hot path: runs after every step for every running request."""
        for started in [one for one in self._unstarted.values() if one.request.prefill_end]:
            started.started = begin
            del self._unstarted[started.request.id]
        failed: dict[int, tuple[Call, ApiError]] = {}
        gaps: Counter[float] = Counter()
        num_tokens = 0
        for delta in deltas:
            tracked = self._tracked.get(delta.request.id)
            if tracked is None:  # its request was aborted during the step
                continue
            num_tokens += len(delta.tokens)
            is_first = not tracked.last_token
            if is_first:
                self.metrics.began(delta.request, now)
            else:
                gaps[now - tracked.last_token] += 1
            tracked.last_token = now
            if tracked.request.params.logits_processors and (failure := tracked.failure()) is not None:
                failed[id(tracked.call)] = (tracked.call, as_api_error(failure))
            elif delta.request.failure is not None:
                log.error("a request failed in a step", exc_info=delta.request.failure)
                failed[id(tracked.call)] = (tracked.call, internal_error())
            else:
                tracked.call.api_server.outputs.append(tracked.output(delta, is_first))
            if delta.finished:
                self._finished(tracked)
        self.metrics.progressed(num_tokens, gaps)
        total = sum(api_server.num_in_flight for api_server in self.api_servers)
        for api_server in list(self.api_servers):
            if api_server.outputs:
                outputs, api_server.outputs = api_server.outputs, []
                api_server.reported_in_flight = total - api_server.num_in_flight
                self._send(api_server, Step(outputs, api_server.reported_in_flight))
        for call, error in failed.values():
            self._fail(call, error)

    def _report_in_flight(self) -> None:
        """Sends each HTTP process the others' number of answers in flight if it changed; it decides whether there is room."""
        total = sum(api_server.num_in_flight for api_server in self.api_servers)
        for api_server in list(self.api_servers):
            if api_server.reported_in_flight != total - api_server.num_in_flight:
                api_server.reported_in_flight = total - api_server.num_in_flight
                self._send(api_server, Step([], api_server.reported_in_flight))


def _is_device_error(error: Exception) -> bool:
    """Whether an error is a device error, after which every further call on the device fails."""
    kind = getattr(torch, "AcceleratorError", None)
    return (kind is not None and isinstance(error, kind)) or "CUDA error" in str(error)
