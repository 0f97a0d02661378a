"""The rows of a running batch, as device tensors: who is where, how far, and what was said.

A row is one request. A step reads and writes rows in place; the host only fills rows, moves them, and reads results late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.accept import RowState
from fledge.kernels.bits import num_words, pack_bits, set_bits_
from fledge.kernels.sample import Cuts, Draws

MAX_STOP_IDS = 16  # that come among the numbers of `NewRows`; `Slots.set_stop_ids` takes any number
MAX_DEPTH = 16
FIRST_STOP_ID = 9  # among the numbers of `NewRows`


@dataclass
class NewRows:
    """What the host knows of requests that enter, one entry each."""

    # int64 [B, 9 + MAX_STOP_IDS]: the row; 1 where it shall run; length of the prompt; tokens of the answer that are in it
    # already (of a request that comes back); most and fewest tokens of the answer; most drafted tokens a step that may
    # be accepted; the seed; top-k, 0: none; and the stop ids, -1: none
    numbers: Tensor
    fractions: Tensor  # [B, 3]: temperature, top-p and min-p
    page_table: Tensor  # [B, P]

    @property
    def rows(self) -> Tensor:
        return self.numbers[:, 0].contiguous()


class Slots:
    def __init__(
        self,
        num_rows: int,
        max_length: int,
        max_pages: int,
        vocab_size: int,
        device: torch.device,
        max_depth: int = MAX_DEPTH,
    ) -> None:
        # One row more than requests: what has to be written somewhere and belongs to nobody goes there.
        self.nobody = num_rows
        num_rows += 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Set by `fill`, then on the device by `kernels.accept`.
        self.state = RowState(
            active=zeros(num_rows),
            token=zeros(num_rows, dtype=torch.int64),
            length=zeros(num_rows),
            answered=zeros(num_rows),
            report=zeros(num_rows, 2 + max_depth),
            limit=zeros(num_rows),
            min_answer=zeros(num_rows),
            depth_limit=zeros(num_rows),
            stop_bits=zeros(num_rows, num_words(vocab_size)),
            tokens=zeros(num_rows, max_length),
        )
        # Set by `fill`.
        self.seed = zeros(num_rows, dtype=torch.int64)
        self.temperature = zeros(num_rows, dtype=torch.float32)
        self.cuts = Cuts(zeros(num_rows, dtype=torch.float32), zeros(num_rows), zeros(num_rows, dtype=torch.float32))
        self.page_table = zeros(num_rows, max_pages)
        # Set by drafting; lives within one step.
        self.drafts = zeros(num_rows, max(max_depth, 1), dtype=torch.int64)
        # The drafter's output for the last settled token, before its final norm; set by synchronising.
        self.draft_state: Tensor | None = None

    @property
    def carried(self) -> list[Tensor]:
        """What belongs to a row from one step to the next."""
        tensors = [*self.state, self.seed, self.temperature, *self.cuts, self.page_table]
        return tensors if self.draft_state is None else [*tensors, self.draft_state]

    def draws(self, rows: slice | Tensor, *, cuts: bool) -> Draws:
        cut = Cuts(*(x[rows] for x in self.cuts)) if cuts else None
        return Draws(self.temperature[rows], self.seed[rows], self.state.answered[rows], cut)

    def fill(self, new: NewRows) -> None:
        """Puts requests into rows; their prompts are in the cache and their first token is yet to be chosen."""
        state = self.state
        rows, active, lengths, answered, limits, least, depth_limits, seeds, top_ks = new.numbers[:, :FIRST_STOP_ID].unbind(1)
        set_bits_(state.stop_bits, rows, new.numbers[:, FIRST_STOP_ID:])
        temperatures, top_ps, min_ps = new.fractions.unbind(1)
        for tensor, values in (
            (state.active, active),
            (state.length, lengths),
            (state.answered, answered),
            (state.limit, limits),
            (state.min_answer, least),
            (state.depth_limit, depth_limits),
            (self.seed, seeds),
            (self.temperature, temperatures),
            *zip(self.cuts, Cuts(top_ps, top_ks, min_ps), strict=True),
            (self.page_table, new.page_table),
        ):
            tensor.index_copy_(0, rows, values.to(tensor.dtype))

    def set_stop_ids(self, row: int, stop_ids: Sequence[int]) -> None:
        """Any number of stop ids, before `fill` with KEEP as the first. Does not wait for the device."""
        bits = torch.from_numpy(pack_bits(stop_ids, self.state.stop_bits.shape[1]))
        self.state.stop_bits[row].copy_(bits.pin_memory() if self.seed.is_cuda else bits, non_blocking=True)

    def add_pages(self, rows: Tensor, places: Tensor, pages: Tensor) -> None:
        """Rows have grown: entries of their page tables."""
        self.page_table.index_put_((rows, places), pages.to(self.page_table.dtype))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Rows change places; their keys and values stay, for the page table moves along."""
        for tensor in self.carried:
            tensor[targets] = tensor[sources]
        self.stop(sources)

    def stop(self, rows: Tensor) -> None:
        self.state.active.index_fill_(0, rows, 0)

    def clear(self) -> None:
        self.state.active.zero_()
