"""Where the new tokens of a pass stand and where their keys lie in a paged cache: what every attention kernel is chosen by.

    form             new tokens                                    attend over
    DECODE           a chain of T for each of B sequences          the cache and the chain itself
    TREE             T nodes of a draft tree for each of B         the cache; of its last keys, those in `tail_bits_BT`
    PREFILL          whole prompts, one after the other            themselves
    CACHED_PREFILL   ends of prompts, in blocks of BLOCK_TOKENS    the cache
    CHUNK            a part of one long prompt                     the cache
    HOST             any of these                                  the cache; lengths and pages are known to the host alone

All but HOST lie on the device and are read there, so that a pass over them can be captured. Which cache is not said here: a
target and its drafter share pages, so one description serves both.

Shapes: N tokens of all sequences, B sequences (or blocks of them), T tokens of each, P pages a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fledge.kernels.attention.paged import HostLayouts, SequenceLayout

BLOCK_TOKENS = 64  # of a block of CACHED_PREFILL
MAX_CHAIN = 62  # new tokens of a sequence whose causal mask fits the bits of a tail

T = TypeVar("T")


class Form(Enum):
    DECODE = auto()
    TREE = auto()
    PREFILL = auto()
    CACHED_PREFILL = auto()
    CHUNK = auto()
    HOST = auto()


@dataclass(eq=False)
class AttentionMetadata:
    """Made by one of the constructors below, for one pass."""

    form: Form
    page_table_BP: Tensor | None = None  # int32
    starts_B: Tensor | None = None  # DECODE, int32: position of a sequence's first new token
    counts_B: Tensor | None = None  # DECODE, int32: how many of its T tokens are real; 0: an empty row
    lengths_B: Tensor | None = None  # int32: keys up to the end of the sequence or block; 0: an empty one
    positions_N: Tensor | None = None
    slots_N: Tensor | None = None  # of the cache; -1: stored nowhere
    places_N: Tensor | None = None  # CACHED_PREFILL: where a token lies among the places of all blocks
    offsets: Tensor | None = None  # PREFILL, int32: running sum of the prompts' lengths, from 0
    prompt_lengths: Sequence[int] = ()  # PREFILL, on the host: read where the kernel cannot take them from the device
    longest: int = 0  # PREFILL: no prompt is longer
    tail_bits_BT: Tensor | None = None  # TREE, int64: bit j: the node sees the j-th of the last `tail` keys
    tail: int = 0
    host: HostLayouts | None = None
    highest_position: int | None = None  # HOST: spares a synchronisation
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # see `once`

    @classmethod
    def decode(cls, page_table_BP: Tensor, starts_B: Tensor, counts_B: Tensor) -> AttentionMetadata:
        """A chain of T new tokens of each of B sequences, from position `starts` on; the last T - count are padding."""
        return cls(Form.DECODE, page_table_BP, starts_B, counts_B)

    @classmethod
    def tree(
        cls, page_table_BP: Tensor, lengths_B: Tensor, positions_N: Tensor, slots_N: Tensor, tail_bits_BT: Tensor, tail: int
    ) -> AttentionMetadata:
        """`lengths`: keys of each sequence, its nodes included. `positions`: a node's place on its own path."""
        where = {"lengths_B": lengths_B, "positions_N": positions_N, "slots_N": slots_N}
        return cls(Form.TREE, page_table_BP, **where, tail_bits_BT=tail_bits_BT, tail=tail)

    @classmethod
    def prefill(
        cls, positions_N: Tensor, slots_N: Tensor, lengths: Sequence[int], offsets: Tensor, longest: int
    ) -> AttentionMetadata:
        """Whole prompts; what lies behind them belongs to none."""
        where = {"positions_N": positions_N, "slots_N": slots_N}
        return cls(Form.PREFILL, **where, prompt_lengths=lengths, offsets=offsets, longest=longest)

    @classmethod
    def cached_prefill(
        cls, positions_N: Tensor, slots_N: Tensor, places_N: Tensor, page_table_BP: Tensor, lengths_B: Tensor
    ) -> AttentionMetadata:
        """Blocks of BLOCK_TOKENS places, each of one sequence; short ones fill their last places."""
        where = {"lengths_B": lengths_B, "positions_N": positions_N, "slots_N": slots_N, "places_N": places_N}
        return cls(Form.CACHED_PREFILL, page_table_BP, **where)

    @classmethod
    def chunk(cls, positions_N: Tensor, slots_N: Tensor, page_table_P: Tensor, length: Tensor) -> AttentionMetadata:
        """`length`: int32 [1], of the prompt up to the chunk's end."""
        return cls(Form.CHUNK, page_table_P[None], lengths_B=length, positions_N=positions_N, slots_N=slots_N)

    @classmethod
    def from_layouts(
        cls, layouts: Sequence[SequenceLayout], positions_N: Tensor, page_size: int, highest_position: int | None = None
    ) -> AttentionMetadata:
        host = HostLayouts(layouts, page_size, positions_N.device)
        return cls(Form.HOST, positions_N=positions_N, host=host, highest_position=highest_position)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What all layers of a pass share: made when the first of them asks."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def tokens(self, num_tokens: int, page_size: int) -> tuple[Tensor, Tensor]:
        """Position and slot of every new token."""
        if self.form is not Form.DECODE:
            return self.positions_N, self.slots_N
        return self.once(("tokens", page_size), lambda: self._chain_tokens(num_tokens, page_size))

    def _chain_tokens(self, num_tokens: int, page_size: int) -> tuple[Tensor, Tensor]:
        starts, pages = self.starts_B, self.page_table_BP
        place = torch.arange(num_tokens // len(starts), device=starts.device)
        stored = place < self.counts_B[:, None]
        positions = torch.where(stored, starts[:, None] + place, 0).long()
        slots = torch.where(stored, pages.long().gather(1, positions // page_size) * page_size + positions % page_size, -1)
        return positions.flatten(), slots.flatten()

    def chain_as_tree(self, num_tokens: int) -> tuple[Tensor, Tensor | None, int]:
        """Of DECODE, once its keys are stored: keys of each sequence, and the bits and tail of a TREE that is a chain.

        Keys past a row's count are left out, not just masked: nothing was ever written there, and 0 x NaN is NaN.
        """
        num_new = num_tokens // len(self.starts_B)
        assert num_new <= MAX_CHAIN

        def make() -> tuple[Tensor, Tensor | None, int]:
            counts = self.counts_B.long()[:, None]
            lengths = torch.where(self.counts_B > 0, self.starts_B + self.counts_B, 0).int()
            if num_new == 1:
                return lengths, None, 0
            seen = (torch.arange(num_new, device=counts.device) + 1 + num_new - counts).clamp(max=num_new)
            return lengths, (1 << seen) - 1, num_new

        return self.once("chain as tree", make)

    def in_fixed_order(self, num_tokens: int, page_size: int) -> FixedOrder:
        """As `kernels.attention.invariant_attention` takes it; all on the device, fit for a graph (HOST apart)."""
        return self.once(("fixed order", page_size), lambda: self._in_fixed_order(num_tokens, page_size))

    def _in_fixed_order(self, num_tokens: int, page_size: int) -> FixedOrder:
        assert self.form is not Form.TREE, "trees are refused before"
        if self.form is Form.HOST:
            return self._host_in_fixed_order(page_size)
        where = self.tokens(num_tokens, page_size)
        if self.form is Form.PREFILL:
            # A prompt's tokens lie in the slots that its rows name: pages of one token.
            first_rows, counts = self.offsets[:-1], self.offsets.diff()
            return FixedOrder(*where, self.slots_N, torch.zeros_like(counts), counts, self.longest, self.longest, 1, first_rows)
        pages = self.page_table_BP
        reach = pages.shape[1] * page_size
        if self.form is Form.DECODE:
            starts, counts = self.starts_B, self.counts_B
            return FixedOrder(*where, pages, starts, counts, num_tokens // len(starts), reach, page_size)
        if self.form is Form.CHUNK:
            starts = self.lengths_B - num_tokens
            return FixedOrder(*where, pages, starts, torch.full_like(starts, num_tokens), num_tokens, reach, page_size)
        # Blocks begin before their first token where they are short; what lies at negative positions sees nothing.
        starts, counts = self.lengths_B - BLOCK_TOKENS, (self.lengths_B > 0) * BLOCK_TOKENS
        return FixedOrder(*where, pages, starts, counts, BLOCK_TOKENS, reach, page_size, places_N=self.places_N)

    def _host_in_fixed_order(self, page_size: int) -> FixedOrder:
        layouts, positions = self.host.sequences, self.positions_N
        assert all(layout.tail_mask is None for layout in layouts), "trees are refused before"
        device = positions.device
        width = max(-(-layout.kv_len // page_size) for layout in layouts)
        pages = torch.tensor([[*layout.pages, *[0] * width][:width] for layout in layouts], device=device)
        counts = [layout.query_len for layout in layouts]
        sequence = torch.arange(len(layouts), device=device).repeat_interleave(torch.tensor(counts, device=device))
        slots = pages[sequence, positions // page_size] * page_size + positions % page_size
        numbers = torch.tensor([[layout.kv_len - layout.query_len, layout.query_len] for layout in layouts], device=device)
        starts, counts_B = (column.contiguous() for column in numbers.unbind(1))
        first_rows = counts_B.cumsum(0) - counts_B
        return FixedOrder(positions, slots, pages, starts, counts_B, max(counts), width * page_size, page_size, first_rows)


def given(value: T | None) -> T:
    """A field that may be None, but not in the form at hand."""
    assert value is not None
    return value


class FixedOrder(NamedTuple):
    """Sequences of new tokens over the cache, as `invariant_attention` takes them."""

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
