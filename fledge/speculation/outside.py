"""Tokens that a drafter cannot name, because its vocabulary leaves out what the target seldom says."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# Before anything was seen: as if so many tokens had been, with the recorded share of them outside, or this one.
PRIOR_TOKENS, PRIOR_SHARE = 64.0, 0.02
DECAY = 0.999  # a token: what counts are the last thousand or so
LEAST = 1e-3  # of what the vocabulary is taken to cover, so that logarithms stay finite


class OutsideShare:
    """How often the target's next token lies outside the draft vocabulary: a prior, then what all requests saw lately.

    A drafter's probabilities know nothing of these tokens: its 0.9 is 0.9 of what it can name.
    """

    def __init__(self, ids: Collection[int] | None, coverage: float | None = None) -> None:
        """`ids`: the target's ids that can be drafted; None: all of them. `coverage`: of the training answers, if recorded."""
        self.ids = None if ids is None else frozenset(ids)
        self.prior = 0.0
        if self.ids is not None:
            self.prior = PRIOR_SHARE if coverage is None else min(max(1 - coverage, 0.0), 1.0)
        self._seen, self._outside = PRIOR_TOKENS, PRIOR_TOKENS * self.prior

    def holds(self, token: int) -> bool:
        """Whether the drafter could have named it."""
        return self.ids is None or token in self.ids

    def saw(self, tokens: Sequence[int]) -> None:
        """What the target said, drafted or not."""
        if self.ids is None:
            return
        for token in tokens:
            self._seen = self._seen * DECAY + 1
            self._outside = self._outside * DECAY + (token not in self.ids)

    @property
    def share(self) -> float:
        return self._outside / self._seen

    @property
    def covered(self) -> float:
        """What a drafter's probability is multiplied by to be the target's; exactly 1 for a full vocabulary."""
        return 1.0 if self.ids is None else max(1 - self.share, LEAST)

    @property
    def covered_at_first(self) -> float:
        """The same before anything was seen, for requests that must not depend on what others said."""
        return max(1 - self.prior, LEAST)
