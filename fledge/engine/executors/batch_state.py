"""The rows of a running batch as device tensors: each row's text length, pages, stop conditions and sampling parameters.

A row is one request. A cycle reads and writes rows in place; the host only initialises rows, moves them, and reads output late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fledge.kernels.accept import RowState
from fledge.kernels.adjustments import Adjustments, RowOptions, clear_rows, reset_rows
from fledge.kernels.bits import num_words, pack_bits, set_bits_
from fledge.kernels.sample import SamplingState
from fledge.kernels.truncation import TruncationParams

# Sampling modes of a cycle: each has a graph of its own, and a higher mode also serves rows that need only a lower one.
# TRUNCATED: sampled within top-k, min-p or top-p. ADJUSTED: logits are materialised, for penalties, bias, bans, grammar
# masks and log-probabilities.
GREEDY, SAMPLED, TRUNCATED, ADJUSTED = range(4)
MAX_STOP_IDS = 16  # stop ids that fit into `NewRows.int_params`; `BatchState.prepare_rows` takes any number
NUM_INT_PARAMS = 9  # columns of `NewRows.int_params` before the stop ids


@dataclass
class RowInit:
    """The initial values of a row for a request."""

    row: int
    text: Sequence[int]  # to prefill: the prompt, and the answer so far of a request that was preempted
    pages: Sequence[int]
    limit: int  # most tokens of the answer
    seed: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    stop_ids: Sequence[int] = ()
    depth_limit: int = 1 << 20  # drafted tokens a cycle that may be accepted
    num_cached: int = 0  # tokens of the text that the caches hold already, in its pages
    num_answered: int = 0  # tokens at the text's end that belong to the answer
    top_k: int = 0  # 0: none
    min_p: float = 0.0
    min_answer: int = 0  # fewest tokens of the answer
    options: RowOptions | None = None  # penalties, bias, bad words; None: none of them
    mask: np.ndarray | None = None  # int32 [W]: bit mask of the tokens that a grammar allows first
    wants_logprobs: bool = False

    @property
    def mode(self) -> int:
        if self.options is not None or self.mask is not None or self.wants_logprobs or self.min_answer:
            return ADJUSTED
        if self.temperature <= 0:
            return GREEDY
        return TRUNCATED if self.top_p < 1 or self.top_k > 0 or self.min_p > 0 else SAMPLED


@dataclass
class NewRows:
    """`RowInit`s as the tensors that a prefill graph reads."""

    # int64 [B, 9 + MAX_STOP_IDS]: row; 1: active; length of the text; how much of it is answer; most and fewest tokens of the
    # answer; depth limit; seed; top-k; stop ids, -1: none
    int_params: Tensor
    float_params: Tensor  # [B, 3]: temperature, top-p and min-p
    page_table: Tensor  # [B, P]

    @property
    def rows(self) -> Tensor:
        return self.int_params[:, 0].contiguous()


class BatchState:
    def __init__(
        self, num_rows: int, max_length: int, max_pages: int, vocab_size: int, device: torch.device, max_depth: int
    ) -> None:
        # One row more than there are requests: a prefill graph writes its padding there.
        self.dummy_row, self.max_depth, self.vocab_size = num_rows, max_depth, vocab_size
        num_rows += 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Set by `init_rows`, then on the device by `kernels.accept`.
        self.rows = RowState(
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
        # Set by `init_rows`.
        self.seed = zeros(num_rows, dtype=torch.int64)
        self.temperature = zeros(num_rows, dtype=torch.float32)
        self.truncation = TruncationParams(
            zeros(num_rows, dtype=torch.float32), zeros(num_rows), zeros(num_rows, dtype=torch.float32)
        )
        self.page_table = zeros(num_rows, max_pages)
        # Set by drafting; valid within one cycle.
        self.drafts = zeros(num_rows, max(max_depth, 1), dtype=torch.int64)
        self.method_state: list[Tensor] = []  # what the drafting method keeps for each row
        self.adjustments: Adjustments | None = None  # allocated on first use: 6 bytes per row and token id

    @property
    def device(self) -> torch.device:
        return self.seed.device

    @property
    def carried(self) -> list[Tensor]:
        """The tensors whose rows belong to a request from one cycle to the next."""
        tensors = [*self.rows, self.seed, self.temperature, *self.truncation, self.page_table, *self.method_state]
        return [*tensors, *(self.adjustments or ())]

    def draws(self, rows: slice | Tensor, *, truncated: bool) -> SamplingState:
        truncation = TruncationParams(*(x[rows] for x in self.truncation)) if truncated else None
        return SamplingState(self.temperature[rows], self.seed[rows], self.rows.answered[rows], truncation)

    # Row init: the host's part, then the part of the prefill graph

    def prepare_rows(self, inits: Sequence[RowInit], *, keeps_text: bool) -> None:
        """Uploads the row values that a prefill graph's inputs do not hold, without waiting for the device.

        `keeps_text`: the drafting method reads the text.
        """
        texts = self.rows.tokens
        assert texts is not None
        for init in inits:
            if keeps_text or (init.options is not None and init.options.bad_words):
                texts[init.row, : len(init.text)].copy_(self.upload(np.array(init.text, dtype=np.int32)))
            if len(init.stop_ids) > MAX_STOP_IDS:
                bits = self.rows.stop_bits[init.row]
                bits.copy_(self.upload(pack_bits(init.stop_ids, len(bits))))  # `init_rows` gets KEEP and leaves them
        if self.adjustments is None and any(init.mode == ADJUSTED for init in inits):
            self.make_adjustments()
        if self.adjustments is not None:
            clear_rows(self.adjustments, self.upload(np.array([init.row for init in inits], dtype=np.int64)))
            reset_rows(self.adjustments, [init.options for init in inits if init.options is not None])
            masks = {init.row: init.mask[None] for init in inits if init.mask is not None}
            if masks:
                self.set_masks(masks)

    def make_adjustments(self) -> Adjustments:
        if self.adjustments is None:
            self.adjustments = Adjustments.empty(len(self.seed), self.max_depth + 1, self.vocab_size, self.device)
        return self.adjustments

    def set_masks(self, masks: dict[int, np.ndarray]) -> None:
        """Sets which tokens grammars allow at the first T positions of these rows' next pass; int32 [T, W] per row."""
        adjustments = self.make_adjustments()
        rows = self.upload(np.array(list(masks), dtype=np.int64))
        stacked = self.upload(np.stack(list(masks.values())))
        adjustments.mask_RTW[:, : stacked.shape[1]].index_copy_(0, rows, stacked)
        adjustments.has_mask_R.index_fill_(0, rows, 1)

    def init_rows(self, new: NewRows) -> None:
        """Puts requests into rows, once their text is in the cache and before their next token is chosen. Capturable."""
        state = self.rows
        rows, active, length, answered, limit, least, depth_limit, seed, top_k = new.int_params[:, :NUM_INT_PARAMS].unbind(1)
        set_bits_(state.stop_bits, rows, new.int_params[:, NUM_INT_PARAMS:])
        temperature, top_p, min_p = new.float_params.unbind(1)
        for tensor, values in (
            (state.active, active),
            (state.length, length),
            (state.answered, answered),
            (state.limit, limit),
            (state.min_answer, least),
            (state.depth_limit, depth_limit),
            (self.seed, seed),
            (self.temperature, temperature),
            *zip(self.truncation, TruncationParams(top_p, top_k, min_p), strict=True),
            (self.page_table, new.page_table),
        ):
            tensor.index_copy_(0, rows, values.to(tensor.dtype))

    # Changes between cycles

    def add_pages(self, rows: Tensor, places: Tensor, pages: Tensor) -> None:
        """Writes the new entries of page tables that have grown."""
        self.page_table.index_put_((rows, places), pages.to(self.page_table.dtype))

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Moves rows to other indices. Their keys and values stay in place, because the page table moves with the row."""
        for tensor in self.carried:
            tensor[targets] = tensor[sources]
        self.stop(sources)

    def stop(self, rows: Tensor) -> None:
        self.rows.active.index_fill_(0, rows, 0)

    def upload(self, array: np.ndarray) -> Tensor:
        """Returns a copy on the device, without waiting for it."""
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)
