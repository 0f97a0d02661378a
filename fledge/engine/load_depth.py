"""How deep to draft under the present load: what a cycle costs at this batch size against what it is likely to say."""

from __future__ import annotations

from collections.abc import Callable

# Depths that are weighed, besides the limit itself. Each is a graph per batch size.
WEIGHED = (1, 2, 3, 5)
# A plain step leaves the drafter behind for good, so speculation is given up only where it clearly loses.
MARGIN = 1.02
PRIOR_RATE, PRIOR_TRIALS = 0.7, 50.0
DECAY = 0.999  # of what was seen, per step of one request


class LoadDepth:
    def __init__(self, limit: int) -> None:
        """`limit`: the deepest that was asked for; 0: speculation is off."""
        self.limit = limit
        self.depths = sorted({depth for depth in WEIGHED if depth < limit} | {limit}) if limit else []
        self.tried = [PRIOR_TRIALS * PRIOR_RATE**place for place in range(limit)]  # steps whose draft stood up to here
        self.stood = [PRIOR_TRIALS * PRIOR_RATE ** (place + 1) for place in range(limit)]  # … and here too

    def saw(self, depth: int, accepted: int, times: int = 1) -> None:
        kept = DECAY**times
        for place in range(min(depth, accepted + 1)):
            self.tried[place] = self.tried[place] * kept + times
            self.stood[place] = self.stood[place] * kept + times * (accepted > place)

    def tokens(self, depth: int) -> float:
        """Expected a cycle, for a request that is drafted for."""
        total = reached = 1.0
        for place in range(depth):
            reached *= self.stood[place] / self.tried[place]
            total += reached
        return total

    def choose(self, share: float, seconds: Callable[[int], float | None]) -> int:
        """`share`: of the running requests, those that can be drafted for. `seconds(depth)`: a cycle's cost, if known."""
        if not (self.limit and share):
            return 0
        plain = seconds(0)
        if plain is None:
            return self.limit
        speeds = {depth: (1 - share + share * self.tokens(depth)) / seconds(depth) for depth in self.depths}
        best = max(speeds, key=speeds.get)
        return best if speeds[best] * MARGIN >= 1 / plain else 0
