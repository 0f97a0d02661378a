"""Turns a scheduled batch into tensors and runs the target over it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.engine.scheduler import Scheduled
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV, SequenceLayout
from fledge.models.decoder import Decoder
from fledge.ops.base import Ops


class Verified(NamedTuple):
    logits: Tensor  # [rows that need them, V]: the last token of each completed text and its draft
    logits_start: list[int | None]  # per scheduled item: its first row in `logits`; None: its prompt is still being read
    rows_start: list[int]  # per scheduled item: its first row in the taps
    taps: list[Tensor]


class Runner:
    def __init__(self, decoder: Decoder, cache: PagedKV, taps: Sequence[int], ops: Ops) -> None:
        self.decoder, self.cache, self.taps, self.ops = decoder, cache, tuple(taps), ops
        self.device = cache.keys.device

    def verify(self, batch: Sequence[Scheduled]) -> Verified:
        tokens: list[int] = []
        positions: list[int] = []
        layouts: list[SequenceLayout] = []
        rows_start: list[int] = []
        logits_start: list[int | None] = []
        wanted: list[int] = []
        for item in batch:
            first, text_end = len(tokens), item.start + item.num_tokens
            rows_start.append(first)
            tokens.extend(item.tokens())
            positions.extend(range(item.start, text_end))
            positions.extend(text_end - 1 + depth for depth in item.draft.depths())
            layouts.append(SequenceLayout(item.request.pages, item.num_rows, text_end + len(item.draft), _tail_mask(item)))
            logits_start.append(len(wanted) if item.completes else None)
            if item.completes:
                wanted.extend(range(first + item.num_tokens - 1, len(tokens)))
        tensors = torch.tensor([tokens, positions], device=self.device)
        meta = AttentionMetadata.from_layouts(layouts, tensors[1], self.cache.page_size, max(positions))
        x, taps = self.decoder.run(self.decoder.embed(tensors[0]), meta, self.ops, self.taps)
        hidden = self.ops.norm(self.decoder.norm, x)
        if len(wanted) < len(tokens):
            hidden = hidden[torch.tensor(wanted, device=self.device, dtype=torch.long)]
        return Verified(self.ops.linear(self.decoder.lm_head, hidden), logits_start, rows_start, taps)

    def keep_path(self, item: Scheduled, accepted: Sequence[int]) -> None:
        """Moves the accepted nodes of a tree to where they would lie had they been a chain."""
        size = self.cache.page_size
        base, pages = item.start + item.num_tokens, item.request.pages
        slots = [
            [pages[(base + offset) // size] * size + (base + offset) % size for offset in offsets]
            for offsets in (accepted, range(len(accepted)))
        ]
        if slots[0] != slots[1]:
            self.cache.move(*slots)


def _tail_mask(item: Scheduled) -> Tensor | None:
    """A tree's mask, widened when its text has more than the one pending token before it."""
    if item.draft.is_chain:
        return None
    assert item.num_tokens == 1, "drafts follow texts that are computed up to the pending token"
    return item.draft.tail_mask()
