"""Compiles grammars in threads while the engine steps. No client can occupy all threads."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from fledge.engine.engine import Engine
from fledge.errors import UserError
from fledge.sampling import LogitsProcessor
from fledge.serving.engine_calls import ApiServer
from fledge.serving.errors import ApiError, as_api_error, overloaded
from fledge.serving.fair_queue import FairQueue, room_for
from fledge.serving.limits import Limits
from fledge.serving.messages import Compile

if TYPE_CHECKING:
    from fledge.serving.structured import Grammar, GrammarCompiler

# How many grammars of one client are compiled at the same time; its others wait.
GRAMMARS_PER_CALLER = 2


Key = tuple[ApiServer, int]  # identifies a job: the HTTP process, and the job's number there


class GrammarJobs:
    """The queue of grammars to compile and the threads that do it. Only the engine's thread may use it.

    `wake` is called from other threads when a job is done. `max_queue` bounds queued grammars as it bounds queued answers.
    """

    def __init__(self, engine: Engine, limits: Limits, max_queue: int, wake: Callable[[], object]) -> None:
        self.engine, self.limits, self.max_queue, self._wake = engine, limits, max_queue, wake
        self.compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(limits.max_grammars_compiling, "grammar")
        self._waiting: FairQueue[tuple[Key, Compile]] = FairQueue()
        self._running: Counter[str] = Counter()  # number of jobs by caller
        self._compiling: set[Key] = set()
        self._forgotten: set[Key] = set()  # jobs of `_compiling` whose result is not wanted any more
        self._done: queue.SimpleQueue[tuple[Key, str, Grammar | ApiError]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, key: Key, job: Compile) -> None:
        """Queues a job. ApiError: the queue is full."""
        num_waiting, held = len(self._waiting), sum(1 for _ in self._waiting.items(job.caller))
        if num_waiting >= room_for(1, held, self.engine.config.max_num_seqs, self.max_queue):
            raise overloaded(f"{num_waiting} grammars are queued to be compiled; try again later", 5)
        self._waiting.push(job.caller, (key, job))
        self._start_waiting()

    def forget(self, key: Key) -> None:
        """Drops a job whose client has disconnected."""
        self._waiting.remove(lambda item: item[0] == key)
        if key in self._compiling:
            self._forgotten.add(key)

    def finished(self) -> list[tuple[Key, Grammar | ApiError]]:
        """Returns the jobs that are done, each with its grammar or the error."""
        found = []
        while not self._done.empty():
            key, caller, result = self._done.get()
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]
            self._compiling.discard(key)
            if key in self._forgotten:
                self._forgotten.discard(key)
            else:
                found.append((key, result))
        self._start_waiting()
        return found

    def _start_waiting(self) -> None:
        while self._running.total() < self.limits.max_grammars_compiling:
            found = self._waiting.pop_for(lambda caller: self._running[caller] < GRAMMARS_PER_CALLER)
            if found is None:
                return
            key, job = found
            self._running[job.caller] += 1
            self._compiling.add(key)
            self._threads.submit(self._compile, key, job)

    def _compile(self, key: Key, job: Compile) -> None:
        """Compiles one grammar. Runs in a thread, which waits for the compiler's process."""
        result: Grammar | ApiError
        try:
            if self._is_closed:
                raise UserError("the server is shutting down")
            compiler = self._get_compiler()
            given = () if job.value is None else (job.value,)
            result = getattr(compiler, job.kind)(*given)
        except Exception as error:
            result = as_api_error(error)
        self._done.put((key, job.caller, result))
        self._wake()

    def _get_compiler(self) -> GrammarCompiler:
        """Returns the compiler. It is made on first use, because reading the vocabulary takes a moment."""
        with self._lock:
            if self.compiler is None:
                try:
                    from fledge.serving.structured import GrammarCompiler
                except ImportError:
                    raise ApiError("structured output needs xgrammar on the server: pip install xgrammar", 501) from None
                model, tokenizer = self.engine.model, self.engine.tokenizer
                assert tokenizer is not None
                self.compiler = GrammarCompiler(tokenizer.copy(), model.vocab_size, model.eos_token_ids, self.limits)
                if self._is_closed:  # closed while the compiler was made
                    self.compiler.close()
            return self.compiler

    def processor(self, grammar: Grammar, begin_mark: Sequence[int] | None, caller: str, is_new: bool) -> LogitsProcessor:
        """Returns a processor for one answer. `begin_mark`: the grammar applies after it. `is_new`: first answer of a call."""
        assert self.compiler is not None
        if not grammar.is_plain and (refusal := self.compiler.mask_thread.refusal(caller, is_new)) is not None:
            raise refusal
        return self.compiler.processor(grammar, begin_mark or (), caller)

    @property
    def is_busy(self) -> bool:
        """Whether a mask that timed out is still being computed."""
        return self.compiler is not None and self.compiler.mask_thread.num_timed_out() > 0

    def new_step(self) -> None:
        if self.compiler is not None:
            self.compiler.clock.new_step()

    def close(self) -> None:
        """Stops all compilations."""
        self._is_closed = True
        if self.compiler is not None:
            self.compiler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
