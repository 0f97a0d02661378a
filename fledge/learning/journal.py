"""The record of learning: points of the curve and decisions, for metrics and the learn folder, and the generations saved there.

A separate thread writes to disk, so that no request waits for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fledge.learning.generations import Generations
from fledge.models.drafter import EagleDrafter

log = logging.getLogger("fledge.learning")

CURVE_REQUESTS = 32  # requests per point of the curve
MAX_EVENTS = 512  # events kept in memory: curve points, and as many others


class Journal:
    def __init__(self, generations: Generations | None, counts: Callable[[], dict[str, int]]) -> None:
        """`generations`: None: nothing is written to disk. `counts`: returns requests, steps and generation for every event."""
        self.generations, self.counts = generations, counts
        past = generations.events() if generations is not None else []
        last = past[-1] if past else {}
        self._before = {name: last.get(name, 0) for name in ("seconds", "requests", "steps")}  # continued after a restart
        self.curve: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        for event in past:
            (self.curve if event["event"] == "point" else self.events).append(event)
        self._window = [0, 0, 0]  # steps, accepted tokens and requests of the next point
        self._began = time.monotonic()
        self._disk = ThreadPoolExecutor(1, "learn-disk")

    def add_request(self, steps: int, accepted: int) -> None:
        """Counts a request towards the next point of the curve."""
        self._window = [sum(pair) for pair in zip(self._window, (steps, accepted, 1), strict=True)]
        all_steps, all_accepted, requests = self._window
        if requests >= CURVE_REQUESTS:
            self._window = [0, 0, 0]
            self.record("point", acceptance_length=1 + all_accepted / all_steps)

    def record(self, kind: str, **figures: Any) -> None:
        counts = {"seconds": time.monotonic() - self._began, **self.counts()}
        counts |= {name: round(counts[name] + before, 3) for name, before in self._before.items()}
        event = {"event": kind, **counts, **figures}
        (self.curve if kind == "point" else self.events).append(event)
        if (generations := self.generations) is not None:
            self._write(lambda: generations.record(event))

    def history(self) -> dict[str, Any]:
        """Returns the data of the server's web page: the curve as points [requests, acceptance length], the last one over fewer
        requests than the others, and the request counts at which the served weights changed."""
        points = [[one["requests"], one["acceptance_length"]] for one in self.curve]
        steps, accepted, _ = self._window
        if steps:
            points.append([self.counts()["requests"] + self._before["requests"], 1 + accepted / steps])
        return {"points": points, "swaps": [one["requests"] for one in self.events if one["event"] in ("swap", "rollback")]}

    def save(self, drafter: EagleDrafter, number: int, figures: dict[str, Any], needed: Collection[int] = ()) -> None:
        """Saves a generation in the writer thread (`Generations.save`). `drafter` must not change after this call."""
        if (generations := self.generations) is not None:
            self._write(lambda: generations.save(drafter, number, figures, needed))

    def choose(self, number: int) -> None:
        """Makes a generation the current one in the writer thread (`Generations.choose`)."""
        if (generations := self.generations) is None:
            return

        def write() -> None:
            if (chosen := generations.choose(number)) != number:
                log.warning("learning: generation %d was not saved; a restart continues with generation %d", number, chosen)

        self._write(write)

    def close(self) -> None:
        """Waits until everything is written, and unlocks the folder."""
        self._disk.shutdown()
        if self.generations is not None:
            self.generations.close()

    def _write(self, write: Callable[[], None]) -> None:
        def guarded() -> None:
            try:
                write()
            except Exception as error:  # a full disk must not stop serving
                log.error("learning: could not write to the learn folder (%s)", error)

        self._disk.submit(guarded)
