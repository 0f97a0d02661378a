"""How many cycles are launched together: as few as keep the device busy while the host handles what the last ones said.

Launching takes the host a while for each cycle, reading hardly longer for several than for one. Whoever is done waits for the
others of its cycles before the host hears of it, so one at a time is best where the host can keep up.
"""

from __future__ import annotations

MOST_TOGETHER = 4
TOO_OFTEN = 2  # times the device had run out of work, without …
QUIET_LAUNCHES = 64  # … so many launches in between: after as many without, fewer are tried again


class Pace:
    def __init__(self) -> None:
        self.cycles = 1
        self.late = self.quiet = 0

    def saw(self, device_was_idle: bool) -> None:
        """At a launch: whether all that was launched before was done already."""
        if device_was_idle:
            self.late, self.quiet = self.late + 1, 0
        else:
            self.quiet += 1
        if self.late >= TOO_OFTEN:
            self.cycles, self.late = min(self.cycles + 1, MOST_TOGETHER), 0
        elif self.quiet >= QUIET_LAUNCHES:
            self.cycles, self.late, self.quiet = max(self.cycles - 1, 1), 0, 0
