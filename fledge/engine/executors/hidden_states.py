"""Stores the hidden states of running requests that may be learnt from: on the host, or by row on the device.

    eager      each pass adds the states of tokens that became part of the text
    captured   each prefill and each drafting cycle stores its rows' states, inside its graph; nothing waits for it

For a text longer than the limit, the host keeps the last tokens and the device the first ones. A request that reuses cached
pages has states only after them. One that took part in a plain captured cycle, which keeps no auxiliary states, has none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from fledge.engine.request import Request
from fledge.kernels.row_copy import take
from fledge.kernels.state_store import store_states

MAX_REQUESTS = 16  # how many requests' states are kept at the same time


@dataclass
class _Kept:
    start: int
    length: int = 0
    layers: list[Tensor] = field(default_factory=list)  # ring buffers: position p is at p % limit


class HostStates:
    """The eager executor's store: the states of each request's last `limit` tokens."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.kept: WeakKeyDictionary[Request, _Kept] = WeakKeyDictionary()

    def add(self, request: Request, start: int, rows: Sequence[int], layers: Sequence[Tensor]) -> None:
        """Adds the states of a pass; `rows`: its rows that hold the request's text from `start` on."""
        kept = self.kept.get(request)
        if kept is None or start != kept.start + kept.length:
            # Only texts that start within the prompt are kept; after a preemption the prompt is prefilled again.
            self.kept.pop(request, None)
            if not request.learn or start >= len(request.prompt) or len(self.kept) >= MAX_REQUESTS:
                return
            kept = self.kept[request] = _Kept(start)
        if not kept.layers:
            kept.layers = [layer.new_empty(self.limit, layer.shape[1]) for layer in layers]
        kept.length += len(rows)
        last, end = list(rows[-self.limit :]), kept.start + kept.length
        places = torch.arange(end - len(last), end) % self.limit
        for buffer, layer in zip(kept.layers, layers, strict=True):
            buffer[places] = take(layer, last)

    def take(self, request: Request) -> tuple[int, list[Tensor]] | None:
        kept = self.kept.pop(request, None)
        if kept is None or not kept.length:
            return None
        end = kept.start + kept.length
        start = max(kept.start, end - self.limit)
        places = torch.arange(start, end) % self.limit
        return start, [buffer[places] for buffer in kept.layers]

    def drop(self, requests: Collection[Request]) -> None:
        for request in requests:
            self.kept.pop(request, None)


class DeviceStates:
    """The captured executor's store: one buffer per layer. A row writes to its slot's part, or to the last place if it has no
    slot."""

    def __init__(
        self, limit: int, num_rows: int, num_layers: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.limit, self.device = limit, device
        places = MAX_REQUESTS * limit + 1
        self.layers = [torch.zeros(places, hidden_size, dtype=dtype, device=device) for _ in range(num_layers)]
        self.slot_R = torch.full((num_rows,), MAX_REQUESTS, dtype=torch.int64, device=device)  # moves with the rows
        self.slot_of: dict[Request, int] = {}
        self.start_of: dict[Request, int] = {}
        self.free = list(range(MAX_REQUESTS))
        self.is_active = True

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    # Part of a graph

    def store_prefill(self, layers: Sequence[Tensor], rows_N: Tensor, positions_N: Tensor, kv_slots_N: Tensor) -> None:
        """Stores the states of a prefill. `kv_slots_N`: negative where a token is padding."""
        slots_N = self.slot_R[rows_N]
        is_kept = (kv_slots_N >= 0) & (slots_N < MAX_REQUESTS) & (positions_N < self.limit)
        places = torch.where(is_kept, slots_N * self.limit + positions_N, MAX_REQUESTS * self.limit)
        for buffer, states in zip(self.layers, layers, strict=True):
            # Zeros are written to the last place, so that states of requests not to be learnt from do not stay in memory.
            buffer.index_copy_(0, places, torch.where(is_kept[:, None], states.to(buffer.dtype), 0))

    def store_cycle(self, layers: Sequence[Tensor], starts_B: Tensor, active_B: Tensor) -> None:
        """Stores the states of all verified rows, accepted or not: the next cycle overwrites rejected ones, or they lie after
        the text's end."""
        for buffer, states in zip(self.layers, layers, strict=True):
            store_states(states, buffer, self.slot_R, starts_B, active_B, MAX_REQUESTS, self.limit)

    # On the host, between launches

    def begin(self, request: Request, row: int, start: int) -> None:
        """Assigns a slot, if one is free, to a request that takes a row; its text is prefilled from `start`."""
        slot = self.slot_of.get(request)
        if slot is None and not self.free:  # frees the slots of finished requests whose states were never taken
            for finished in [one for one in self.slot_of if one.finished]:
                self._free(finished)
        if slot is None and self.is_active and request.learn and self.free:
            slot = self.slot_of[request] = self.free.pop()
        if slot is not None:
            self.start_of[request] = start
        self._set([row], MAX_REQUESTS if slot is None else slot)

    def drop(self, requests: Collection[Request], row_of: Mapping[Request, int] | None = None) -> None:
        """Frees the states of requests that leave unfinished or continue with a gap in their states. `row_of`: the rows of
        those that continue."""
        leaving = [request for request in self.slot_of if request in requests]
        if leaving:
            self._set([row_of[request] for request in leaving if request in row_of] if row_of else [], MAX_REQUESTS)
            for request in leaving:
                self._free(request)

    def detach(self, rows: Sequence[int]) -> None:
        """Disconnects rows from their slots as requests leave; the states of finished requests stay until taken."""
        self._set(rows, MAX_REQUESTS)

    def stop(self) -> None:
        """Clears all states and stops keeping new ones. The buffers stay allocated: recorded graphs write to them."""
        self.is_active = False
        for request in list(self.slot_of):
            self._free(request)
        self.slot_R.fill_(MAX_REQUESTS)
        for layer in self.layers:
            layer.zero_()

    def take(self, request: Request) -> tuple[int, list[Tensor]] | None:
        """Returns copies of a request's states, enqueued after everything launched so far, and frees its slot."""
        if (slot := self.slot_of.get(request)) is None:
            return None
        start, end = self.start_of[request], min(len(request.tokens) - 1, self.limit)
        first = slot * self.limit
        states = [layer[first + start : first + end].clone() for layer in self.layers] if start < end else []
        self._free(request)
        return (start, states) if states else None

    def _free(self, request: Request) -> None:
        """Frees a request's slot; runs after everything launched so far, so no row writes to the slot any more."""
        slot = self.slot_of.pop(request)
        del self.start_of[request]
        # States must not stay in memory until another request needs the slot. One memset per layer: for 4,096 tokens and four
        # layers of 4,096 channels 128 MiB, which is about 30 µs of an H200's bandwidth.
        for layer in self.layers:
            layer[slot * self.limit : (slot + 1) * self.limit].zero_()
        self.free.append(slot)

    def _set(self, rows: Sequence[int], slot: int) -> None:
        if rows:
            index = torch.from_numpy(np.asarray(rows, dtype=np.int64))
            if self.device.type == "cuda":
                index = index.pin_memory().to(self.device, non_blocking=True)
            self.slot_R.index_fill_(0, index, slot)
