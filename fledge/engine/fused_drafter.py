"""The EAGLE drafter with fused kernels, for the rows of a captured step. It must equal `models.drafter` and its speculator.

Worked example, as in `speculation.drafting`. The target has settled x0 … x4 and its pass covered x2 x3 x4, after which it
chose x5:
    pairs (x3, g2) (x4, g3) (x5, g4)  at positions 2 3 4      `sync`: the cache is rebuilt from the target's states
    the last output drafts x6'; then (x6', state) at 5 drafts x7', …                                          `draft`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.engine.executors.batch_state import Slots
from fledge.engine.fused_decoder import ChainAttend, FusedAttend, after_attention, linear, norm_of, rope_table, weight_of
from fledge.kernels.accept import Accepted
from fledge.kernels.head_choice import head_choice
from fledge.kernels.paged_attention import PagedKV
from fledge.kernels.sample import Choice, Draws
from fledge.kernels.step_inputs import DraftInputs, draft_inputs, fuse_inputs, keep_last
from fledge.models.drafter import EagleDrafter


class FusedDrafter:
    def __init__(self, network: EagleDrafter, cache: PagedKV, slots: Slots, max_positions: int) -> None:
        """`slots` get a state per row. The cache shares the target's pages: the pair at position t lies in slot t."""
        self.network, self.cache, self.slots = network, cache, slots
        config, device = network.config, cache.keys.device
        self.taps = config.aux_layer_ids
        self.rope_table = rope_table(config.head_dim, config.max_positions, config.rope, max_positions, device)
        slots.draft_state = torch.zeros(
            len(slots.seed), config.hidden_size, dtype=network.norm.weight.dtype, device=device
        )  # what an empty row would draft from must be finite
        self.target_ids = None
        if bool(network.d2t.any()):
            self.target_ids = network.target_ids(torch.arange(config.draft_vocab_size, device=device)).contiguous()
        self.output_norm = norm_of(network.norm) if config.norm_output else None

    def sync(self, taps: Sequence[Tensor], accepted: Accepted, pages_BP: Tensor) -> None:
        """Rebuilds the cache for the tokens that stand from the target's states, and leaves each row's new state."""
        inputs = self.paired(taps, accepted.tokens_BT.flatten())
        starts, counts = accepted.starts_B, accepted.counts_B
        attend = ChainAttend(self.cache, self.rope_table, pages_BP, starts, counts)
        keep_last(self.layers(inputs, attend), counts, self.slots.draft_state)

    def read_prompts(self, taps: Sequence[Tensor], tokens_N: Tensor, attend: FusedAttend) -> Tensor:
        """The states of all positions; token i of a prompt is paired with the state of position i - 1."""
        return self.layers(self.paired(taps, tokens_N), attend)

    def draft(self, pages_BP: Tensor, depth: int, *, sampled: bool) -> Choice:
        """Drafts `depth` tokens for each of the first rows, whose pages these are. All but the last are written down, and that
        as a choice."""
        slots, state, batch = self.slots, self.slots.state, len(pages_BP)
        draws = slots.draws(slice(batch), cuts=False) if sampled else None
        h = slots.draft_state[:batch]
        choice = self.choose(h, draws, 0)
        rows = {"drafts_RD": slots.drafts, "length_R": state.length, "active_R": state.active}
        for step in range(1, depth):
            inputs = self.inputs(h, choice, step, **rows)
            h = self.layers(inputs, ChainAttend(self.cache, self.rope_table, pages_BP, inputs.starts_B, inputs.counts_B))
            choice = self.choose(h, draws, step)
        return choice

    def choose(self, h: Tensor, draws: Draws | None, ahead: int) -> Choice:
        network = self.network
        return head_choice(h, norm_of(network.norm), weight_of(network.lm_head), draws, ahead=ahead, ids_V=self.target_ids)

    def paired(self, taps: Sequence[Tensor], tokens_N: Tensor) -> DraftInputs:
        network = self.network
        whole = norm_of(network.input_norm) if network.input_norm is not None else None
        each = [norm_of(norm) for norm in network.fc_norm] if network.fc_norm is not None else None
        return self.inputs(linear(network.fc, fuse_inputs(taps, whole, each)), tokens_N)

    def inputs(self, h: Tensor, tokens: Tensor | Choice, step: int = 0, **rows: Tensor) -> DraftInputs:
        first = self.network.layers[0]
        return draft_inputs(
            h,
            tokens,
            self.network.embed_tokens.weight,
            norm_of(first.input_layernorm),
            norm_of(first.hidden_norm),
            self.output_norm if step else None,
            norm_before_residual=first.norm_before_residual,
            step=step,
            **rows,
        )

    def layers(self, inputs: DraftInputs, attend: FusedAttend) -> Tensor:
        """The states before the final norm."""
        x = inputs.residual_ND
        for layer in self.network.layers:
            if layer.first:
                qkv = linear(layer.self_attn.qkv_proj, inputs.x_N2D, before_attention=True)
            else:
                qkv = linear(layer.self_attn.qkv_proj, x, norm=norm_of(layer.input_layernorm), before_attention=True)
            x = after_attention(layer, x, attend(layer.self_attn, qkv), in_place=True, linear=linear)
        return x
