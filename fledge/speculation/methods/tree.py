"""EAGLE-2's dynamic draft trees: in fixed shapes for captured cycles, and on the host (`GrowingTree`), with equal results.

B rows, W nodes expanded per level, N nodes verified, T = 1 + N rows of a verification pass (the pending token's first).

    grow_tree     the W likeliest tokens; then the W best nodes of each level get W children each; keeps the best N of all
    (verify)      the target reads T tokens per row; `verify_attention` gives their slots and mask
    accept_tree   walks from the root as long as a child is the token that the target chose
    collapse      turns the walked path into a chain, so that the rest of the cycle (`kernels.accept`, …) needs no trees

The text of a row is settled up to `starts` = its length - 1; the pending token is verified there. The nodes follow:

    target's cache    | settled | pending | node 0 | … | node N - 1 |
    drafter's cache   | settled | W nodes of level 1 | W nodes of level 2 | …       only nodes that are expanded

Only `GrowingTree` waits for the device or reads values on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fledge.errors import UserError
from fledge.kernels.attention.decode_attention import MAX_TAIL
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import SequenceLayout
from fledge.speculation.depth import TreeShape
from fledge.speculation.verification import Draft

if TYPE_CHECKING:
    from fledge.speculation.methods.base import AcceptedSpan


class TreeDraft(NamedTuple):
    """Draft trees of B rows. Nodes are sorted by level, so that a parent comes before its children."""

    tokens_BN: Tensor  # int64
    parents_BN: Tensor  # int64: index of the parent node; -1: the pending token
    depths_BN: Tensor  # int64, from 1: a node's position is `starts` + depth
    tail_bits_BT: Tensor  # int64: which of the T new tokens each of them sees; see `kernels.decode_attention`


class Frontier(NamedTuple):
    """The nodes that a level expands, as inputs of the drafter."""

    tokens_BW: Tensor
    h_BWD: Tensor  # the states that they are paired with
    offset: int  # their position is `starts` + offset
    tail_bits_BW: Tensor  # which of the last `tail` keys each of them sees
    tail: int  # number of keys after the settled text, ending with the frontier's own


# One pass of the drafter over a frontier: logits [B, W, V] over the draft vocabulary, and the states [B, W, D] to be fed back.
DraftStep = Callable[[Frontier], tuple[Tensor, Tensor]]


class TreePath(NamedTuple):
    rows_BT: Tensor  # int64 [B, depth + 1], rows of the verification pass: 0, then 1 + node; after the end the last is repeated
    counts_B: Tensor  # int32: nodes on the path; 0 for an empty row


def check_shape(shape: TreeShape, max_depth: int) -> None:
    """Raises if a tree expands more nodes than the attention kernel's mask has bits."""
    if shape.width * (max_depth - 1) > MAX_TAIL:
        raise UserError(
            f"a draft tree of width {shape.width} and depth {max_depth} expands {shape.width * (max_depth - 1)} nodes; "
            f"at most {MAX_TAIL} are supported on a GPU: lower the width or the depth"
        )


def grow_tree(
    logits_BV: Tensor,
    h_BD: Tensor,
    step: DraftStep,
    shape: TreeShape,
    depth: int,
    *,
    target_ids_V: Tensor | None = None,
    log_covered: Tensor | float = 0.0,
) -> TreeDraft:
    """Drafts a tree of `depth` levels per row. `logits_BV`, `h_BD`: the drafter's output for the last settled pair.

    `target_ids_V`: the target ids of a draft vocabulary's ids. `log_covered`: logarithm of the share of the target's
    probability on tokens in the draft vocabulary, a number or [B, 1].
    """
    batch, width, device = len(logits_BV), min(shape.width, logits_BV.shape[-1]), logits_BV.device
    rank_W = torch.arange(width, device=device)
    # The F nodes expanded last (the root, then W): their indices, scores, states, and the drafter's keys that they see.
    expanded_BF = torch.full((batch, 1), -1, device=device)
    # Summed in float64 as on the host, where scores are Python floats: both must rank nodes in the same order.
    expanded_scores_BF = torch.zeros((batch, 1), dtype=torch.float64, device=device)
    seen_BF = torch.zeros((batch, 1), dtype=torch.int64, device=device)
    logits_BFV, h_BFD = logits_BV[:, None], h_BD[:, None]
    tokens, parents, scores, depths = [], [], [], []
    num_grown = 0
    for level in range(1, depth + 1):
        log_probs_BFW, ids_BFW = logits_BFV.float().log_softmax(-1).topk(width, -1)
        tokens.append((ids_BFW if target_ids_V is None else target_ids_V[ids_BFW]).flatten(1))
        parents.append(expanded_BF.repeat_interleave(width, 1))
        scores.append(((expanded_scores_BF + log_covered)[..., None] + log_probs_BFW).flatten(1))
        depths.append(torch.full_like(parents[-1], level))
        if level == depth:
            break
        chosen_BW = _best(scores[-1], width)
        parent_rank_BW = chosen_BW // width
        expanded_BF = num_grown + chosen_BW
        expanded_scores_BF = scores[-1].gather(1, chosen_BW)
        seen_BF = seen_BF.gather(1, parent_rank_BW) | _bit(rank_W + width * (level - 1))
        h_BFD = _take(h_BFD, parent_rank_BW)
        num_grown += scores[-1].shape[1]
        frontier = Frontier(tokens[-1].gather(1, chosen_BW), h_BFD, level - 1, seen_BF, width * level)
        logits_BFV, h_BFD = step(frontier)
    grown = (torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), torch.cat(depths, 1))
    return _kept(*grown, shape.nodes, depth)


