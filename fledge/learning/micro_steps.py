"""Work in micro-steps, short enough to run between two engine steps: a generator that names what it does next, and the time
that each kind of micro-step takes."""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from enum import StrEnum


class Kind(StrEnum):
    READ = "read"  # the target over texts without hidden states
    FORWARD = "forward"  # the unrolled drafter; on a GPU the whole training step
    LOSS = "loss"  # of some positions, with its gradients
    BACKWARD = "backward"
    UPDATE = "update"  # the optimiser's step
    GATE = "gate"  # drafts over some texts
    STAGE = "stage"  # weights in the type and layout they are served in
    SWAP = "swap"


# Yields the kind of the next micro-step before it is done; None: there is nothing to do until more samples come.
Work = Iterator[Kind | None]
REMEMBERED = 5  # micro-steps of a kind; their median is expected, so that a single slow one says nothing


class MicroSteps:
    def __init__(self, clock: Callable[[], float], synchronize: Callable[[], None]) -> None:
        """`synchronize`: waits for the device; else only the launch would be timed."""
        self.clock, self.synchronize = clock, synchronize
        self.next: Kind | None = None
        self._seconds: dict[Kind, deque[float]] = defaultdict(lambda: deque(maxlen=REMEMBERED))
        self._work: Work = iter(())

    def start(self, work: Work) -> None:
        """Drops what it was at, and begins with this."""
        self._work = work
        self.next = next(work, None)

    def stop(self) -> None:
        self._work, self.next = iter(()), None

    def run(self) -> float:
        """The next micro-step, or a look whether there is one by now; the seconds it took."""
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
        """Of the next micro-step; 0 for a kind that has not been run yet."""
        known = self._seconds.get(self.next) if self.next is not None else None
        return statistics.median(known) if known else 0.0
