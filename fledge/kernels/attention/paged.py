"""Attention over a paged key/value cache: the cache's storage, the layout of a batch, and the torch reference.

    one sequence:   |<------------- kv_len ------------->|
                    | cached keys      | tail            |
                                       |<- query_len ... |   the new tokens are the last `query_len` of the kv_len
    tail_mask [query_len, tail]: which of the last `tail` keys each new token sees (a draft tree); None: causal

A sequence's pages mostly form few runs of consecutive pages (the allocator prefers them). Here one run is a view and several
are gathered; the native attention reads any number of runs in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.formats import kv_cache


class PagedKV:
    """Keys and values of all layers, [layers, kv heads, slots, head size]; slot = page * page_size + offset.

    uint8 as `dtype` means Q8_0 blocks, in which a head takes a different number of elements (`kernels.formats.kv_cache`).
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        shape = (num_layers, num_kv_heads, num_pages * page_size, kv_cache.width(head_dim, dtype))
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.page_size = page_size

    def take_memory(self) -> None:
        """Makes the system allocate all of the memory now, instead of page by page when slots are first written."""
        self.keys.zero_()
        self.values.zero_()

    @staticmethod
    def bytes_per_token(num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        return 2 * num_layers * num_kv_heads * kv_cache.width(head_dim, dtype) * dtype.itemsize

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copies slots, to make accepted tree nodes consecutive."""
        source = torch.tensor(sources, device=self.keys.device)
        target = torch.tensor(targets, device=self.keys.device)
        self.keys[:, :, target] = self.keys[:, :, source]
        self.values[:, :, target] = self.values[:, :, source]


@dataclass
class SequenceLayout:
    """The cache layout of one sequence of a batch, on the host."""

    pages: Sequence[int]
    query_len: int
    kv_len: int  # keys visible to the last new token, the new ones included
    tail_mask: Tensor | None = None  # bool [query_len, tail]

    def runs(self, page_size: int, num_more: int = 0) -> list[tuple[int, int]]:
        """The runs of consecutive slots of its keys and `num_more` later ones, as (end, shift): the key at position p, below
        `end` and not in an earlier run, has slot p + `shift`."""
        kv_len = self.kv_len + num_more
        used = self.pages[: -(-kv_len // page_size)]
        if used[-1] - used[0] == len(used) - 1 and used == list(range(used[0], used[-1] + 1)):
            return [(kv_len, used[0] * page_size)]
        firsts = [0, *(index for index in range(1, len(used)) if used[index] != used[index - 1] + 1)]
        ends = [*(first * page_size for first in firsts[1:]), kv_len]
        return [(end, (used[first] - first) * page_size) for end, first in zip(ends, firsts, strict=True)]


def paired(tokens: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Tokens and positions as one host tensor [2, N]; takes a third of the time of `torch.tensor`, which is 27 µs."""
    return torch.frombuffer(array("q", [*tokens, *positions]), dtype=torch.int64).view(2, -1)


def chain_slots(
    num_new: int, starts_B: Tensor, counts_B: Tensor, page_table_BP: Tensor, page_size: int
) -> tuple[Tensor, Tensor]:
    """Positions and slots of `num_new` tokens per sequence from `starts` on. Those from `counts` on get slot -1: not stored."""
    place = torch.arange(num_new, device=starts_B.device)
    stored = place < counts_B[:, None]
    positions = torch.where(stored, starts_B[:, None] + place, 0).long()
    pages = page_table_BP.long().gather(1, positions // page_size)
    return positions.flatten(), torch.where(stored, pages * page_size + positions % page_size, -1).flatten()


class HostLayouts:
    """The layouts of a pass's sequences, and slots and masks derived from them; made once per pass, for all its layers."""

    def __init__(self, sequences: Sequence[SequenceLayout], page_size: int, device: torch.device) -> None:
        self.sequences, self.page_size, self.device = sequences, page_size, device
        self.masks: dict[tuple[int, int | None], Tensor | None] = {}

    @cached_property
    def regions(self) -> list[slice | Tensor]:
        """The slots of each sequence's keys."""
        regions: list[slice | Tensor] = []
        for layout in self.sequences:
            parts, start = [], 0
            for end, shift in layout.runs(self.page_size):
                parts.append((start + shift, end + shift))
                start = end
            if len(parts) == 1:
                regions.append(slice(*parts[0]))
            else:
                regions.append(torch.cat([torch.arange(*part, device=self.device) for part in parts]))
        return regions

    @cached_property
    def new_slots(self) -> slice | Tensor:
        """The slots of all new keys."""
        parts: list[slice | Tensor] = []
        for layout, region in zip(self.sequences, self.regions, strict=True):
            new = layout.kv_len - layout.query_len
            parts.append(region[new:] if isinstance(region, Tensor) else slice(region.start + new, region.stop))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([p if isinstance(p, Tensor) else torch.arange(p.start, p.stop, device=self.device) for p in parts])

    def mask(self, index: int, window: int | None) -> Tensor | None:
        """Additive [query_len, kv_len] mask of a sequence, or None if its new tokens see everything."""
        key = (index, window)
        if key not in self.masks:
            self.masks[key] = build_mask(self.sequences[index], window, self.device)
        return self.masks[key]


def paged_attention(
    q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, keys_KSE: Tensor, values_KSE: Tensor, host: HostLayouts, window: int | None
) -> Tensor:
    """Stores the new keys and values, then attends, sequence by sequence. The reference for all attention kernels."""
    keys_KSE[:, host.new_slots] = kv_cache.encode(k_NKE.transpose(0, 1), keys_KSE.dtype)
    values_KSE[:, host.new_slots] = kv_cache.encode(v_NKE.transpose(0, 1), values_KSE.dtype)
    outputs, row = [], 0
    for index, (layout, region) in enumerate(zip(host.sequences, host.regions, strict=True)):
        q_s = q_NHE[row : row + layout.query_len]
        row += layout.query_len
        k_s, v_s = (kv_cache.decode(stored[:, region], q_NHE.dtype) for stored in (keys_KSE, values_KSE))
        outputs.append(attention_reference(q_s, k_s, v_s, host.mask(index, window)))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def build_mask(layout: SequenceLayout, window: int | None, device: torch.device) -> Tensor | None:
    queries, keys = layout.query_len, layout.kv_len
    if layout.tail_mask is None and queries == 1 and (window is None or keys <= window):
        return None
    position = torch.arange(keys, device=device)
    if layout.tail_mask is None:
        query_position = position[keys - queries :, None]
        seen = position[None, :] <= query_position
    else:
        tail = layout.tail_mask.to(device)
        seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
        seen[:, keys - tail.shape[1] :] = tail
        # A tree node's position is counted along its own path, not in the cache.
        query_position = (keys - tail.shape[1] + tail.sum(1) - 1)[:, None]
    if window is not None:
        seen = seen & (position[None, :] > query_position - window)
    return torch.zeros(queries, keys, device=device).masked_fill_(~seen, -torch.inf)


# Up to this many new tokens, folding a group's query heads into one product per key/value head beats SDPA on CPU.
FOLDED_QUERIES = 16


def attention_reference(q_THE: Tensor, k_KSE: Tensor, v_KSE: Tensor, mask_TS: Tensor | None) -> Tensor:
    """Grouped-query attention of one sequence."""
    (T, H, E), (K, S, _) = q_THE.shape, k_KSE.shape
    k_KSE, v_KSE = k_KSE.to(q_THE.dtype), v_KSE.to(q_THE.dtype)
    if T > FOLDED_QUERIES:
        mask = None if mask_TS is None else mask_TS.to(q_THE.dtype)
        out = F.scaled_dot_product_attention(
            q_THE.transpose(0, 1)[None], k_KSE[None], v_KSE[None], attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    group = H // K
    q = q_THE.reshape(K, group, E) if T == 1 else q_THE.view(T, K, group, E).permute(1, 2, 0, 3).reshape(K, group * T, E)
    scores = torch.bmm(q, k_KSE.transpose(1, 2)).mul_(E**-0.5)
    if mask_TS is not None:
        scores.view(K, group, T, S).add_(mask_TS)
    out = torch.bmm(scores.softmax(-1), v_KSE)
    return out.view(1, H, E) if T == 1 else out.view(K, group, T, E).permute(2, 0, 1, 3).reshape(T, H, E)


class Attend(Protocol):
    """An attention function of the caller's: over a paged cache when serving, over packed documents when training."""

    def __call__(self, layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
        """Returns the attention output [N, H, E]; scores are scaled by 1/sqrt(E)."""


def causal_attend(lengths: Sequence[int] | None = None) -> Attend:
    """Causal attention without a cache over whole, concatenated sequences of these lengths (None: a single sequence)."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        outputs = []
        for q_s, k_s, v_s in zip(*(x.split(lengths or [x.shape[0]]) for x in (q, k, v)), strict=True):
            mask = None
            if window is not None:
                ago = torch.arange(len(q_s), device=q.device)
                ago = ago[:, None] - ago[None, :]
                mask = (ago >= 0) & (ago < window)
            outputs.append(
                F.scaled_dot_product_attention(
                    q_s.transpose(0, 1)[None],
                    k_s.transpose(0, 1)[None],
                    v_s.transpose(0, 1)[None],
                    attn_mask=mask,
                    is_causal=mask is None,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(outputs)

    return attend
