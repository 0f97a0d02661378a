"""Step cost models: the expected time of a step of a given size and depth.

RowCosts     learnt from the steps that are run (eager executor): seconds by number of rows
GraphCosts   replay time of each recorded graph, corrected by the measured time of its launches (captured executor)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from fledge.speculation.acceptance import AcceptanceModel

# A cost measured n times is assumed to be lower by this share times 1/n, so that sizes with few measurements are tried.
OPTIMISM = 0.15
NEWEST = 0.1  # weight of the latest measurement, once there are some
NEWEST_LOWER = 0.3  # the same if it is lower than the mean: other load on the machine only makes a pass longer
# After this many measurements a new one is clipped to 0.5 … 1.25 times the mean: otherwise one disturbed pass could rule out a
# size, which then would never be measured again.
STEADY, MOST_GROWTH = 3, 1.25
LIFETIME = 2000  # a cost is dropped if it was not measured again within this many measurements
# The assumed time of a draft step, as a share of a target pass over as many rows, until it is measured.
USUAL_DRAFT_SHARE = 1 / 14
# Above this many rows, an unmeasured size is assumed to cost at least as much as prefill of as many tokens.
FEW_ROWS = 8


@dataclass
class _Cost:
    rows: float
    seconds: float
    count: int  # confidence: the number of measurements, halved by `decay`
    when: int
    optimism: float
    seen: int = 1  # number of measurements

    @property
    def expected(self) -> float:
        return self.seconds * (1 - self.optimism / self.count)


class CostTable:
    """Seconds by number of rows: means over neighbouring sizes, interpolated linearly.

    Outside the measured range the estimate is rather low: fewer rows cost in proportion, more rows continue the slope.
    No size is estimated to cost more than a larger one: such a measurement was disturbed.
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
        """Halves the confidence in every cost, so that sizes that are no longer measured get tried again."""
        self._points = None
        for cost in self.costs.values():
            cost.count = max(1, cost.count // 2)

    @property
    def most_rows(self) -> float:
        return max((cost.rows for cost in self.costs.values()), default=0.0)

    def seconds(self, rows: float) -> float | None:
        """The expected seconds for `rows` rows; None: nothing was measured yet."""
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
    """The interface of an executor's cost model."""

    def seconds(self, num_running: int, num_drafted: int, depth: int) -> float | None:
        """The expected seconds of a step for `num_running` requests, `num_drafted` of which get a draft of `depth` tokens;
        None: not known."""
        ...


class RowCosts:
    """The costs that the eager executor learns: target passes by rows, drafting by requests and depth."""

    def __init__(self, acceptance: AcceptanceModel, nodes: Callable[[int], float] | None = None) -> None:
        """`nodes(depth)`: draft tokens verified per request; None: as many as the acceptance model expects of a chain."""
        self.nodes = nodes or acceptance.nodes
        self.verify = CostTable()  # a step without its drafting, by rows of the target pass
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
        """The expected seconds of a target pass. More rows than were ever verified are assumed to cost at least as much as
        prefill does: trying them would be expensive."""
        seconds = self.verify.seconds(rows)
        if seconds is None or rows <= self.verify.most_rows or rows <= FEW_ROWS or not self.prefill.costs:
            return seconds
        return max(seconds, self.prefill.seconds(rows) or 0.0)

    def draft_seconds(self, num_drafted: int, depth: int) -> float:
        """The expected seconds of drafting: interpolated linearly between measured depths, scaled like the target's pass for
        more requests.

        Outside the measured depths the estimate is low, so that a depth is tried: lower depths cost in proportion, higher ones
        continue the slope. In proportion both ways would keep the controller at depth 1, where syncing is most of the cost.
        """
        points = [(known, self._measured(table, num_drafted)) for known, table in self.draft.items() if table.costs]
        if not points:
            return (self.verify_seconds(num_drafted) or 0.0) * USUAL_DRAFT_SHARE * depth
        after = bisect_left(points, (depth,))
        if after == 0:
            return points[0][1] * depth / points[0][0]
        # Beyond the highest measured depth: the slope between the lowest and the highest.
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
CORRECTION_DECAY = 0.001  # per launch, other depths' corrections move this far towards the launched one's: contexts change
GraphShape = tuple[int, ...]  # batch size, depth, sampling mode, optionally a KV length bucket


class GraphCosts:
    """The costs of recorded cycles, corrected by launches, because recording measures empty rows, without keys to attend to.

    A shape that was not launched yet gets the smallest correction seen at its batch size, so that it gets tried. Corrections of
    depths that are no longer used slowly approach that of the depth in use.
    """

    def __init__(self, recorded: Mapping[GraphShape, float]) -> None:
        """`recorded`: seconds by shape; it may grow."""
        self.recorded = recorded
        self.batch: tuple[int, ...] = ()  # the next cycle's shape without its depth; set by the executor
        self.corrections: dict[GraphShape, dict[int, float]] = {}  # by shape without depth, then by depth: seconds to add

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
        """The expected seconds of a cycle of this shape; None: it was never recorded."""
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
