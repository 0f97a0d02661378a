"""Verification: finds the accepted path of a draft and the next token from the target's choices.

Row 0 of a verification pass is the last settled token; row i + 1 is draft node i.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Draft:
    """A tree of drafted tokens; a chain is a tree in which every node's parent is the previous node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # index of the parent node; -1: the settled text
    confidences: list[float] = field(default_factory=list)  # the drafter's own probability for each token

    @classmethod
    def chain(cls, tokens: list[int], confidences: Sequence[float] = ()) -> Draft:
        return cls(tokens, list(range(-1, len(tokens) - 1)), list(confidences))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def depths(self) -> list[int]:
        """The depth of each node, from 1."""
        if self.is_chain:
            return list(range(1, len(self.parents) + 1))
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    @property
    def depth(self) -> int:
        return len(self.tokens) if self.is_chain else max(self.depths())

    def children(self, node: int) -> list[int]:
        return [index for index, parent in enumerate(self.parents) if parent == node]

    def tail_mask(self) -> Tensor:
        """The mask [1 + n, 1 + n]: which of the new tokens (the last settled one first) each of them sees."""
        mask = torch.zeros(len(self) + 1, len(self) + 1, dtype=torch.bool)
        mask[:, 0] = True
        for index, parent in enumerate(self.parents):
            if parent >= 0:
                mask[index + 1] |= mask[parent + 1]
            mask[index + 1, index + 1] = True
        return mask


class VerifiedPass(NamedTuple):
    """One target pass of a request, for statistics."""

    num_tokens: int  # emitted tokens
    depth: int = 0  # depth of the draft; 0: no draft
    nodes: int = 0  # drafted tokens verified; more than `depth` in a tree
    offered: int = 0  # the planned depth; more than `depth` if the drafter stopped early
    confidences: Sequence[float] = ()  # the drafter's own probabilities, if they estimate how often it is right


class Verification(NamedTuple):
    accepted: list[int]  # draft nodes, from the root down
    next_token: int  # the target's own token: the correction, or the bonus token if all were accepted


def verify(chosen: Sequence[int], draft: Draft) -> Verification:
    """Walks down the draft as long as it contains the token that the target chose.

    `chosen[row]`: the target's choice after each row, greedy or drawn. Draws depend on (seed, position) only, so the emitted
    token is the target's own draw whatever was drafted: the same distribution and text as without speculation.
    """
    if draft.is_chain:
        for node, token in enumerate(draft.tokens):
            if (wanted := chosen[node]) != token:
                return Verification(list(range(node)), wanted)
        return Verification(list(range(len(draft))), chosen[len(draft)])
    accepted: list[int] = []
    node = -1
    while True:
        wanted = chosen[node + 1]
        node = next((child for child in draft.children(node) if draft.tokens[child] == wanted), -1)
        if node < 0:
            return Verification(accepted, wanted)
        accepted.append(node)


class LazyChoices(Sequence[int]):
    """The target's choice after each row, computed by `choose(row, path to it)` when `verify` reads it.

    Penalties and grammars depend on the path, and most rows of a rejected draft are never read.
    """

    def __init__(self, choose: Callable[[int, list[int]], int], draft: Draft) -> None:
        self.choose, self.draft = choose, draft

    def __len__(self) -> int:
        return len(self.draft) + 1

    def __getitem__(self, row: int) -> int:  # type: ignore[override]  # no slices: `verify` asks for one row at a time
        path, node = [], row - 1
        while node >= 0:
            path.append(self.draft.tokens[node])
            node = self.draft.parents[node]
        return self.choose(row, path[::-1])
