"""The EAGLE drafter in captured cycles: all its state lies on the device. It must equal `speculation.drafting`.

Worked example, as there. The target has settled x0 … x4 and its pass covered x2 x3 x4, after which it chose x5:
    pairs (x3, g2) (x4, g3) (x5, g4)  at positions 2 3 4      `sync`: the cache is rebuilt from the target's states
    the last output drafts x6'; then (x6', state) at 5 drafts x7', …                                          `draft`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from fledge.kernels.accept import Accepted, RowState
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.sample import Choice, Draws
from fledge.kernels.step_inputs import DraftInputs, keep_last
from fledge.models.drafter import EagleDrafter
from fledge.ops.base import Ops
from fledge.ops.cuda_ops import CudaOps


class BatchState(Protocol):
    """What the rows of captured cycles keep on the device (`engine.slots.Slots`)."""

    seed: Tensor
    drafts: Tensor
    draft_state: Tensor
    state: RowState

    def draws(self, rows: slice | Tensor, *, cuts: bool) -> Draws: ...


class CapturedEagle:
    def __init__(self, network: EagleDrafter, cache: PagedKV, slots: BatchState, max_positions: int) -> None:
        """`slots` get a state per row. The cache shares the target's pages: the pair at position t lies in slot t."""
        self.network, self.cache, self.slots = network, cache, slots
        config, device = network.config, cache.keys.device
        self.ops = CudaOps(cache, network.rotary.device_table(max_positions, device))
        self.taps = config.aux_layer_ids
        slots.draft_state = torch.zeros(
            len(slots.seed), config.hidden_size, dtype=network.norm.weight.dtype, device=device
        )  # what an empty row would draft from must be finite
        self.target_ids = None
        if bool(network.d2t.any()):
            self.target_ids = network.target_ids(torch.arange(config.draft_vocab_size, device=device)).contiguous()

    def sync(self, taps: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Rebuilds the cache for the accepted tokens from the target's states, and leaves each row's new state."""
        starts, counts = accepted.starts_B, accepted.counts_B
        states = self.prefill(taps, accepted.tokens_BT.flatten(), AttentionMetadata.decode(pages_BP, starts, counts))
        keep_last(states, counts, self.slots.draft_state)

    def prefill(self, taps: Sequence[Tensor], tokens_N: Tensor, meta: AttentionMetadata) -> Tensor:
        """The states of all positions; token i of a prompt is paired with the state of position i - 1."""
        return self.run(self.inputs(self.network.fuse(taps, self.ops), tokens_N), meta)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Choice:
        """Drafts `depth` tokens for each of the first rows, whose pages these are. All but the last are written down, and that
        is returned as a choice."""
        slots, state, batch = self.slots, self.slots.state, len(pages_BP)
        draws = slots.draws(slice(batch), cuts=False) if sampled else None
        h = slots.draft_state[:batch]
        choice = self.choose(h, draws, 0)
        rows = {"drafts_RD": slots.drafts, "length_R": state.length, "active_R": state.active}
        for step in range(1, depth):
            inputs = self.inputs(h, choice, step, **rows)
            h = self.run(inputs, AttentionMetadata.decode(pages_BP, inputs.starts_B, inputs.counts_B))
            choice = self.choose(h, draws, step)
        return choice

    def choose(self, h: Tensor, draws: Draws | None, ahead: int) -> Choice:
        network = self.network
        return self.ops.head(h, network.norm, network.lm_head, draws, ahead=ahead, ids_V=self.target_ids)

    def inputs(self, h: Tensor, tokens: Tensor | Choice, step: int = 0, **rows: Any) -> DraftInputs:
        network = self.network
        output_norm = network.norm if step and network.config.norm_output else None
        return network.inputs(tokens, h, self.ops, output_norm=output_norm, step=step, **rows)

    def run(self, inputs: DraftInputs, meta: AttentionMetadata, ops: Ops | None = None) -> Tensor:
        """The states before the final norm. `ops`: None: its own; a probe has others."""
        return self.network.run(inputs, meta, ops or self.ops)
