"""Whether those who wait to enter should wait for the next one to come: a pass over prompts holds up every row under way, and
takes hardly longer for several prompts than for one.

If one comes every `gap` seconds and n enter together, the first waits n - 1 gaps, the second n - 2, …, the last not at all; and
each saves the rows under way an n-th of a pass. Time of rows lost, a newcomer: (n - 1) / 2 * gap + rows * pass / n. One
more pays as long as n (n + 1) gap < 2 rows * pass. With few rows that is never; with 64 it is about ten.
"""

from __future__ import annotations

PATIENCE = 0.025  # seconds that nobody waits longer than for this reason
NEWEST = 0.1  # share of the latest gap in the mean


class Gathering:
    def __init__(self) -> None:
        self.gap = 0.0  # seconds between two that could enter, on average
        self.seen = 0  # who could enter when it was last asked, and did not
        self.last_came = self.since = 0.0  # when the last one could enter, and the first of those who could and did not

    def goes_on(self, *, waiting: int, rows: int, pass_seconds: float, now: float) -> bool:
        """`waiting`: those who could enter now; `rows`: under way."""
        if not self.seen:
            self.since = now
        came, self.seen = waiting - self.seen, waiting
        if came > 0:
            gap = (now - self.last_came) / came
            self.gap += (gap - self.gap) * NEWEST if self.last_came else 0.0
            self.last_came = now
        gap = max(self.gap, now - self.last_came)  # none has come for longer than usual
        return bool(waiting) and now - self.since < PATIENCE and waiting * (waiting + 1) * gap < 2 * rows * pass_seconds

    def entered(self, left: int, now: float) -> None:
        """`left`: those who did not find room."""
        self.seen, self.since = left, now
