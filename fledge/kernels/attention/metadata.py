"""Attention metadata: the positions of a pass's new tokens and the pages of their keys. Its form selects the attention kernel.

    form             new tokens                                    attend over
    DECODE           a chain of T for each of B sequences          the cache and the chain itself
    TREE             T nodes of a draft tree for each of B         the cache; of its last keys, those in `tail_bits_BT`
    PREFILL          prompts or parts of them, one after another   the cache
    HOST             any of these                                  the cache; only the host knows lengths and pages

All forms except HOST are device tensors and are read on the device, so that a pass over them can be captured. The metadata does
not name a cache: a target and its drafter share page numbers, so one description serves both.

Shapes: N tokens of all sequences, B sequences, T tokens of each, P pages per sequence, C = B + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, TypeVar

import torch
from torch import Tensor

from fledge.kernels.attention.paged import HostLayouts, SequenceLayout, chain_slots

MAX_CHAIN = 62  # new tokens of a sequence whose causal mask fits the bits of a tail

T = TypeVar("T")


class AttentionForm(Enum):
    DECODE = auto()
    TREE = auto()
    PREFILL = auto()
    HOST = auto()


@dataclass(eq=False)
class AttentionMetadata:
    """The attention metadata of one pass, made by one of the constructors below."""

    form: AttentionForm
    page_table_BP: Tensor | None = None  # int32
    starts_B: Tensor | None = None  # int32: position of a sequence's first new token
    counts_B: Tensor | None = None  # DECODE, int32: how many of its T tokens are real; 0: an empty row
    lengths_B: Tensor | None = None  # TREE, int32: keys up to the end of the sequence; 0: an empty one
    positions_N: Tensor | None = None
    slots_N: Tensor | None = None  # slots in the cache; -1: stored nowhere
    offsets_C: Tensor | None = None  # PREFILL, int32: running sum of the sequences' new tokens, from 0
    tail_bits_BT: Tensor | None = None  # TREE, int64: bit j: the node sees the j-th of the last `tail` keys
    tail: int = 0
    host: HostLayouts | None = None
    highest_position: int | None = None  # HOST: avoids a synchronisation
    kept: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # see `once`

    @classmethod
    def decode(cls, page_table_BP: Tensor, starts_B: Tensor, counts_B: Tensor) -> AttentionMetadata:
        """A chain of T new tokens of each of B sequences, from position `starts` on; the last T - count are padding."""
        return cls(AttentionForm.DECODE, page_table_BP, starts_B, counts_B)

    @classmethod
    def tree(
        cls, page_table_BP: Tensor, lengths_B: Tensor, positions_N: Tensor, slots_N: Tensor, tail_bits_BT: Tensor, tail: int
    ) -> AttentionMetadata:
        """T tree nodes of each of B sequences. `lengths_B`: keys of each sequence, its nodes included. `positions_N`: a node's
        position in the text along its own path."""
        where = {"lengths_B": lengths_B, "positions_N": positions_N, "slots_N": slots_N}
        return cls(AttentionForm.TREE, page_table_BP, **where, tail_bits_BT=tail_bits_BT, tail=tail)

    @classmethod
    def packed(
        cls, positions_N: Tensor, slots_N: Tensor, page_table_BP: Tensor, starts_B: Tensor, offsets_C: Tensor
    ) -> AttentionMetadata:
        """New tokens of B sequences, one sequence after the other, `offsets[b]` to `offsets[b + 1]`, from position `starts[b]`
        on: whole prompts, ends of prompts or chunks. Tokens after the last sequence are padding."""
        where = {"positions_N": positions_N, "slots_N": slots_N}
        return cls(AttentionForm.PREFILL, page_table_BP, starts_B, **where, offsets_C=offsets_C)

    @classmethod
    def chunk(cls, positions_N: Tensor, slots_N: Tensor, page_table_P: Tensor, length: Tensor) -> AttentionMetadata:
        """One chunk of a prompt. `length`: int32 [1], the prompt's length up to the chunk's end."""
        num_tokens = len(positions_N)
        offsets = torch.arange(2, dtype=torch.int32, device=length.device) * num_tokens
        return cls.packed(positions_N, slots_N, page_table_P[None], length - num_tokens, offsets)

    @classmethod
    def from_layouts(
        cls, layouts: Sequence[SequenceLayout], positions_N: Tensor, page_size: int, highest_position: int | None = None
    ) -> AttentionMetadata:
        host = HostLayouts(layouts, page_size, positions_N.device)
        return cls(AttentionForm.HOST, positions_N=positions_N, host=host, highest_position=highest_position)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns a value that all layers of a pass share; `make` is called for the first of them."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def tokens(self, num_tokens: int, page_size: int) -> tuple[Tensor, Tensor]:
        """The position and cache slot of every new token."""
        if self.form is not AttentionForm.DECODE:
            return self.positions_N, self.slots_N
        starts, counts, pages = given(self.starts_B), given(self.counts_B), given(self.page_table_BP)
        num_new = num_tokens // len(starts)
        return self.once(("tokens", page_size), lambda: chain_slots(num_new, starts, counts, pages, page_size))

    def chain_as_tree(self, num_tokens: int) -> tuple[Tensor, Tensor | None, int]:
        """DECODE as a TREE that is a chain, once its keys are stored: keys of each sequence, tail bits and tail.

        Keys beyond a row's count are excluded, not just masked: that memory was never written, and 0 x NaN is NaN.
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

    def as_packed(self, page_size: int) -> AttentionMetadata:
        """Converts HOST metadata without trees to the form of `packed`."""
        return self.once(("packed", page_size), lambda: self._host_as_packed(page_size))

    def _host_as_packed(self, page_size: int) -> AttentionMetadata:
        layouts, positions = given(self.host).sequences, given(self.positions_N)
        assert all(layout.tail_mask is None for layout in layouts), "a tree has no order of its own"
        device = positions.device
        width = max(-(-layout.kv_len // page_size) for layout in layouts)
        pages = torch.tensor([[*layout.pages, *[0] * width][:width] for layout in layouts], device=device)
        counts = torch.tensor([layout.query_len for layout in layouts], device=device)
        sequence = torch.arange(len(layouts), device=device).repeat_interleave(counts)
        slots = pages[sequence, positions // page_size] * page_size + positions % page_size
        starts = torch.tensor([layout.kv_len - layout.query_len for layout in layouts], device=device)
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        return AttentionMetadata.packed(positions, slots, pages, starts, offsets)


def given(value: T | None) -> T:
    """Returns a field that is optional in general but set in this form; asserts that it is."""
    assert value is not None
    return value
