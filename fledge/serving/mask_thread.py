"""Computes grammar masks on a thread with a CPU limit.

    engine's thread    run(work) ── waits ──▶ result
                                  └─ too long ─▶ MaskTimeout; the next mask gets a new thread
    mask thread        work ───────────────▶ ends when the work is done

A call into the library cannot be interrupted, and one has taken a minute.
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
# Limits on masks that timed out and are still being computed: per caller, and over all callers for new requests.
MAX_OF_CALLER, MAX_OF_ALL = 2, 8


class MaskTimeout(Exception):
    """Raised when a mask took more CPU seconds than its limit."""


def _nothing() -> None:
    pass


class _Thread:
    """A thread that runs one task at a time. Two locks hand a task over and back in 40 us; queues take twice as long."""

    def __init__(self) -> None:
        self._work: Callable[[], Any] = _nothing
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_ended = False
        self._asked, self._done = threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._done.acquire()
        # A daemon, so that the process does not wait for it to exit.
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
            # By the thread's CPU clock: on a busy machine it may have waited for a core.
            if self._seconds() - began > limit:
                self.end()
                with contextlib.suppress(OSError):  # it has ended, or the system has no priorities for threads
                    os.setpriority(os.PRIO_PROCESS, self._native_id, LOWEST_PRIORITY)
                raise MaskTimeout
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self._result

    def end(self) -> None:
        """Makes the thread end, now if it is idle, else after its current task."""
        self._is_ended = True
        self._asked.release()

    def _seconds(self) -> float:
        """Returns the thread's CPU seconds, or wall-clock seconds on systems that do not report them."""
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
            self._work = _nothing  # keeps no reference to the request
            self._done.release()  # after a timeout no thread waits for it, and the loop ends above


class MaskThread:
    """Runs masks on a thread, and replaces it after a timeout. Only the engine's thread may use it."""

    def __init__(self) -> None:
        self._current: _Thread | None = None
        self._timed_out: list[tuple[str, _Thread]] = []  # the caller, and the thread

    def run(self, work: Callable[[], Result], limit: float, caller: str) -> Result:
        """Returns `work`'s result. MaskTimeout: it took over `limit` CPU seconds. ApiError: too many of the caller's did."""
        # Checked for each mask, since requests that were admitted together may all be slow.
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
        """Returns the error for a caller who has too many masks that timed out; None: further masks may run.

        The limit over all callers applies to new requests only: slow masks of one caller do not end running answers of others.
        """
        if not self._timed_out:  # hot path
            return None
        if self.num_timed_out(caller) >= MAX_OF_CALLER:
            message = "token masks of your earlier grammars took too long and are still being computed; try again later"
            return ApiError(message, 429, code="rate_limit_exceeded", headers={"Retry-After": "60"})
        if is_new and self.num_timed_out() >= MAX_OF_ALL:
            return overloaded("token masks of other grammars took too long and are still being computed; try again later", 60)
        return None

    def num_timed_out(self, caller: str | None = None) -> int:
        """Returns the number of masks that timed out and are still being computed, of one caller or of all."""
        self._timed_out = [(owner, thread) for owner, thread in self._timed_out if thread.is_alive]
        return sum(caller in (None, owner) for owner, _ in self._timed_out)

    def close(self) -> None:
        if self._current is not None:
            self._current.end()
            self._current = None