def _best(scores_BM: Tensor, count: int) -> Tensor:
    """The indices of the highest scores, best first; ties in order of index, which `topk` does not guarantee."""
    return scores_BM.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _kept(tokens_BM: Tensor, parents_BM: Tensor, scores_BM: Tensor, depths_BM: Tensor, nodes: int, depth: int) -> TreeDraft:
    # A child's score is never above its parent's and ties go to the first, so every kept node's parent is kept too.
    best_BN = _best(scores_BM, nodes).sort(dim=1).values
    place_N = torch.arange(best_BN.shape[1], device=best_BN.device)
    places_BM = torch.full_like(parents_BM, -1).scatter_(1, best_BN, place_N.expand_as(best_BN))
    old_parents_BN = parents_BM.gather(1, best_BN)
    parents_BN = torch.where(old_parents_BN < 0, -1, places_BM.gather(1, old_parents_BN.clamp(min=0)))
    return TreeDraft(tokens_BM.gather(1, best_BN), parents_BN, depths_BM.gather(1, best_BN), tail_bits(parents_BN, depth))


def tail_bits(parents_BN: Tensor, depth: int) -> Tensor:
    """The attention mask, int64 [B, 1 + N]: bit j of a row: it sees row j (itself, its ancestors and the pending token)."""
    batch, count = parents_BN.shape
    assert count < MAX_TAIL
    # Indices of rows from here on, not of nodes; the pending token is its own parent.
    above_BT = torch.cat([parents_BN.new_zeros(batch, 1), parents_BN + 1], 1)
    bits_BT = _bit(torch.arange(1 + count, device=parents_BN.device)).expand(batch, -1)
    for _ in range(depth.bit_length()):  # each round doubles the number of generations seen
        bits_BT = bits_BT | bits_BT.gather(1, above_BT)
        above_BT = above_BT.gather(1, above_BT)
    return bits_BT


