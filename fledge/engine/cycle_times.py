"""What a captured cycle takes: as it was seen to take lately; before that, as recorded.

Cycles are recorded with all rows empty, where attention has nothing to read. One that was not seen yet is taken to be as much
longer than recorded as the least stretched of those that were, at the same batch size: so it is rather tried than not. What was
seen at a depth that is not used any more slowly becomes as stretched as the one in use.
"""

from __future__ import annotations

from collections.abc import Mapping

NEWEST = 0.05  # share of the latest cycle in what was seen
FADING = 0.001  # of what was seen at other depths, a cycle: contexts grow and shrink meanwhile
Shape = tuple[int, ...]  # batch size, depth, how tokens are chosen, perhaps a reach


class CycleTimes:
    def __init__(self, recorded: Mapping[Shape, float]) -> None:
        """`recorded`: seconds by shape; it may grow."""
        self.recorded = recorded
        self.stretches: dict[Shape, dict[int, float]] = {}  # by shape without depth: by depth, seconds more than recorded

    def saw(self, shape: Shape, seconds: float) -> None:
        if shape not in self.recorded:
            return
        size, depth, *others = shape
        more = seconds - self.recorded[shape]
        stretches = self.stretches.setdefault((size, *others), {})
        stretches[depth] = now = stretches.get(depth, more) + (more - stretches.get(depth, more)) * NEWEST
        for other, before in stretches.items():
            stretches[other] = before + (now - before) * FADING

    def seconds(self, shape: Shape) -> float | None:
        """None: it was never recorded."""
        if shape not in self.recorded:
            return None
        size, depth, *others = shape
        stretches = self.stretches.get((size, *others), {})
        return self.recorded[shape] + stretches.get(depth, max(min(stretches.values(), default=0.0), 0.0))
