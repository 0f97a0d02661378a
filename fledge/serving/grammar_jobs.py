"""Grammars that are being compiled for callers, beside the engine's steps. Nobody takes all of the threads."""

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

# A caller may have so many grammars compiled at the same time; others take turns beside it.
GRAMMARS_PER_CALLER = 2


Key = tuple[ApiServer, int]  # what a job is known by: who asked, and its number there


class GrammarJobs:
    """Used by the engine's thread alone. `wake` is called from other threads when a job is done. As many grammars may wait as
    answers: `max_queue`."""

    def __init__(self, engine: Engine, limits: Limits, max_queue: int, wake: Callable[[], object]) -> None:
        self.engine, self.limits, self.max_queue, self._wake = engine, limits, max_queue, wake
        self.compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(limits.max_grammars_compiling, "grammar")
        self._waiting: FairQueue[tuple[Key, Compile]] = FairQueue()
        self._running: Counter[str] = Counter()  # by caller
        self._compiling: set[Key] = set()
        self._forgotten: set[Key] = set()  # of those
        self._done: queue.SimpleQueue[tuple[Key, str, Grammar | ApiError]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, key: Key, job: Compile) -> None:
        """Queues it; ApiError when there is no room."""
        num_waiting, held = len(self._waiting), sum(1 for _ in self._waiting.items(job.caller))
        if num_waiting >= room_for(1, held, self.engine.config.max_num_seqs, self.max_queue):
            raise overloaded(f"{num_waiting} grammars wait to be compiled; try again later", 5)
        self._waiting.push(job.caller, (key, job))
        self._start_waiting()

    def forget(self, key: Key) -> None:
        """Its caller has gone."""
        self._waiting.remove(lambda item: item[0] == key)
        if key in self._compiling:
            self._forgotten.add(key)

    def finished(self) -> list[tuple[Key, Grammar | ApiError]]:
        """By key: grammars, or why there is none."""
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
        """In a thread, which waits for the process that compiles."""
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
        """Made on first use: reading the vocabulary takes a moment."""
        with self._lock:
            if self.compiler is None:
                try:
                    from fledge.serving.structured import GrammarCompiler
                except ImportError:
                    raise ApiError("structured output needs xgrammar on the server: pip install xgrammar", 501) from None
                model, tokenizer = self.engine.model, self.engine.tokenizer
                assert tokenizer is not None
                self.compiler = GrammarCompiler(tokenizer.copy(), model.vocab_size, model.eos_token_ids, self.limits)
                if self._is_closed:  # while it was made
                    self.compiler.close()
            return self.compiler

    def processor(self, grammar: Grammar, begin_mark: Sequence[int] | None, caller: str, is_new: bool) -> LogitsProcessor:
        """A new one for each answer. `begin_mark`: the grammar holds after these tokens. `is_new`: the first of a call."""
        assert self.compiler is not None
        if not grammar.is_plain and (refusal := self.compiler.mask_thread.refusal(caller, is_new)) is not None:
            raise refusal
        return self.compiler.processor(grammar, begin_mark or (), caller)

    @property
    def is_busy(self) -> bool:
        """Whether a mask that timed out is still computed."""
        return self.compiler is not None and self.compiler.mask_thread.num_timed_out() > 0

    def new_step(self) -> None:
        if self.compiler is not None:
            self.compiler.clock.new_step()

    def close(self) -> None:
        """Ends what is being compiled."""
        self._is_closed = True
        if self.compiler is not None:
            self.compiler.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
