"""Micro-steps: work in parts that are short enough to run between two engine steps. A generator yields the kind of the next
micro-step; this module measures the time of each kind and limits the share of time that all of them may take."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    READ = "read"  # target pass over texts without hidden states
    FORWARD = "forward"  # the unrolled drafter; on a GPU the whole training step
    LOSS = "loss"  # loss and gradients of some positions
    BACKWARD = "backward"
    UPDATE = "update"  # optimizer step
    GATE = "gate"  # drafts over some texts
    STAGE = "stage"  # conversion of weights to the type and layout in which they are served
    SWAP = "swap"


# Yields the kind of the next micro-step before running it; None: there is nothing to do until more samples arrive.
Work = Iterator[Kind | None]
REMEMBERED = 5  # times kept per kind; the expected time is their median, which a single slow micro-step does not change
COLLECT_SHARE, FREE_SECONDS = 0.2, 0.5  # Collecting may use 20 % of the budget, plus 0.5 s at start.
MOST_CREDIT = 0.25  # seconds of credit that may accumulate, so that learning does not catch up in one long pause


class MicroSteps:
    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        """`synchronize`: waits for the device; otherwise only the launch would be timed."""
        self.clock, self.synchronize = clock, synchronize
        self.next: Kind | None = None
        self._seconds: dict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._work: Work = iter(())

    def start(self, work: Work) -> None:
        """Drops the current work and starts on `work`."""
        self._work = work
        self.next = next(work, None)

    def run(self) -> float:
        """Runs the next micro-step (or, if there was none, asks for one), and returns the seconds it took."""
        kind, began = self.next, self.clock()
        self.next = next(self._work, None)
        if kind is None:
            return self.clock() - began
        self.synchronize()
        seconds = self.clock() - began
        self._seconds[kind].append(seconds)
        return seconds

    @property
    def expected_seconds(self) -> float:
        """Expected time of the next micro-step; 0 for a kind that has not run yet."""
        known = self._seconds.get(self.next) if self.next is not None else None
        return statistics.median(known) if known else 0.0


@dataclass
class Spent:
    """Seconds spent since the start. Plain numbers, so that other threads may read them."""

    serving: float = 0.0  # while requests ran, learning included
    learning: float = 0.0  # part of `serving`
    collecting: float = 0.0  # part of `learning`
    idle: float = 0.0  # spent on learning while nothing ran


class Budget:
    """The time budget of learning: serving time earns credit, and work spends it, so that the share holds for any work."""

    def __init__(self, percent: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share, self.clock = percent / 100, clock
        self.spent = Spent()
        self.credit = 0.0
        self._since: float | None = None  # when serving time was last counted; None: nothing runs

    def serve(self) -> None:
        """Counts serving time: requests are running now."""
        now = self.clock()
        if self._since is not None:
            passed = now - self._since
            self.spent.serving += passed
            self.credit = min(self.credit + self.share * passed, MOST_CREDIT)
        self._since = now

    def rest(self) -> None:
        """Ends serving time: no request is running any more."""
        self.serve()
        self._since = None

    @property
    def is_serving(self) -> bool:
        return self._since is not None

    def allows_collecting(self, part: float = 1.0) -> bool:
        """Whether less than `part` of the time for collecting is used. Without this limit collecting could take all time from
        training: on a GPU a sample may cost as much as a micro-step."""
        return self.spent.collecting < part * (COLLECT_SHARE * self.share * self.spent.serving + FREE_SECONDS)

    def charge(self, seconds: float, *, collecting: bool = False) -> None:
        if collecting:
            self.spent.collecting += seconds
        if self._since is None:
            self.spent.idle += seconds
        else:
            self.spent.learning += seconds
            self.credit -= seconds
