"""The settings of how deep to draft: `DepthPolicy` and `TreeShape`."""

from __future__ import annotations

from dataclasses import dataclass

from fledge.errors import UserError


@dataclass(frozen=True)
class DepthPolicy:
    """How deep to draft: up to `limit` tokens; a draft stops when its joint probability falls below `threshold`."""

    limit: int
    threshold: float = 0.0  # 0: always to the limit

    def __str__(self) -> str:
        return f"auto (up to {self.limit})" if self.threshold else str(self.limit)

    def goes_on(self, depth: int, joint_probability: float) -> bool:
        """Whether a draft of `depth` tokens gets another one."""
        return depth < self.limit and joint_probability >= self.threshold

    @classmethod
    def parse(cls, text: str | int, *, on_cpu: bool = True) -> DepthPolicy:
        """Parses `5` (always 5) or `auto` (up to 7, on a GPU 6, while the joint probability makes a token worth its cost)."""
        if isinstance(text, str) and text.strip().lower() == "auto":
            return cls(CPU_LIMIT if on_cpu else GPU_LIMIT, AUTO_THRESHOLD)
        try:
            limit = int(text) if isinstance(text, str | int) and not isinstance(text, bool) else 0
        except ValueError:
            limit = 0
        if not 1 <= limit <= 64:
            raise UserError(f"depth must be a number from 1 to 64 or 'auto', not {text!r}")
        return cls(limit)


# A CPU's linears process at most eight verified rows at once. 7 drafted tokens instead of 6 give 1-2 % more tokens/s.
CPU_LIMIT, GPU_LIMIT = 7, 6
# On CPU a draft step costs a twentieth of a target step and a further verified row a thirteenth, so a token pays if it is
# accepted in one of five cases; values around that make little difference (depth 5 to 8, threshold 0.15 to 0.25).
AUTO_THRESHOLD = 0.2


@dataclass(frozen=True)
class TreeShape:
    """EAGLE-2's dynamic tree: `width` candidates per node, `width` nodes expanded per level; the best `nodes` are verified."""

    width: int = 4
    nodes: int = 12

    def __post_init__(self) -> None:
        if not (1 <= self.width <= 16 and 1 <= self.nodes <= 63):
            raise UserError("a draft tree has a width of 1 to 16 and 1 to 63 nodes")

    def num_nodes(self, depth: int, vocab_size: int | None = None) -> int:
        """The number of drafted tokens verified per request: less than `nodes` if a tree of this depth has fewer."""
        width = self.width if vocab_size is None else min(self.width, vocab_size)
        return min(self.nodes, width + width**2 * (depth - 1))
