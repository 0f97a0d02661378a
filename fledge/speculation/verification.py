"""Which drafted tokens stand. Pure: target rows, a draft and a random generator in; the accepted path and the next token out.

Row 0 of a verification pass follows the last settled token; row i + 1 follows draft node i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Draft:
    """A tree of proposed tokens; a chain is the tree in which every node follows the one before."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the node before; -1: follows the settled text
    confidences: list[float] = field(default_factory=list)  # the drafter's own probability for each token
    # Rows [V] the tokens were sampled from; None: the tokens were chosen outright (a point distribution).
    # Only chains carry rows: the children of a tree node are chosen outright.
    probs: list[Tensor] | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return all(parent == index - 1 for index, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Depth of each node, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        return max(self.depths(), default=0)

    def children(self, node: int) -> list[int]:
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def tail_mask(self) -> Tensor:
        """[1 + n, 1 + n]: which of the new tokens (the settled one first) each of them sees."""
        mask = torch.zeros(len(self) + 1, len(self) + 1, dtype=torch.bool)
        mask[:, 0] = True
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                mask[index + 1] |= mask[parent + 1]
            mask[index + 1, index + 1] = True
        return mask


class Verdict(NamedTuple):
    accepted: list[int]  # draft nodes, from the root down
    next_token: int  # the target's own: the correction, or the bonus token when all were accepted


def verify_greedy(best: Sequence[int], draft: Draft) -> Verdict:
    """`best[row]`: the target's most likely token after each row."""
    accepted: list[int] = []
    node = -1
    while True:
        wanted = best[node + 1]
        node = next((child for child in draft.children(node) if draft.tokens[child] == wanted), -1)
        if node < 0:
            return Verdict(accepted, wanted)
        accepted.append(node)


def verify_sampled(row: Callable[[int, list[int]], Tensor], draft: Draft, generator: torch.Generator | None = None) -> Verdict:
    """Speculative sampling: the result has the target's distribution, whatever the drafter proposes.

    `row(index, path)`: the target's distribution [V] after that row, `path` being the tokens accepted on the way to it.
    A token drawn from q stands with probability min(1, p/q), else one is drawn from max(p - q, 0). A token chosen outright
    is the case q = 1: it stands with probability p, else p without it goes on to the next child.
    """
    accepted: list[int] = []
    path: list[int] = []
    node = -1
    while True:
        p = row(node + 1, path)
        chosen = -1
        for child in draft.children(node):
            token = draft.tokens[child]
            q = None if draft.probs is None else draft.probs[child]
            ratio = float(p[token]) / (1.0 if q is None else float(q[token]))
            if float(torch.rand((), generator=generator)) < ratio:
                chosen = child
                break
            residual = _without(p, token) if q is None else (p - q).clamp_(min=0)
            total = residual.sum()
            if total <= 0:  # p and q are equal up to rounding: nothing is left to correct
                break
            p = residual / total
        if chosen < 0:
            return Verdict(accepted, int(torch.multinomial(p, 1, generator=generator)))
        accepted.append(chosen)
        path.append(draft.tokens[chosen])
        node = chosen


def _without(p: Tensor, token: int) -> Tensor:
    p = p.clone()
    p[token] = 0
    return p
