"""What a pass costs by its number of rows, learnt from the passes that are run anyway."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

# A cost that was seen n times is taken to be lower by this share of 1/n: what is little known gets tried again.
OPTIMISM = 0.15
NEWEST = 0.1  # share of the latest measurement, once there are some
STEADY = 3  # measurements after which one is no longer believed to be twice or half of what it was
LIFETIME = 2000  # measurements after which a cost that did not come up again is forgotten: the machine may be another by then


@dataclass
class _Cost:
    rows: float
    seconds: float
    count: int
    when: int
    optimism: float

    @property
    def expected(self) -> float:
        return self.seconds * (1 - self.optimism / self.count)


class CostTable:
    """Means of sizes that lie close together, with straight lines between them.

    Beyond what was seen it errs towards cheap: fewer rows cost in proportion, more rows go on as those that were seen do.
    """

    def __init__(self, optimism: float = OPTIMISM) -> None:
        """`optimism`: 0 for what is not there to be tried again."""
        self.optimism = optimism
        self.costs: dict[int, _Cost] = {}
        self.now = 0
        self._ordered: list[_Cost] | None = None

    def saw(self, rows: int, seconds: float) -> None:
        self.now += 1
        place = rows if rows <= 8 else round(4 * math.log2(rows)) - 4
        cost = self.costs.get(place)
        if cost is None:
            self.costs[place] = _Cost(rows, seconds, 1, self.now, self.optimism)
            self._ordered = None
        else:
            if cost.count >= STEADY:
                seconds = min(max(seconds, cost.seconds / 2), cost.seconds * 2)
            cost.count, cost.when = cost.count + 1, self.now
            share = max(1 / cost.count, NEWEST)
            cost.rows += share * (rows - cost.rows)
            cost.seconds += share * (seconds - cost.seconds)
        if self.now % 64 == 0:
            self.costs = {place: cost for place, cost in self.costs.items() if cost.when > self.now - LIFETIME}
            self._ordered = None

    @property
    def least_rows(self) -> float:
        return min((cost.rows for cost in self.costs.values()), default=math.inf)

    @property
    def most_rows(self) -> float:
        return max((cost.rows for cost in self.costs.values()), default=0.0)

    def seconds(self, rows: float) -> float | None:
        """None: nothing was seen yet."""
        if self._ordered is None:
            self._ordered = [self.costs[place] for place in sorted(self.costs)]
        costs = self._ordered
        if not costs:
            return None
        after = bisect_left(costs, rows, key=lambda cost: cost.rows)
        if after == 0:
            return costs[0].expected * min(rows / costs[0].rows, 1.0)
        if after == len(costs):
            first, last = costs[0], costs[-1]
            slope = max(last.seconds - first.seconds, 0.0) / max(last.rows - first.rows, 1e-9)
            return last.expected + slope * (rows - last.rows)
        low, high = costs[after - 1], costs[after]
        slope = max(high.expected - low.expected, 0.0) / max(high.rows - low.rows, 1e-9)
        return low.expected + slope * (rows - low.rows)
