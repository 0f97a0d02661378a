"""What a captured cycle takes: as it was seen to take lately; before that, as recorded.

Cycles are recorded with all rows empty, where attention has nothing to read. One that was not seen yet is taken to be as much
longer than recorded as the least stretched of those that were, at the same batch size: so it is rather tried than not.
"""

from __future__ import annotations

from collections.abc import Mapping

NEWEST = 0.05  # share of the latest cycle in what was seen
Shape = tuple[int, int, int]  # batch size, depth, how tokens are chosen


class CycleTimes:
    def __init__(self, recorded: Mapping[Shape, float]) -> None:
        """`recorded`: seconds by shape; it may grow."""
        self.recorded = recorded
        self.seen: dict[Shape, float] = {}

    def saw(self, shape: Shape, seconds: float) -> None:
        before = self.seen.get(shape, seconds)
        self.seen[shape] = before + (seconds - before) * NEWEST

    def seconds(self, shape: Shape) -> float | None:
        """None: nothing is known of it."""
        if shape in self.seen or shape not in self.recorded:
            return self.seen.get(shape)
        size, _, how = shape
        alike = [seen for seen in self.seen if (seen[0], seen[2]) == (size, how) and seen in self.recorded]
        more = (self.seen[one] - self.recorded[one] for one in alike)
        return self.recorded[shape] + max(min(more, default=0.0), 0.0)
