"""The target's pass for `--deterministic`: every row's numbers come from the same operations in the same order, whatever the
number of rows, so that an answer depends on nothing but its prompt and parameters.

What the fast pass chooses by size has one form here: linears are `tiled_linear` (on CPU row by row), norms and rotations
kernels of their own, attention `invariant_attention` over the cache for prompts, their pieces and chains alike. The drafter
stays as it is: what it proposes is verified, and only the target's own tokens are said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fledge.engine.fused_decoder import (
    BLOCK_TOKENS,
    BlockAttend,
    ChainAttend,
    ChunkAttend,
    FusedAttend,
    FusedDecoder,
    PromptAttend,
    store_rotated,
)
from fledge.kernels.fused_linear import Norm
from fledge.kernels.invariant_attention import invariant_attention
from fledge.kernels.paged_attention import PagedAttend, PagedKV
from fledge.kernels.quantization import QuantizedLinear
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.sample import Choice, Draws, choose
from fledge.kernels.swiglu import swiglu_reference
from fledge.kernels.tiled_linear import tiled_linear_triton
from fledge.kernels.triton_support import use_triton
from fledge.models.decoder import DecoderOutput
from fledge.models.layers import Attention


class InvariantDecoder(FusedDecoder):
    def __call__(self, x_ND: Tensor, attend: FusedAttend, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        return super().__call__(x_ND, in_fixed_order(attend, len(x_ND)), taps)

    @staticmethod
    def linear(module: nn.Module, x: Tensor, **surroundings) -> Tensor:
        return invariant_linear(module, x, **surroundings)

    def choose(self, x_ND: Tensor, draws: Draws | None = None, num_new: int = 1) -> Choice:
        return choose(self.linear(self.decoder.lm_head, x_ND, norm=self.norm), draws, num_new)


def invariant_linear(
    module: nn.Module,
    x_MK: Tensor,
    *,
    norm: Norm | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    in_place: bool = False,
    before_attention: bool = False,
) -> Tensor:
    """The last two are hints to `fused_linear`, of no use here: attention waits for everything before it."""
    if use_triton(x_MK):
        if norm is not None:
            x_MK = add_rms_norm(x_MK, None, norm.weight, norm.eps)
        weight = module.quantized if isinstance(module, QuantizedLinear) else module.weight
        return tiled_linear_triton(x_MK, weight, module.bias, gated=gated, residual_MO=residual_MO)
    rows = []
    for index, row in enumerate(x_MK):
        row = row[None].clone()  # where it lies in memory may matter too
        if norm is not None:
            row = nn.functional.rms_norm(row, norm.weight.shape, norm.weight, norm.eps)
        row = module(row)
        if gated:
            row = swiglu_reference(row)
        rows.append(row if residual_MO is None else residual_MO[index] + row)
    return torch.cat(rows)


@dataclass
class InvariantAttend:
    """Sequences of new tokens over the cache (see `kernels.invariant_attention`)."""

    cache: PagedKV
    rope_table: Tensor
    positions_N: Tensor
    slots_N: Tensor
    page_table: Tensor
    starts_B: Tensor
    counts_B: Tensor
    longest: int
    reach: int
    page_size: int
    first_rows_B: Tensor | None = None
    places_N: Tensor | None = None  # where a token lies among the places of all sequences; None: where it is

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        store_rotated(self, attention, qkv)
        if self.places_N is not None:
            num_places = len(self.starts_B) * self.longest
            qkv = qkv.new_zeros(num_places, qkv.shape[1]).index_copy_(0, self.places_N, qkv)
        out = invariant_attention(
            qkv,
            self.cache.keys[attention.layer],
            self.cache.values[attention.layer],
            self.page_table,
            self.starts_B,
            self.counts_B,
            self.page_size,
            longest=self.longest,
            reach=self.reach,
            first_rows_B=self.first_rows_B,
            window=attention.window,
        )
        return out if self.places_N is None else out[self.places_N]


def in_fixed_order(attend: FusedAttend, num_rows: int) -> InvariantAttend:
    """The same attention; all on the device, fit for a graph."""
    if isinstance(attend, InvariantAttend):
        return attend
    cache, table, size = attend.cache, attend.rope_table, attend.cache.page_size
    if isinstance(attend, ChainAttend):
        pages, starts, counts = attend.page_table_BP, attend.starts_B, attend.counts_B
        longest = num_rows // len(starts)
        place = torch.arange(longest, device=starts.device)
        stored = place < counts[:, None]
        positions = torch.where(stored, starts[:, None] + place, 0).long()
        slots = torch.where(stored, pages.long().gather(1, positions // size) * size + positions % size, -1)
        where = (positions.flatten(), slots.flatten(), pages, starts, counts)
        return InvariantAttend(cache, table, *where, longest, pages.shape[1] * size, size)
    where = (cache, table, attend.positions_N, attend.slots_N)
    if isinstance(attend, PromptAttend):
        # A prompt's tokens lie in the slots that its rows name: pages of one token.
        first_rows, counts = attend.offsets[:-1], attend.offsets.diff()
        starts = torch.zeros_like(counts)
        return InvariantAttend(*where, attend.slots_N, starts, counts, attend.longest, attend.longest, 1, first_rows)
    if isinstance(attend, ChunkAttend):
        pages, starts = attend.page_table_P[None], attend.length - num_rows
        return InvariantAttend(*where, pages, starts, torch.full_like(starts, num_rows), num_rows, pages.shape[1] * size, size)
    assert isinstance(attend, BlockAttend)
    # Blocks begin before their first token where they are short; what lies at negative positions sees nothing.
    pages, lengths = attend.page_tables_BP, attend.lengths_B
    starts, counts = lengths - BLOCK_TOKENS, (lengths > 0) * BLOCK_TOKENS
    reach = pages.shape[1] * size
    return InvariantAttend(*where, pages, starts, counts, BLOCK_TOKENS, reach, size, places_N=attend.places_N)


class InvariantPass:
    """What the eager engine runs instead of the network, in its place."""

    def __init__(self, fused: InvariantDecoder) -> None:
        self.fused, self.decoder = fused, fused.decoder

    def __call__(
        self, tokens_N: Tensor, positions_N: Tensor, attend: PagedAttend, taps: Sequence[int], highest_position: int
    ) -> DecoderOutput:
        x, captured = self.fused(self.decoder.embed(tokens_N), self.paged(positions_N, attend), taps)
        norm = self.fused.norm
        if use_triton(x):
            return DecoderOutput(add_rms_norm(x, None, norm.weight, norm.eps), captured)
        return DecoderOutput(torch.cat([self.decoder.norm(row[None].clone()) for row in x]), captured)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """As `Decoder.logits`; also behind the native pass, whose linears have fixed orders of their own."""
        if getattr(self.decoder.lm_head, "native", None) is not None:
            return self.decoder.logits(hidden_ND)
        return self.fused.linear(self.decoder.lm_head, hidden_ND.contiguous())

    def paged(self, positions_N: Tensor, attend: PagedAttend) -> InvariantAttend:
        layouts, cache, device = attend.layouts, attend.cache, positions_N.device
        assert all(layout.tail_mask is None for layout in layouts), "trees are refused before"
        size = cache.page_size
        width = max(-(-layout.kv_len // size) for layout in layouts)
        pages = torch.tensor([[*layout.pages, *[0] * width][:width] for layout in layouts], device=device)
        counts = [layout.query_len for layout in layouts]
        sequence = torch.arange(len(layouts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        slots = pages[sequence, positions_N // size] * size + positions_N % size
        numbers = torch.tensor([[layout.kv_len - layout.query_len, layout.query_len] for layout in layouts], device=device)
        starts, counts_B = numbers.unbind(1)
        first_rows = counts_B.cumsum(0) - counts_B
        where = (positions_N, slots, pages, starts.contiguous(), counts_B.contiguous())
        return InvariantAttend(cache, self.fused.rope_table, *where, max(counts), width * size, size, first_rows_B=first_rows)
