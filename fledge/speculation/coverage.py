"""Draft-vocabulary coverage: how often the target's next token is in the draft vocabulary."""

from __future__ import annotations

from collections.abc import Collection, Sequence

# The prior counts as this many tokens, with the recorded share outside the vocabulary, or this share if none is recorded.
PRIOR_TOKENS, PRIOR_SHARE = 64.0, 0.02
DECAY = 0.999  # per token: about the last thousand tokens count
LEAST = 1e-3  # smallest coverage, so that logarithms stay finite


class VocabularyCoverage:
    """A running estimate over the tokens of all requests, starting from the coverage that training recorded.

    A drafter's probabilities are relative to its own vocabulary: 0.9 means 0.9 of the probability that is covered.
    """

    def __init__(self, ids: Collection[int] | None, coverage: float | None = None) -> None:
        """`ids`: the target ids that can be drafted; None: all. `coverage`: that of the training answers, if recorded."""
        self.ids = None if ids is None else frozenset(ids)
        self.start_from(coverage)

    def start_from(self, coverage: float | None) -> None:
        """Resets the estimate to a recorded coverage; None: to the default prior."""
        prior = 0.0
        if self.ids is not None:
            prior = PRIOR_SHARE if coverage is None else min(max(1 - coverage, 0.0), 1.0)
        self._seen, self._outside = PRIOR_TOKENS, PRIOR_TOKENS * prior

    def holds(self, token: int) -> bool:
        """Whether the token is in the draft vocabulary."""
        return self.ids is None or token in self.ids

    def record(self, tokens: Sequence[int]) -> None:
        """Counts emitted tokens, drafted or not."""
        if self.ids is None:
            return
        for token in tokens:
            self._seen = self._seen * DECAY + 1
            self._outside = self._outside * DECAY + (token not in self.ids)

    @property
    def share(self) -> float:
        """Share of tokens outside the draft vocabulary."""
        return self._outside / self._seen

    @property
    def covered(self) -> float:
        """Factor from the drafter's probability to the target's; exactly 1 for a full vocabulary."""
        return 1.0 if self.ids is None else max(1 - self.share, LEAST)
