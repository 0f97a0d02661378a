"""Launch-ahead: how many cycles are launched together, as few as keep the device busy while the host reads the last ones.

Launching costs the host time for each cycle; reading takes hardly longer for several than for one. A request that ends waits
for the other cycles of its launch before the host knows, so one at a time is best where the host keeps up.
"""

from __future__ import annotations

MAX_CYCLES = 4
TOO_OFTEN = 2  # times the device had run out of work, without …
CALM_LAUNCHES = 64  # … so many launches in between: after as many without, fewer are tried again


class LaunchAhead:
    def __init__(self) -> None:
        self.cycles = 1
        self.num_idle = self.num_calm = 0
        self.skips_next = False  # other work came between: an idle device says nothing about the host

    def record(self, *, device_was_idle: bool) -> None:
        """At a launch: whether the device had finished everything before it."""
        if self.skips_next:
            self.skips_next = False
            return
        if device_was_idle:
            self.num_idle, self.num_calm = self.num_idle + 1, 0
        else:
            self.num_calm += 1
        if self.num_idle >= TOO_OFTEN:
            self.cycles, self.num_idle = min(self.cycles + 1, MAX_CYCLES), 0
        elif self.num_calm >= CALM_LAUNCHES:
            self.cycles, self.num_idle, self.num_calm = max(self.cycles - 1, 1), 0, 0
