"""What the target settled and the drafter has not taken in, because nothing was to be drafted from it.

Synchronising the drafter takes a twentieth of a plain step on CPU. While the load leaves no room for speculation the
target's states are kept instead; they are taken in, in one pass, when the request is drafted for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.engine.request import Request
from fledge.speculation.drafting import Settled

# Tokens after which a request is not caught up with any more: it goes on plainly. The states of one take a few kilobytes.
LONGEST_LAG = 256


@dataclass
class _Lag:
    start: int  # position of the first row
    end: int
    parts: list[tuple[Sequence[Tensor], list[int]]] = field(default_factory=list)  # states of a pass, and rows of them


class Backlog:
    def __init__(self) -> None:
        self.lags: dict[Request, _Lag] = {}
        self.left: dict[Request, int] = {}  # requests that were left behind, and how far their text was computed then

    def lag(self, request: Request) -> int:
        """How many tokens the drafter is behind."""
        lag = self.lags.get(request)
        return lag.end - lag.start if lag is not None else 0

    def forget(self, request: Request) -> None:
        self.lags.pop(request, None)
        self.left.pop(request, None)

    def due(self, settled: Sequence[Settled], taps: Sequence[Tensor]) -> tuple[list[Settled], Sequence[Tensor]]:
        """What the drafter must take in now, with the states it needs. Prompts never wait: their pages can be shared."""
        due: list[Settled] = []
        caught_up: list[list[tuple[Sequence[Tensor], list[int]]]] = []
        for item in settled:
            request, lag = item.sequence, self.lags.pop(item.sequence, None)
            if lag is not None and lag.end != item.start:  # it was preempted and starts over
                lag = None
            if self.left.get(request, item.start) != item.start:
                del self.left[request]
            if request in self.left:
                self.left[request] = item.start + len(item.rows)
            elif item.room or item.start < len(request.prompt):
                before = lag.parts if lag is not None else []
                due.append(Settled(request, lag.start if lag is not None else item.start, item.rows, item.room))
                caught_up.append([*before, (taps, item.rows)])
            else:
                self._postpone(item, lag, taps, num_items=len(settled))
        if all(len(parts) == 1 for parts in caught_up):
            return due, taps
        states = [torch.cat([part[index][rows] for parts in caught_up for part, rows in parts]) for index in range(len(taps))]
        first = 0
        for item, parts in zip(due, caught_up, strict=True):
            count = sum(len(rows) for _, rows in parts)
            item.rows = list(range(first, first + count))
            first += count
        return due, states

    def _postpone(self, item: Settled, lag: _Lag | None, taps: Sequence[Tensor], num_items: int) -> None:
        lag = lag or _Lag(item.start, item.start)
        lag.end = item.start + len(item.rows)
        if lag.end - lag.start > LONGEST_LAG:
            self.left[item.sequence] = lag.end
            return
        rows = item.rows
        if len(taps[0]) > 4 * num_items:  # most of the pass is a prompt's: not kept for a few rows
            taps, rows = [tap[rows] for tap in taps], list(range(len(rows)))
        lag.parts.append((taps, rows))
        self.lags[item.sequence] = lag
