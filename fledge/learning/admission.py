"""Which finished requests are looked at: so many a second. A client with more than its share leaves room for others."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from fledge.learning.samples import CLIENT_SHARE

LATELY = 256  # requests that clients' shares are counted over, about


class Admission:
    def __init__(self, per_second: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.per_second, self.clock = per_second, clock
        # Credit that only clients below their share may use: a client that takes all the rest cannot take this.
        self.reserve = CLIENT_SHARE * per_second
        self.credit = self.most_credit = per_second + self.reserve
        self.looked_at: Counter[str] = Counter()  # lately, by client
        self._at = clock()

    def admits(self, client: str) -> bool:
        now = self.clock()
        self.credit = min(self.credit + self.per_second * (now - self._at), self.most_credit)
        self._at = now
        if self.credit < 1 + (self.reserve if self._is_over_share(client) else 0):
            return False
        self.credit -= 1
        self.looked_at[client] += 1
        if self.looked_at.total() >= LATELY:
            self.looked_at = Counter({one: count // 2 for one, count in self.looked_at.items() if count > 1})
        return True

    def crowds(self, client: str) -> bool:
        """Whether it has more than its share while others are there."""
        return len(self.looked_at) > 1 and self._is_over_share(client)

    def _is_over_share(self, client: str) -> bool:
        # The largest client alone: of four alike, each would be a little over a quarter at times.
        count = self.looked_at[client]
        return count > CLIENT_SHARE * self.looked_at.total() and count == max(self.looked_at.values())
