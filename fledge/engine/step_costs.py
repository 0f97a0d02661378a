"""What a pass costs by its number of rows, learnt from the passes that are run anyway."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

# A cost that was seen n times is taken to be lower by this share of 1/n: what is little known gets tried again.
OPTIMISM = 0.15
NEWEST = 0.1  # share of the latest measurement, once there are some
NEWEST_LOWER = 0.3  # the same if it is lower: what disturbs a pass only makes it longer
# After so many measurements one is no longer believed to be half of what it was, or to have grown by more than this: other work
# of the machine makes passes longer, and what is decided by it may keep them from being seen again.
STEADY, MOST_GROWTH = 3, 1.25
LIFETIME = 2000  # measurements after which a cost that did not come up again is forgotten: the machine may be another by then


@dataclass
class _Cost:
    rows: float
    seconds: float
    count: int  # how well it is known: measurements, which count less and less
    when: int
    optimism: float
    seen: int = 1  # measurements

    @property
    def expected(self) -> float:
        return self.seconds * (1 - self.optimism / self.count)


class CostTable:
    """Means of sizes that lie close together, with straight lines between them.

    Beyond what was seen it errs towards cheap: fewer rows cost in proportion, more rows go on as those that were seen do.
    No size costs more than a larger one: if it did so once, that was the machine's other work.
    """

    def __init__(self, optimism: float = OPTIMISM) -> None:
        """`optimism`: 0 for what is not there to be tried again."""
        self.optimism = optimism
        self.costs: dict[int, _Cost] = {}
        self.now = 0
        self._points: list[tuple[float, float]] | None = None  # rows and seconds, both ascending

    def saw(self, rows: int, seconds: float) -> None:
        self.now += 1
        place = rows if rows <= 8 else round(4 * math.log2(rows)) - 4
        cost, self._points = self.costs.get(place), None
        if cost is None:
            self.costs[place] = _Cost(rows, seconds, 1, self.now, self.optimism)
        else:
            if cost.seen >= STEADY:
                seconds = min(max(seconds, cost.seconds / 2), cost.seconds * MOST_GROWTH)
            cost.count, cost.seen, cost.when = cost.count + 1, cost.seen + 1, self.now
            share = max(1 / cost.count, NEWEST_LOWER if seconds < cost.seconds else NEWEST)
            cost.rows += share * (rows - cost.rows)
            cost.seconds += share * (seconds - cost.seconds)
        if self.now % 64 == 0:
            self.costs = {place: cost for place, cost in self.costs.items() if cost.when > self.now - LIFETIME}

    def fade(self) -> None:
        """What is not seen any more is known less and less."""
        self._points = None
        for cost in self.costs.values():
            cost.count = max(1, cost.count // 2)

    @property
    def most_rows(self) -> float:
        return max((cost.rows for cost in self.costs.values()), default=0.0)

    def seconds(self, rows: float) -> float | None:
        """None: nothing was seen yet."""
        points = self._points = self._points or self._ascending()
        if not points:
            return None
        after = bisect_left(points, (rows,))
        if after == 0:
            return points[0][1] * min(rows / points[0][0], 1.0)
        low, cost = points[after - 1]
        if after < len(points):
            high, higher = points[after]
            return cost + (higher - cost) * (rows - low) / max(high - low, 1e-9)
        first, last = self.costs[min(self.costs)], self.costs[max(self.costs)]
        slope = max(last.seconds - first.seconds, 0.0) / max(last.rows - first.rows, 1e-9)
        return cost + slope * (rows - low)

    def _ascending(self) -> list[tuple[float, float]]:
        points, least = [], math.inf
        for place in sorted(self.costs, reverse=True):
            least = min(least, self.costs[place].expected)
            points.append((self.costs[place].rows, least))
        return points[::-1]