def tree_attention(
    starts_B: Tensor,
    active_B: Tensor,
    offsets_BT: Tensor | int,
    tail_bits_BT: Tensor,
    tail: int,
    page_table_BP: Tensor,
    page_size: int,
) -> AttentionMetadata:
    """Attention metadata of T new tokens per row, in the target's or the drafter's cache: the last T of the `tail` keys after
    `starts`. `offsets_BT`: their positions, from `starts`. An empty row has no keys and stores none."""
    is_active_B1, starts_B1 = active_B[:, None] != 0, starts_B[:, None].long()
    num_new = tail_bits_BT.shape[1]
    places_BT = starts_B1 + torch.arange(tail - num_new, tail, device=starts_B.device)
    # The page table may be cut to the pages of active rows. Places of empty rows are unused, but must be within its width.
    pages_BT = page_table_BP.gather(1, (places_BT // page_size).clamp(0, page_table_BP.shape[1] - 1)).long()
    slots_BT = torch.where(is_active_B1, pages_BT * page_size + places_BT % page_size, -1)
    positions_BT = torch.where(is_active_B1, starts_B1 + offsets_BT, 0).expand(-1, num_new).contiguous()
    kv_lens_B = torch.where(active_B != 0, starts_B + tail, 0).int()
    return AttentionMetadata.tree(page_table_BP, kv_lens_B, positions_BT.flatten(), slots_BT.flatten(), tail_bits_BT, tail)


def verify_attention(
    tree: TreeDraft, starts_B: Tensor, active_B: Tensor, page_table_BP: Tensor, page_size: int
) -> AttentionMetadata:
    """Attention metadata of the target's pass over the pending token and the tree."""
    bits_BT = tree.tail_bits_BT
    return tree_attention(starts_B, active_B, row_depths(tree), bits_BT, bits_BT.shape[1], page_table_BP, page_size)


def row_depths(tree: TreeDraft) -> Tensor:
    """The distance of each verified row from the settled text, int64 [B, 1 + N]; sampled rows draw that many tokens ahead."""
    return torch.cat([torch.zeros_like(tree.depths_BN[:, :1]), tree.depths_BN], 1)


def accept_tree(chosen_BT: Tensor, tree: TreeDraft, depth: int, active_B: Tensor) -> TreePath:
    """The accepted path. `chosen_BT`: the target's choice after the pending token and after each node.

    Of several children with the chosen token the first is accepted, as in `verification.verify`.
    """
    count = tree.tokens_BN.shape[1]
    node_N = torch.arange(count, device=chosen_BT.device)
    goes_on_B1 = active_B[:, None] != 0
    row_B1 = torch.zeros_like(chosen_BT[:, :1])
    rows, counts_B1 = [row_B1], torch.zeros_like(row_B1)
    for _ in range(depth):
        fits_BN = (tree.parents_BN + 1 == row_B1) & (tree.tokens_BN == chosen_BT.gather(1, row_B1)) & goes_on_B1
        first_B1 = torch.where(fits_BN, node_N, count).amin(1, keepdim=True)
        goes_on_B1 = first_B1 < count
        row_B1 = torch.where(goes_on_B1, first_B1 + 1, row_B1)
        counts_B1 = counts_B1 + goes_on_B1
        rows.append(row_B1)
    return TreePath(torch.cat(rows, 1), counts_B1[:, 0].int())


def collapse(chosen_BT: Tensor, tree: TreeDraft, path: TreePath) -> tuple[Tensor, Tensor]:
    """The path as a chain: the target's choices [B, depth + 1] along it and the drafts [B, depth], -1 after its end.

    No choice equals -1, so `kernels.accept` stops at the path's end.
    """
    nodes_BD = path.rows_BT[:, 1:] - 1
    is_on_path = torch.arange(nodes_BD.shape[1], device=nodes_BD.device) < path.counts_B[:, None]
    drafts_BD = torch.where(is_on_path, tree.tokens_BN.gather(1, nodes_BD.clamp(min=0)), -1)
    return chosen_BT.gather(1, path.rows_BT), drafts_BD


def along_path(x_ND: Tensor, path: TreePath) -> Tensor:
    """The rows of a verification pass [B * T, D] along each path, [B * (depth + 1), D], in the layout of a chain's pass."""
    batch = len(path.rows_BT)
    return _take(x_ND.view(batch, -1, x_ND.shape[-1]), path.rows_BT).flatten(0, 1)


def _take(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    return x_BND.gather(1, index_BM[..., None].expand(-1, -1, x_BND.shape[-1]))


def _bit(place: Tensor) -> Tensor:
    return torch.ones_like(place) << place


class GrowingTree:
    """One request's tree, grown on the host level by level, for the eager executor."""

    def __init__(self, item: AcceptedSpan, width: int, log_covered: float) -> None:
        self.item, self.width, self.log_covered = item, width, log_covered
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []  # joint log-probability
        self.frontier: list[int] = []  # nodes of the last level that are expanded next
        self.visible: dict[int, list[int]] = {}  # node -> cache slots (from the settled text's end) of its path
        self.num_slots = 0

    def add_level(self, log_probs: list[list[float]], tokens: list[list[int]]) -> list[int]:
        """Adds children to every frontier node; returns, for each node of the new frontier, the row of its parent."""
        expanded = self.frontier or [-1]
        first = len(self.tokens)
        rows = []
        for row, parent in enumerate(expanded):
            base = (self.scores[parent] if parent >= 0 else 0.0) + self.log_covered
            for log_prob, token in zip(log_probs[row], tokens[row], strict=True):
                self.tokens.append(token)
                self.parents.append(parent)
                self.scores.append(base + log_prob)
                rows.append(row)
        level = sorted(range(first, len(self.tokens)), key=lambda node: -self.scores[node])
        self.frontier = level[: self.width]
        return [rows[node - first] for node in self.frontier]

    @property
    def best_of_frontier(self) -> float:
        return self.scores[self.frontier[0]]

    def expand_frontier(self, depth: int) -> tuple[list[int], list[int], SequenceLayout]:
        """Gives the frontier's nodes the next slots; returns tokens, positions and layout of the pass that finds their
        children."""
        settled = self.item.start + len(self.item.rows)
        for node in self.frontier:
            self.visible[node] = [*self.visible.get(self.parents[node], []), self.num_slots]
            self.num_slots += 1
        mask = torch.zeros(len(self.frontier), self.num_slots, dtype=torch.bool)
        for row, node in enumerate(self.frontier):
            mask[row, self.visible[node]] = True
        layout = SequenceLayout(self.item.request.pages, len(self.frontier), settled + self.num_slots, mask)
        return [self.tokens[node] for node in self.frontier], [settled + depth - 1] * len(self.frontier), layout

    def draft(self, num_nodes: int) -> Draft:
        # A child's score is never above its parent's and the sort is stable, so every kept node's parent is kept too.
        best = sorted(range(len(self.tokens)), key=lambda node: -self.scores[node])[:num_nodes]
        best.sort()
        place = {node: index for index, node in enumerate(best)} | {-1: -1}
        return Draft(
            tokens=[self.tokens[node] for node in best],
            parents=[place[self.parents[node]] for node in best],
            confidences=[
                math.exp(self.scores[node] - (self.scores[self.parents[node]] if self.parents[node] >= 0 else 0.0))
                for node in best
            ],
        )
