"""What the target settled and the drafter has not taken in, because nothing was to be drafted from it.

Synchronising the drafter takes a twentieth of a plain step on CPU. While the load leaves no room for speculation the
target's states are kept instead; they are taken in, in one pass, when the request is drafted for again. They lie in one
tensor that only grows with the number of requests that lag, so that a server's memory stays what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.engine.request import Request
from fledge.speculation.drafting import Settled

# Tokens after which a request is not caught up with any more: it goes on plainly.
LONGEST_LAG = 128


@dataclass
class _Lag:
    slot: int  # of `Backlog.states`
    start: int  # position of the first state
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Backlog:
    def __init__(self) -> None:
        self.lags: dict[Request, _Lag] = {}
        self.left: dict[Request, int] = {}  # requests that were left behind, and how far their text was computed then
        self.states: Tensor | None = None  # [slots, LONGEST_LAG, the taps side by side]
        self.free_slots: list[int] = []

    def lag(self, request: Request) -> int:
        """How many tokens the drafter is behind."""
        lag = self.lags.get(request)
        return len(lag) if lag is not None else 0

    def forget(self, request: Request) -> None:
        self.left.pop(request, None)
        if (lag := self.lags.pop(request, None)) is not None:
            self.free_slots.append(lag.slot)

    def due(self, settled: Sequence[Settled], taps: Sequence[Tensor]) -> tuple[list[Settled], Sequence[Tensor]]:
        """What the drafter must take in now, with the states it needs. Prompts never wait: their pages can be shared."""
        due: list[Settled] = []
        lags: list[_Lag | None] = []  # of those
        postponed: list[Settled] = []
        for item in settled:
            request = item.sequence
            if self.left.get(request, item.start) != item.start or (
                request in self.lags and self.lags[request].end != item.start
            ):  # it was preempted and starts over
                self.forget(request)
            if request in self.left:
                self.left[request] = item.start + len(item.rows)
            elif item.room or item.start < len(request.prompt):
                lags.append(self.lags.pop(request, None))
                due.append(item)
            else:
                postponed.append(item)
        self._keep(postponed, taps)
        return self._caught_up(due, lags, taps) if any(lag is not None for lag in lags) else (due, taps)

    def _keep(self, postponed: Sequence[Settled], taps: Sequence[Tensor]) -> None:
        slots, offsets, rows = [], [], []
        for item in postponed:
            request, count = item.sequence, len(item.rows)
            lag = self.lags.get(request)
            if lag is None:
                lag = self.lags[request] = _Lag(self._free_slot(taps), item.start, item.start)
            if len(lag) + count > LONGEST_LAG:
                self.forget(request)
                self.left[request] = item.start + count
                continue
            slots += [lag.slot] * count
            offsets += range(len(lag), len(lag) + count)
            rows += item.rows
            lag.end += count
        if rows:
            self.states[torch.tensor(slots), torch.tensor(offsets)] = torch.cat([tap[rows] for tap in taps], -1)

    def _caught_up(
        self, due: Sequence[Settled], lags: Sequence[_Lag | None], taps: Sequence[Tensor]
    ) -> tuple[list[Settled], list[Tensor]]:
        """The same with what was kept before it; rows count anew, through the states that are returned."""
        widths = [tap.shape[-1] for tap in taps]
        parts: list[list[Tensor]] = [[] for _ in taps]
        settled, first = [], 0
        for item, lag in zip(due, lags, strict=True):
            start, count = item.start, len(item.rows)
            if lag is not None:
                for part, kept in zip(parts, self.states[lag.slot, : len(lag)].split(widths, -1), strict=True):
                    part.append(kept)
                self.free_slots.append(lag.slot)
                start, count = lag.start, count + len(lag)
            for part, tap in zip(parts, taps, strict=True):
                part.append(tap[item.rows])
            settled.append(Settled(item.sequence, start, list(range(first, first + count)), item.room))
            first += count
        return settled, [torch.cat(part) for part in parts]

    def _free_slot(self, taps: Sequence[Tensor]) -> int:
        if not self.free_slots:
            before = 0 if self.states is None else len(self.states)
            larger = taps[0].new_empty(max(8, 2 * before), LONGEST_LAG, sum(tap.shape[-1] for tap in taps))
            if self.states is not None:
                larger[:before] = self.states
            self.states, self.free_slots = larger, list(range(before, len(larger)))
        return self.free_slots.pop(0)
