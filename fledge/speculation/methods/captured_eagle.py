"""The EAGLE drafter in captured cycles, as a chain or a tree: all its state lies on the device.

It must equal `methods.eagle`, which has a worked example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.errors import UserError
from fledge.kernels.accept import Accepted
from fledge.kernels.attention.metadata import AttentionMetadata, given
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.draft_inputs import DraftInputs, keep_last
from fledge.kernels.sample import PartialArgmax, SamplingState
from fledge.models.drafter import EagleDrafter
from fledge.ops.base import Ops
from fledge.ops.cuda_ops import CudaOps
from fledge.speculation.depth import TreeShape
from fledge.speculation.methods.base import Drafted, Rows
from fledge.speculation.methods.tree import Frontier, check_shape, grow_tree, num_nodes, tree_attention


class CapturedEagle:
    """A chain of drafted tokens."""

    follows_plain_cycles = False
    reads_text = False
    adjusts_drafts = True

    def __init__(self, network: EagleDrafter, cache: PagedKV, batch: Rows, max_positions: int) -> None:
        """The cache shares the target's pages: the pair at position t lies in slot t."""
        config, device = network.config, cache.keys.device
        if config.hidden_size != config.target_hidden_size and not config.own_embedding:
            raise UserError("the drafter's hidden size differs from the target's embedding: it needs one of its own")
        self.network, self.cache, self.batch = network, cache, batch
        self.taps = config.aux_layer_ids
        self.ops = CudaOps(cache, network.rotary.device_table(max_positions, device))
        # The drafter's output for the last accepted pair, before its final norm. An inactive row's must be finite.
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
        """Rebuilds the cache for the accepted tokens from the target's hidden states, and keeps each row's new state."""
        starts, counts = accepted.starts_B, accepted.counts_B
        states = self.pair(aux, accepted.tokens_BT.flatten(), AttentionMetadata.decode(pages_BP, starts, counts))
        keep_last(states, counts, self.states_RD)

    def pair(self, aux: Sequence[Tensor], tokens_N: Tensor, meta: AttentionMetadata) -> Tensor:
        """The states of all positions: each token with the hidden states of the position before it."""
        return self.run(self.inputs(self.network.fuse(aux, self.ops), tokens_N), meta)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        """Writes all drafted tokens but the last to the batch's `drafts`; the last stays a partial argmax."""
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
        """The states before the final norm. `ops`: None: its own; a probe has others."""
        return self.network.run(inputs, meta, ops or self.ops)


class CapturedTree(CapturedEagle):
    """EAGLE-2's dynamic tree, always to the full depth: a graph has one shape."""

    adjusts_drafts = False  # counts and grammars would have to fork at every node

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
        """`covered`: share of the target's tokens that the draft vocabulary can name, when the graphs are recorded."""
        super().__init__(network, cache, batch, max_positions)
        check_shape(shape, max_depth)
        self.shape, self.log_covered = shape, math.log(covered)

    def num_drafted(self, depth: int) -> int:
        return num_nodes(self.shape, depth, self.network.config.draft_vocab_size)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Drafted:
        state, size = self.batch.rows, len(pages_BP)
        starts, active = state.length[:size] - 1, state.active[:size]

        def step(frontier: Frontier) -> tuple[Tensor, Tensor]:
            where = (frontier.offset, frontier.tail_bits_BW, frontier.tail, pages_BP, self.cache.page_size)
            at = tree_attention(starts, active, *where)
            meta = AttentionMetadata.tree(
                pages_BP, at.kv_lens_B, at.positions_BT.flatten(), at.slots_BT.flatten(), at.tail_bits_BT, at.tail
            )
            inputs = self.network.inputs(frontier.tokens_BW.flatten(), frontier.h_BWD.flatten(0, 1), self.ops)
            logits, h = self.output(self.run(inputs, meta))
            return logits.unflatten(0, frontier.tokens_BW.shape), h.unflatten(0, frontier.tokens_BW.shape)

        logits, h = self.output(self.states_RD[:size])
        tree = grow_tree(logits, h, step, self.shape, depth, target_ids_V=self.target_ids, log_covered=self.log_covered)
        return Drafted(tree=tree)

    def output(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and the state that is fed back, from the states before the final norm."""
        post = self.ops.norm(self.network.norm, x_ND)
        return self.ops.linear(self.network.head, post), post if self.network.config.norm_output else x_ND
