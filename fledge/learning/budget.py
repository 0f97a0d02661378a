"""How much of the time learning takes: a share of the time in which requests run, measured and held; idle time is free."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

COLLECT_SHARE, FREE_SECONDS = 0.2, 0.5  # Collecting may use 20 % of the budget, plus 0.5 s at start.
MOST_CREDIT = 0.25  # seconds that may be saved up: learning must not catch up in one long pause


@dataclass
class Spent:
    """Seconds since the start. Plain numbers: another thread may read them."""

    serving: float = 0.0  # while requests ran, learning included
    learning: float = 0.0  # part of `serving`
    collecting: float = 0.0  # part of `learning`
    idle: float = 0.0  # spent on learning while nothing ran


class Budget:
    """Work may run while there is credit; what it took is taken off, so that the share holds whatever it costs."""

    def __init__(self, percent: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.share, self.clock = percent / 100, clock
        self.spent = Spent()
        self.credit = 0.0
        self._since: float | None = None  # when serving time was last counted; None: nothing runs

    def serve(self) -> None:
        """Requests run now."""
        now = self.clock()
        if self._since is not None:
            passed = now - self._since
            self.spent.serving += passed
            self.credit = min(self.credit + self.share * passed, MOST_CREDIT)
        self._since = now

    def rest(self) -> None:
        """Nothing runs any more."""
        self.serve()
        self._since = None

    @property
    def is_serving(self) -> bool:
        return self._since is not None

    def allows_collecting(self, part: float = 1.0) -> bool:
        """Whether less than this part of collecting's time is spent. Without a bound nothing would be left for training: on a
        GPU a sample may cost as much as a micro-step."""
        return self.spent.collecting < part * (COLLECT_SHARE * self.share * self.spent.serving + FREE_SECONDS)

    def charge(self, seconds: float, *, collecting: bool = False) -> None:
        if collecting:
            self.spent.collecting += seconds
        if self._since is None:
            self.spent.idle += seconds
        else:
            self.spent.learning += seconds
            self.credit -= seconds
