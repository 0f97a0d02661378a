"""The EAGLE drafter: syncs with the target, then drafts a chain or a tree.

    EagleSpeculator               for the eager executor, on lists of requests
    CapturedEagle, CapturedTree   for captured cycles, with the same results: all state is on the device

Worked example. The target has settled x0 … x4 and its pass covered x2 x3 x4 (positions 2, 3, 4), after which it chose x5:
    pairs (x3, g2) (x4, g3) (x5, g4)  at positions 2 3 4      `sync`: the drafter's cache is rebuilt from the target's states
    the last output drafts x6'; then (x6', state) at 5 drafts x7', …
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fledge.errors import UserError
from fledge.kernels.accept import Accepted
from fledge.kernels.attention.metadata import MAX_CHAIN, AttentionMetadata, given
from fledge.kernels.attention.paged import PagedKV, SequenceLayout, paired
from fledge.kernels.draft_inputs import DraftInputs, keep_last
from fledge.kernels.native import best_of
from fledge.kernels.row_copy import take
from fledge.kernels.sample import PartialArgmax, SamplingState, choose, picked
from fledge.models.drafter import EagleDrafter
from fledge.ops.base import Ops
from fledge.ops.cpu_ops import CpuOps, eager_ops
from fledge.ops.cuda_ops import CudaOps
from fledge.speculation.coverage import VocabularyCoverage
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.distribution import sampling_tensors
from fledge.speculation.methods.base import AcceptedSpan, Drafted, DraftedRequest, Drafter, DraftObserver, Rows
from fledge.speculation.methods.tree import Frontier, GrowingTree, check_shape, grow_tree, tree_attention
from fledge.speculation.verification import Draft

log = logging.getLogger("fledge.speculation")


class EagleSpeculator:
    """Drafts with an EAGLE network. Its cache uses the target's pages: the pair at position t is in slot t."""

    def __init__(
        self,
        network: EagleDrafter,
        cache: PagedKV,
        depth: DepthPolicy,
        tree: TreeShape | None = None,
        coverage: float | None = None,
    ) -> None:
        """`coverage`: how much of the training answers the draft vocabulary covers, if recorded."""
        self.network, self.cache, self.depth, self.tree = network, cache, depth, tree
        self.taps = network.config.aux_layer_ids
        self.device = cache.keys.device
        self.lookahead = lookahead(depth, tree)
        shape = f"tree of {tree.nodes}" if tree else "chain"
        self.description = f"EAGLE {network.config.version}, {shape}, depth {depth}"
        self.ops = eager_ops(network, cache)
        self.observer: DraftObserver | None = None
        self.seen_not_finite = False
        # Drafts instead of this network while that has learnt too little; the network is still synced, to be ready at any step.
        self.fallback: Drafter | None = None
        ids = torch.arange(network.config.draft_vocab_size, device=self.device)
        self.target_ids = network.target_ids(ids)
        self.target_id_list: list[int] = self.target_ids.tolist()
        is_whole = len(self.target_id_list) == network.config.vocab_size
        self.coverage = VocabularyCoverage(None if is_whole else self.target_id_list, coverage)  # updated by the controller
        self.column_of = {token: column for column, token in enumerate(self.target_id_list)}

    @property
    def knows_confidence(self) -> bool:
        return self.tree is None and self.fallback is None

    def forget(self, request: DraftedRequest) -> None:
        """Forgets the request in the fallback; this drafter's own state is in the request's pages."""
        if self.fallback is not None:
            self.fallback.forget(request)

    def captured(self, batch: Rows, max_positions: int, max_depth: int) -> CapturedEagle:
        if self.depth.threshold:
            log.info("depth auto: on a GPU the depth follows the load; drafts do not stop early at low confidence")
        if self.network.config.mla is not None and max_depth >= MAX_CHAIN:
            raise UserError(f"a drafter with latent attention drafts at most {MAX_CHAIN - 1} tokens on a GPU, not {max_depth}")
        parts = (self.network, self.cache, batch, max_positions)
        if self.tree is None:
            return CapturedEagle(*parts)
        return CapturedTree(self.tree, *parts, max_depth, self.coverage.covered)

    def draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        is_watched = self.observer is not None and self.observer.begin(spans)
        drafts = None if is_watched or self.fallback is not None else self._draft_in_one_call(spans, taps)
        if drafts is None:
            drafts = self._draft(spans, taps)
        if self.observer is not None:
            self.observer.end(spans)
        return drafts

    def _draft(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft]:
        hidden, feedback = self.sync(spans, taps)
        if self.fallback is not None:
            return self.fallback.draft(spans, taps)
        drafts = [Draft() for _ in spans]
        ends = list(accumulate(len(span.rows) for span in spans))
        wanted = [index for index, span in enumerate(spans) if span.max_draft_tokens > 0]
        if wanted:
            finite = torch.isfinite(take(feedback, [ends[index] - 1 for index in wanted])).all(-1).tolist()
            if not all(finite):
                self._report_not_finite()
                wanted = [index for index, is_finite in zip(wanted, finite, strict=True) if is_finite]
        if wanted:
            last = [ends[index] - 1 for index in wanted]
            items, logits = [spans[index] for index in wanted], self.network.logits(take(hidden, last))
            grow = self.grow_chains if self.tree is None else self.grow_trees
            for index, draft in zip(wanted, grow(items, logits, take(feedback, last)), strict=True):
                drafts[index] = draft
        return drafts

    def _draft_in_one_call(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> list[Draft] | None:
        """The same as `_draft` for a single greedy chain, in one call of the C kernels; None if these do not support it.

        Run step by step from Python, a draft of three tokens takes 0.3 ms more than 1.4.
        """
        span = spans[0]
        rows, limit = span.rows, min(span.max_draft_tokens, self.depth.limit)
        is_chain = len(spans) == 1 and limit > 0 and self.tree is None and span.request.params.greedy
        if not is_chain or not isinstance(self.ops, CpuOps) or rows[-1] - rows[0] >= len(rows):
            return None
        drafter = self.ops.drafter(self.network)
        if not drafter.drafts_chains:
            return None
        end = span.start + len(rows)
        tensors = paired(span.request.tokens[span.start + 1 : end + 1], range(span.start, end))
        layout = SequenceLayout(span.request.pages, len(rows), end)
        meta = AttentionMetadata.from_layouts([layout], tensors[1], self.cache.page_size, end + limit - 1)
        batch = self.ops.batch(meta, num_more=limit)
        return [
            Draft.chain(*drafter.chain(batch, tensors[0], taps, rows[0], limit, self.depth.threshold, self.coverage.covered))
        ]

    def _report_not_finite(self) -> None:
        if not self.seen_not_finite:
            log.warning("the drafter's hidden states are not finite: such requests are decoded without drafts")
        self.seen_not_finite = True

    def sync(self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Writes the drafter's KV of the accepted tokens from the target's hidden states; returns the last step's outputs."""
        rows = [row for span in spans for row in span.rows]
        if rows != list(range(taps[0].shape[0])):
            taps = [take(tap, rows) for tap in taps]
        tokens: list[int] = []
        positions: list[int] = []
        layouts: list[SequenceLayout] = []
        for span in spans:
            end = span.start + len(span.rows)
            tokens.extend(span.request.tokens[span.start + 1 : end + 1])
            positions.extend(range(span.start, end))
            layouts.append(SequenceLayout(span.request.pages, len(span.rows), end))
        return self.step(tokens, self.network.fuse(taps, self.ops), positions, layouts)

    def step(self, tokens: list[int], h: Tensor, positions: list[int], layouts: list[SequenceLayout]) -> tuple[Tensor, Tensor]:
        if self.observer is not None and (seen := self.observer.step(tokens, h, positions, layouts)) is not None:
            return seen
        tensors = torch.tensor([tokens, positions], device=self.device)
        meta = AttentionMetadata.from_layouts(layouts, tensors[1], self.cache.page_size, max(positions))
        return self.network.step(tensors[0], h, meta, self.ops)

    def grow_chains(self, items: list[AcceptedSpan], logits: Tensor, h: Tensor) -> list[Draft]:
        drafts = [Draft() for _ in items]
        joint = [1.0] * len(items)
        active = list(range(len(items)))
        depth = 0
        while True:
            chosen, confidence = self.choose(logits, [items[index].request for index in active], depth)
            for index, token, sure in zip(active, chosen, confidence, strict=True):
                sure *= self.coverage.covered
                drafts[index].tokens.append(token)
                drafts[index].parents.append(depth - 1)
                drafts[index].confidences.append(sure)
                joint[index] *= sure
            depth += 1
            kept = [
                place
                for place, index in enumerate(active)
                if depth < items[index].max_draft_tokens and self.depth.goes_on(depth, joint[index])
            ]
            if not kept:
                return drafts
            if len(kept) < len(active):
                h = take(h, kept)
                active = [active[place] for place in kept]
            ends = [items[index].start + len(items[index].rows) + depth for index in active]
            layouts = [SequenceLayout(items[index].request.pages, 1, end) for index, end in zip(active, ends, strict=True)]
            tokens = [drafts[index].tokens[-1] for index in active]
            hidden, h = self.step(tokens, h, [end - 1 for end in ends], layouts)
            logits = self.network.logits(hidden)

    def choose(self, logits: Tensor, requests: list[DraftedRequest], depth: int) -> tuple[list[int], list[float]]:
        """The next token of each chain and its probability: the likeliest, or drawn with the target's own noise.

        Drafter and target draw a position with the same noise, so a drafter close to the target draws the same token.
        """
        best, confidence = best_of(logits, probability=True)
        assert confidence is not None
        chosen = [self.target_id_list[index] for index in best]
        for place, request in enumerate(requests):
            params = request.params
            if params.greedy:
                continue
            tensors = sampling_tensors(params, request.seed, request.num_answer + depth, logits.device)
            row = logits[place : place + 1]
            drawn = int(picked(choose(row, SamplingState(*tensors), ids_V=self.target_ids), self.network.config.vocab_size)[0])
            column = self.column_of.get(drawn)
            if column is None:  # the logits are NaN
                continue
            chosen[place] = drawn
            confidence[place] = float(torch.softmax(row[0].float() / params.temperature, -1)[column])
        return chosen, confidence

    def grow_trees(self, items: list[AcceptedSpan], logits: Tensor, h: Tensor) -> list[Draft]:
        """Grows EAGLE-2 trees: each level expands the `width` likeliest nodes; of all nodes the likeliest `nodes` are kept."""
        shape = self.tree
        assert shape is not None
        width = min(shape.width, logits.shape[-1])
        trees = [GrowingTree(item, width, math.log(self.coverage.covered)) for item in items]
        active = trees
        parents_h = h
        fan_out = [1] * len(active)
        depth = 0
        while True:
            best = logits.float().log_softmax(-1).topk(width, -1)
            log_probs, tokens = best.values.tolist(), self.target_ids[best.indices].tolist()
            row, frontier_rows = 0, []
            for tree, rows in zip(active, fan_out, strict=True):
                chosen = tree.add_level(log_probs[row : row + rows], tokens[row : row + rows])
                frontier_rows.append([row + parent for parent in chosen])
                row += rows
            depth += 1
            kept = [
                place
                for place, tree in enumerate(active)
                if depth < tree.item.max_draft_tokens and self.depth.goes_on(depth, math.exp(tree.best_of_frontier))
            ]
            if not kept:
                return [tree.draft(shape.nodes) for tree in trees]
            parents = [parent for place in kept for parent in frontier_rows[place]]
            parents_h = take(parents_h, parents)
            active = [active[place] for place in kept]
            fan_out = [len(tree.frontier) for tree in active]
            level = [tree.expand_frontier(depth) for tree in active]
            hidden, parents_h = self.step(
                [token for tokens, _, _ in level for token in tokens],
                parents_h,
                [position for _, positions, _ in level for position in positions],
                [layout for _, _, layout in level],
            )
            logits = self.network.logits(hidden)


def lookahead(depth: DepthPolicy, tree: TreeShape | None) -> int:
    """KV slots needed after the settled text: for the pending token and the draft in verification, or for drafting's nodes."""
    if tree is None:
        return depth.limit + 1
    return max(tree.nodes + 1, tree.width * (depth.limit - 1))


class CapturedEagle:
    """Drafts chains with an EAGLE network in captured cycles."""

    follows_plain_cycles = False
    reads_text = False
    adjusts_drafts = True

    def __init__(self, network: EagleDrafter, cache: PagedKV, batch: Rows, max_positions: int) -> None:
        """`cache`: uses the target's pages: the pair at position t is in slot t."""
        config, device = network.config, cache.keys.device
        if config.hidden_size != config.target_hidden_size and not config.own_embedding:
            raise UserError("the drafter's hidden size differs from the target's, so it needs an embedding of its own")
        self.network, self.cache, self.batch = network, cache, batch
        self.taps = config.aux_layer_ids
        self.ops = CudaOps(cache, network.rotary.device_table(max_positions, device))
        # The drafter's output for the last accepted pair, before its final norm. It must be finite even in inactive rows.
        self.states_RD = torch.zeros(len(batch.seed), config.hidden_size, dtype=network.norm.weight.dtype, device=device)
        self.row_state = [self.states_RD]
        self.target_ids = None
        if bool(network.d2t.any()):
            self.target_ids = network.target_ids(torch.arange(config.draft_vocab_size, device=device)).contiguous()

    def num_drafted(self, depth: int) -> int:
        return depth

    def prefill(
        self, aux: Sequence[Tensor], following_N: Tensor, meta: AttentionMetadata, rows_S: Tensor, last_S: Tensor
    ) -> None:
        self.states_RD.index_copy_(0, rows_S, self.pair(aux, following_N, meta)[last_S])

    def sync(self, aux: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Writes the drafter's KV of the accepted tokens from the target's hidden states, and keeps each row's new state."""
        starts, counts = accepted.starts_B, accepted.counts_B
        states = self.pair(aux, accepted.tokens_BT.flatten(), AttentionMetadata.decode(pages_BP, starts, counts))
        keep_last(states, counts, self.states_RD)

    def pair(self, aux: Sequence[Tensor], tokens_N: Tensor, meta: AttentionMetadata) -> Tensor:
        """Runs the drafter on pairs of each token and the hidden states of the position before; returns its states."""
        return self.run(self.inputs(self.network.fuse(aux, self.ops), tokens_N), meta)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        """Drafts a chain: writes its tokens to the batch's `drafts`, except the last, which stays a partial argmax."""
        batch, state, size = self.batch, self.batch.rows, len(pages_BP)
        draws = batch.draws(slice(size), truncated=False) if sampled else None
        h = self.states_RD[:size]
        choice = self.choose(h, draws, 0)
        rows = {"drafts_RD": batch.drafts, "length_R": state.length, "active_R": state.active}
        for step in range(1, depth):
            inputs = self.inputs(h, choice, step, **rows)
            h = self.run(inputs, AttentionMetadata.decode(pages_BP, given(inputs.starts_B), given(inputs.counts_B)))
            choice = self.choose(h, draws, step)
        return Drafted(last=choice)

    def choose(self, h: Tensor, draws: SamplingState | None, ahead: int) -> PartialArgmax:
        network = self.network
        return self.ops.head(h, network.norm, network.head, draws, ahead=ahead, ids_V=self.target_ids)

    def inputs(self, h: Tensor, tokens: Tensor | PartialArgmax, step: int = 0, **rows: Any) -> DraftInputs:
        network = self.network
        output_norm = network.norm if step and network.config.norm_output else None
        return network.inputs(tokens, h, self.ops, output_norm=output_norm, step=step, **rows)

    def run(self, inputs: DraftInputs, meta: AttentionMetadata, ops: Ops | None = None) -> Tensor:
        """Runs the layers up to the states before the final norm. `ops` None: this method's own; a probe passes others."""
        return self.network.run(inputs, meta, ops or self.ops)


class CapturedTree(CapturedEagle):
    """Drafts EAGLE-2's dynamic trees in captured cycles, always to the full depth, because a graph has a fixed shape."""

    adjusts_drafts = False  # token counts and grammar states would differ for every node

    def __init__(
        self,
        shape: TreeShape,
        network: EagleDrafter,
        cache: PagedKV,
        batch: Rows,
        max_positions: int,
        max_depth: int,
        covered: float = 1.0,
    ) -> None:
        """`covered`: the share of the target's tokens that are in the draft vocabulary, fixed when graphs are recorded."""
        super().__init__(network, cache, batch, max_positions)
        check_shape(shape, max_depth)
        self.shape, self.log_covered = shape, math.log(covered)

    def num_drafted(self, depth: int) -> int:
        return self.shape.num_nodes(depth, self.network.config.draft_vocab_size)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        state, size = self.batch.rows, len(pages_BP)
        starts, active = state.length[:size] - 1, state.active[:size]

        def step(frontier: Frontier) -> tuple[Tensor, Tensor]:
            where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, pages_BP, self.cache.page_size)
            inputs = self.network.inputs(frontier.tokens_BW.flatten(), frontier.h_BWD.flatten(0, 1), self.ops)
            logits, h = self.output(self.run(inputs, tree_attention(starts, active, *where)))
            return logits.unflatten(0, frontier.tokens_BW.shape), h.unflatten(0, frontier.tokens_BW.shape)

        logits, h = self.output(self.states_RD[:size])
        tree = grow_tree(logits, h, step, self.shape, depth, target_ids_V=self.target_ids, log_covered=self.log_covered)
        return Drafted(tree=tree)

    def output(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the state that is fed back, from the states before the final norm."""
        post = self.ops.norm(self.network.norm, x_ND)
        return self.ops.linear(self.network.head, post), post if self.network.config.norm_output else x_ND
