"""Step cost models: what a step of a given size and depth is expected to take.

RowCosts     learnt from the steps that are run (eager executor): seconds by number of rows
GraphCosts   replay time of each recorded graph, corrected by what its launches were seen to take (captured executor)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fledge.speculation.acceptance import AcceptanceModel

# A cost measured n times is taken to be lower by this share of 1/n, so that what is little known gets tried again.
OPTIMISM = 0.15
NEWEST = 0.1  # weight of the latest measurement, once there are some
NEWEST_LOWER = 0.3  # the same if it is lower: other load on the machine only makes a pass longer
# After this many measurements a new one counts as at least half and at most 1.25 times the mean: a disturbed pass must not
# decide against a size that is then never measured again.
STEADY, MOST_GROWTH = 3, 1.25
LIFETIME = 2000  # measurements after which a cost that did not come up again is dropped
# What a draft step takes of a target pass over as many rows, until it is measured.
USUAL_DRAFT_SHARE = 1 / 14
# Up to this many rows an unmeasured size is tried without asking what prefill of as many tokens costs.
FEW_ROWS = 8


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
    """Seconds by number of rows: means of neighbouring sizes, interpolated linearly.

    Outside what was measured it errs towards cheap: fewer rows cost in proportion, more rows continue the slope.
    No size costs more than a larger one: such a measurement was a disturbed one.
    """

    def __init__(self, optimism: float = OPTIMISM) -> None:
        """`optimism`: 0 for costs that are never explored."""
        self.optimism = optimism
        self.costs: dict[int, _Cost] = {}
        self.now = 0
        self._points: list[tuple[float, float]] | None = None  # rows and seconds, both ascending

    def record(self, rows: int, seconds: float) -> None:
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

    def decay(self) -> None:
        """Halves the confidence in every cost, so that what is not measured any more gets tried again."""
        self._points = None
        for cost in self.costs.values():
            cost.count = max(1, cost.count // 2)

    @property
    def most_rows(self) -> float:
        return max((cost.rows for cost in self.costs.values()), default=0.0)

    def seconds(self, rows: float) -> float | None:
        """None: nothing was measured yet."""
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


class StepCosts(Protocol):
    """What the controller asks of an executor's cost model."""

    def seconds(self, num_running: int, num_drafted: int, depth: int) -> float | None:
        """Of a step for so many requests, `num_drafted` of which are drafted for `depth` tokens deep; None: not known."""
        ...


class RowCosts:
    """Learnt by the eager executor: target passes by rows, drafting by requests and depth."""

    def __init__(self, acceptance: AcceptanceModel, nodes: Callable[[int], float] | None = None) -> None:
        """`nodes(depth)`: draft tokens verified per request; None: as many as the acceptance model expects of a chain."""
        self.nodes = nodes or acceptance.nodes
        self.verify = CostTable()  # all of a step but drafting, by rows of the target pass
        self.prefill = CostTable(optimism=0)  # the same for steps that prefill
        self.draft = {depth: CostTable() for depth in acceptance.depths}  # by the number of requests drafted for

    @property
    def is_known(self) -> bool:
        return bool(self.verify.costs)

    def seconds(self, num_running: int, num_drafted: int, depth: int) -> float | None:
        if not depth:
            return self.verify.seconds(num_running)
        verify = self.verify_seconds(num_running + num_drafted * self.nodes(depth))
        return None if verify is None else verify + self.draft_seconds(num_drafted, depth)

    def verify_seconds(self, rows: float) -> float | None:
        """More rows than any draft had yet cost no less a row than prefill does: trying them would be dear."""
        seconds = self.verify.seconds(rows)
        if seconds is None or rows <= self.verify.most_rows or rows <= FEW_ROWS or not self.prefill.costs:
            return seconds
        return max(seconds, self.prefill.seconds(rows) or 0.0)

    def draft_seconds(self, num_drafted: int, depth: int) -> float:
        """Interpolated linearly between depths that were measured; for more requests it grows as the target's pass does.

        Outside of them it errs towards cheap, so that a depth is rather tried: less deep costs in proportion, deeper continues
        the slope. In proportion both ways would keep the controller at a depth of 1, where syncing is most of the cost.
        """
        points = [(known, self._measured(table, num_drafted)) for known, table in self.draft.items() if table.costs]
        if not points:
            return (self.verify_seconds(num_drafted) or 0.0) * USUAL_DRAFT_SHARE * depth
        after = bisect_left(points, (depth,))
        if after == 0:
            return points[0][1] * depth / points[0][0]
        # Beyond the deepest: the slope of all.
        (low, cost), (high, higher) = (points[after - 1], points[after]) if after < len(points) else (points[0], points[-1])
        return higher + max(higher - cost, 0.0) * (depth - high) / max(high - low, 1)

    def _measured(self, table: CostTable, num_drafted: int) -> float:
        tried = min(num_drafted, table.most_rows)
        growth = (self.verify_seconds(num_drafted) or 0.0) / (self.verify_seconds(tried) or 1.0)
        return (table.seconds(tried) or 0.0) * max(growth, 1.0)

    def prefill_seconds(self, num_tokens: int) -> float:
        return self.prefill.seconds(num_tokens) or 0.0

    def decay(self) -> None:
        for table in (self.verify, self.prefill, *self.draft.values()):
            table.decay()


NEWEST_CYCLE = 0.05  # weight of the latest launch in a graph's correction
CORRECTION_DECAY = 0.001  # of corrections at other depths, a launch: contexts grow and shrink meanwhile
GraphShape = tuple[int, ...]  # batch size, depth, sampling mode, perhaps a KV length bucket


class GraphCosts:
    """Of recorded cycles. They are recorded with all rows empty, where attention has nothing to read.

    A shape that was not launched yet gets the smallest correction seen at its batch size, so that it is rather tried than
    not. Corrections of depths that are no longer used slowly approach that of the depth in use.
    """

    def __init__(self, recorded: Mapping[GraphShape, float]) -> None:
        """`recorded`: seconds by shape; it may grow."""
        self.recorded = recorded
        self.batch: tuple[int, ...] = ()  # shape without depth of the next cycle; set by the executor
        self.corrections: dict[GraphShape, dict[int, float]] = {}  # by shape without depth: by depth, seconds to add

    def record(self, shape: GraphShape, seconds: float) -> None:
        if shape not in self.recorded:
            return
        size, depth, *others = shape
        more = seconds - self.recorded[shape]
        corrections = self.corrections.setdefault((size, *others), {})
        corrections[depth] = now = corrections.get(depth, more) + (more - corrections.get(depth, more)) * NEWEST_CYCLE
        for other, before in corrections.items():
            corrections[other] = before + (now - before) * CORRECTION_DECAY

    def seconds_of(self, shape: GraphShape) -> float | None:
        """None: it was never recorded."""
        if shape not in self.recorded:
            return None
        size, depth, *others = shape
        corrections = self.corrections.get((size, *others), {})
        return self.recorded[shape] + corrections.get(depth, max(min(corrections.values(), default=0.0), 0.0))

    def seconds(self, num_running: int, num_drafted: int, depth: int) -> float | None:
        if not self.batch:
            return None
        size, *others = self.batch
        return self.seconds_of((size, depth, *others))
