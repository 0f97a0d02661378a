"""Computes grammar masks on a thread with a CPU limit.

    engine's thread    run(work) ── waits ──▶ result
                                  └─ too long ─▶ MaskTimeout; the next mask has a new thread
    mask thread        work ───────────────▶ ends after what it does

A library call cannot be interrupted; one has taken a minute.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from fledge.serving.errors import ApiError, overloaded

Result = TypeVar("Result")

LOWEST_PRIORITY = 19
# Masks that were given up and are still computed: of one caller, and of all when a new request comes.
MAX_OF_CALLER, MAX_OF_ALL = 2, 8


class MaskTimeout(Exception):
    """A mask took more CPU seconds than it may."""


def _nothing() -> None:
    pass


class _Thread:
    """Does one thing at a time. Two locks hand it over and back in 40 us; queues take twice as long."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] = _nothing
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_ended = False
        self._asked, self._done = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._done.acquire()
        # A daemon: the process does not wait for it.
        self._thread = threading.Thread(target=self._serve, name="mask", daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        assert self._thread.native_id is not None
        self._ident, self._native_id = self._thread.ident, self._thread.native_id

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def run(self, work: Callable[[], Any], limit: float) -> Any:
        began = self._seconds()
        self._work = work
        self._asked.release()
        while not self._done.acquire(timeout=limit):
            # By its own clock: on a busy machine it may have waited for a core.
            if self._seconds() - began > limit:
                self.end()
                with contextlib.suppress(OSError):  # it has ended, or the system gives threads no priority of their own
                    os.setpriority(os.PRIO_PROCESS, self._native_id, LOWEST_PRIORITY)
                raise MaskTimeout
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result

    def end(self) -> None:
        """Lets it end: now if it waits, or after what it does."""
        self._is_ended = True
        self._asked.release()

    def _seconds(self) -> float:
        """CPU seconds of the thread; of the clock on the wall where a system does not tell."""
        if not hasattr(time, "pthread_getcpuclockid"):
            return time.monotonic()
        return time.clock_gettime(time.pthread_getcpuclockid(self._ident))

    def _serve(self) -> None:
        while True:
            self._asked.acquire()
            if self._is_ended:
                return
            try:
                self._result = self._work()
            except BaseException as error:
                self._error = error
            self._work = _nothing  # nothing of a request is kept until the next one
            self._done.release()  # after a timeout no thread acquires it: the loop ends above


class MaskThread:
    """Used by the engine's thread alone."""

    def __init__(self) -> None:
        self._current: _Thread | None = None
        self._timed_out: list[tuple[str, _Thread]] = []  # by caller

    def run(self, work: Callable[[], Result], limit: float, caller: str) -> Result:
        """`work`'s result; MaskTimeout when it takes more than `limit` CPU seconds, ApiError when the caller has too many."""
        # Looked at again, as requests that were let in together may all be slow.
        if (refusal := self.refusal(caller, is_new=False)) is not None:
            raise refusal
        if self._current is None:
            self._current = _Thread()
        try:
            return self._current.run(work, limit)
        except MaskTimeout:
            self._timed_out.append((caller, self._current))
            self._current = None
            raise

    def refusal(self, caller: str, is_new: bool) -> ApiError | None:
        """Why no further mask of this caller's is tried; None: it is.

        The limit over all callers is for new requests alone: slow masks of some do not end running answers of others.
        """
        if not self._timed_out:  # hot path
            return None
        if self.num_timed_out(caller) >= MAX_OF_CALLER:
            message = "earlier grammars of yours took too long to follow and still take time; try again later"
            return ApiError(message, 429, code="rate_limit_exceeded", headers={"Retry-After": "60"})
        if is_new and self.num_timed_out() >= MAX_OF_ALL:
            return overloaded("grammars that took too long to follow still take time; try again later", 60)
        return None

    def num_timed_out(self, caller: str | None = None) -> int:
        """Masks that timed out and are still computed: of one caller, or of all."""
        self._timed_out = [(owner, thread) for owner, thread in self._timed_out if thread.is_alive]
        return sum(caller in (None, owner) for owner, _ in self._timed_out)

    def close(self) -> None:
        if self._current is not None:
            self._current.end()
            self._current = None
