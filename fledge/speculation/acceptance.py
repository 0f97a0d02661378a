"""The acceptance model: how many tokens a cycle of each depth is expected to emit, learnt from accepted drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

# The depths that are compared, besides the limit itself. In captured cycles each needs a graph per batch size.
COMPARED_DEPTHS = (1, 2, 3, 4, 5)
# A plain captured cycle leaves the drafter stale, so speculation is given up only if it is clearly slower.
MARGIN = 1.02
PRIOR_RATE, PRIOR_TRIALS = 0.7, 50.0
PRIOR_STEPS = 5.0  # weight of the prior for how often the drafter continues a draft
DECAY = 0.999  # factor on the counts per step of one request


class AcceptanceModel:
    """Decayed acceptance counts by draft position; chooses the depth that is fastest at given step costs."""

    def __init__(self, limit: int, margin: float = MARGIN) -> None:
        """`limit`: the configured depth; 0: speculation is off."""
        self.limit, self.margin = limit, margin
        self.tolerance = 0.0  # of the depths whose speed is within this share of the highest, the deepest is chosen
        self.gain = 1.0  # expected speed-up of the last choice over plain cycles
        self.depths = sorted({depth for depth in COMPARED_DEPTHS if depth < limit} | {limit}) if limit else []
        self.forget()

    def forget(self) -> None:
        """Resets to the prior, so that deep drafts are tried: for new drafter weights the old counts do not apply."""
        limit = self.limit
        self.tried = [PRIOR_TRIALS * PRIOR_RATE**place for place in range(limit)]  # steps accepted up to this position
        self.accepted = [PRIOR_TRIALS * PRIOR_RATE ** (place + 1) for place in range(limit)]  # … and at it
        self.offered = [0.0] * limit  # drafts that reached this position and could have been continued
        self.drafted = [0.0] * limit  # … and were continued

    def record(self, depth: int, accepted: int, times: int = 1, drafted: int | None = None) -> None:
        """Records steps. `depth`: how deep it could have drafted; `drafted`: how deep it did, if the drafter may stop early."""
        kept = DECAY**times
        for place in range(min(depth, accepted + 1)):
            self.tried[place] = self.tried[place] * kept + times
            self.accepted[place] = self.accepted[place] * kept + times * (accepted > place)
        if drafted is not None:
            for place in range(min(depth, drafted + 1)):
                self.offered[place] = self.offered[place] * kept + times
                self.drafted[place] = self.drafted[place] * kept + times * (drafted > place)

    def decay(self) -> None:
        """Moves the counts towards the prior after a plain step, so that poor drafts are tried again eventually."""
        for place in range(self.limit):
            usual = PRIOR_TRIALS * PRIOR_RATE**place
            self.tried[place] += (usual - self.tried[place]) * (1 - DECAY)
            self.accepted[place] += (usual * PRIOR_RATE - self.accepted[place]) * (1 - DECAY)

    def tokens(self, depth: int) -> float:
        """The expected tokens per cycle for a request that is drafted for."""
        total = reached = 1.0
        for place in range(depth):
            reached *= self.accepted[place] / self.tried[place]
            total += reached
        return total

    def nodes(self, depth: int) -> float:
        """The expected number of drafted tokens of a draft up to `depth`.

        Positions with few counts are assumed to be continued as often as the position before.
        """
        total, reached, rate = 0.0, 1.0, 1.0
        for drafted, offered in zip(self.drafted[:depth], self.offered, strict=False):
            rate = (drafted + PRIOR_STEPS * rate) / (offered + PRIOR_STEPS)
            reached *= rate
            total += reached
        return total

    def mean_tokens(self, depth: int, share: float, allowed: Sequence[int] = ()) -> float:
        """The expected tokens per cycle and request, averaged over all requests; `share` and `allowed` as in `choose`."""
        counts = Counter(min(limit, depth) for limit in allowed) or Counter({depth: 1})
        tokens = sum(count * self.tokens(limit) for limit, count in counts.items()) / counts.total()
        return 1 - share + share * tokens

    def choose(self, share: float, seconds: Callable[[int], float | None], allowed: Sequence[int] = ()) -> int:
        """The depth with the highest expected tokens/s.

        `share`: the share of running requests that can be drafted for. `seconds(depth)`: a cycle's cost; None: not known.
        `allowed`: the depth limit of each of these; tokens drafted beyond it are not expected to be accepted.
        """
        if not (self.limit and share):
            return 0
        deepest = min(max(allowed, default=self.limit), self.limit)
        depths = [depth for depth in self.depths if depth <= next(cover for cover in self.depths if cover >= deepest)]
        plain = seconds(0)
        costs = {depth: cost for depth in depths if (cost := seconds(depth)) is not None}
        if plain is None or not costs:
            return depths[-1]
        speeds = {depth: self.mean_tokens(depth, share, allowed) / cost for depth, cost in costs.items()}
        highest = max(speeds.values())
        self.gain = highest * plain
        best = max(depth for depth, speed in speeds.items() if speed >= highest * (1 - self.tolerance))
        return best if self.gain * self.margin >= 1 else 0
