"""Acceptance statistics: the different definitions in use, each under its own name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class AcceptanceStats:
    """Counts over speculative steps. Tokens after a stop are not emitted and not counted."""

    steps: int = 0  # verification passes with a draft
    drafted: int = 0  # drafted tokens that were verified
    accepted: int = 0  # drafted tokens that were emitted
    emitted: int = 0  # all tokens emitted by those steps
    drafted_at: list[int] = field(default_factory=list)  # [d]: steps whose draft reached depth d + 1
    accepted_at: list[int] = field(default_factory=list)  # [d]: steps that accepted a token at depth d + 1

    def add_step(self, nodes: int, depth: int, accepted: int, emitted: int, times: int = 1) -> None:
        """Counts a step, or `times` equal ones."""
        self.steps += times
        self.drafted += times * nodes
        self.accepted += times * accepted
        self.emitted += times * emitted
        missing = max(depth, accepted) - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for position in range(depth):
            self.drafted_at[position] += times
        for position in range(accepted):
            self.accepted_at[position] += times

    def merge(self, other: AcceptanceStats) -> None:
        for name in ("steps", "drafted", "accepted", "emitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("drafted_at", "accepted_at"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for position, count in enumerate(theirs):
                mine[position] += count

    @property
    def acceptance_length(self) -> float:
        """The micro average: 1 + accepted / steps, as in vLLM."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def unconditional_rates(self) -> list[float]:
        """[d]: the share of all steps that accepted at depth d + 1 (vLLM's per-position acceptance)."""
        return [count / self.steps for count in self.accepted_at] if self.steps else []

    @property
    def conditional_rates(self) -> list[float]:
        """[d]: of the steps that accepted at depth d (for d = 0: all steps), the share that also accepted at depth d + 1."""
        before = [self.steps, *self.accepted_at[:-1]] if self.accepted_at else []
        return [count / base if base else 0.0 for count, base in zip(self.accepted_at, before, strict=True)]

    @classmethod
    def total(cls, parts: Iterable[AcceptanceStats]) -> AcceptanceStats:
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    def to_dict(self) -> dict[str, object]:
        return {
            "steps": self.steps,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "acceptance_length": self.acceptance_length,
            "acceptance_by_position": self.unconditional_rates,
            "acceptance_by_position_conditional": self.conditional_rates,
        }


def macro_acceptance_length(parts: Iterable[AcceptanceStats]) -> float:
    """The macro average: each request's tokens per step, averaged over requests (SPEED-Bench's definition)."""
    lengths = [part.acceptance_length for part in parts if part.steps]
    return sum(lengths) / len(lengths) if lengths else 1.0
