"""What the target settled and the drafter has not taken in, because nothing was to be drafted from it.

Synchronising the drafter takes a twentieth of a plain step on CPU, and of reading a prompt. While the load leaves no room for
speculation the target's states are kept instead; they are taken in, in one pass, when the request is drafted for again. They
lie in one tensor that grows up to a limit, so that a server's memory stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from fledge.engine.request import Request
from fledge.speculation import rows as row_copies
from fledge.speculation.drafting import Settled

# A request whose states find no room among these is not caught up with any more: it goes on plainly.
LARGEST_STORE = 128 * 2**20  # bytes
FIRST_PLACES = 8192  # memory that is not used yet costs nothing, and growing copies it all


@dataclass
class _Lag:
    start: int  # position of the first state
    places: list[int] = field(default_factory=list)  # of the states in each of `Backlog.states`


class Backlog:
    def __init__(self) -> None:
        self.reach: dict[Request, int] = {}  # how far its text was computed when it was last seen
        self.lags: dict[Request, _Lag] = {}
        self.left: set[Request] = set()  # left behind: the drafter lacks a part of them
        self.apart: set[Request] = set()  # requests whose pages others may find before the drafter has taken them in
        self.states: list[Tensor] = []  # per tap: [places, size]
        self.free_places: list[int] = []

    def lag(self, request: Request) -> int:
        """How many tokens the drafter is behind."""
        lag = self.lags.get(request)
        return len(lag.places) if lag is not None else 0

    def forget(self, request: Request) -> None:
        self._start_over(request)
        self.apart.discard(request)

    def due(
        self, settled: Sequence[Settled], taps: Sequence[Tensor], prompt_waits: Callable[[Request], bool]
    ) -> tuple[list[Settled], Sequence[Tensor]]:
        """What the drafter must take in now, with the states it needs."""
        due: list[Settled] = []
        lags: list[_Lag | None] = []  # of those
        postponed: list[Settled] = []
        reach, left = self.reach, self.left  # every step of a crowd passes here, for nothing but what may come
        for item in settled:
            request, start = item.sequence, item.start
            if start != reach.get(request, 0):  # it begins with what the cache had, or was preempted
                self._start_over(request)
                if start and request in self.apart:
                    left.add(request)
            reach[request] = start + len(item.rows)
            if request in left:
                continue
            if item.room or (start < len(request.prompt) and not prompt_waits(request)):
                lags.append(self.lags.pop(request, None))
                due.append(item)
            else:
                postponed.append(item)
        self._keep(postponed, taps)
        return self._caught_up(due, lags, taps) if any(lag is not None for lag in lags) else (due, taps)

    def _start_over(self, request: Request) -> None:
        self.reach.pop(request, None)
        self.left.discard(request)
        if (lag := self.lags.pop(request, None)) is not None:
            self.free_places += lag.places

    def _keep(self, postponed: Sequence[Settled], taps: Sequence[Tensor]) -> None:
        places, rows = [], []
        for item in postponed:
            request, count = item.sequence, len(item.rows)
            if not self._has_room(count, taps):
                self.free_places += self.lags.pop(request, _Lag(0)).places
                self.left.add(request)
                continue
            assert count
            taken = self.free_places[-count:]
            del self.free_places[-count:]
            lag = self.lags.get(request)
            if lag is None:
                self.lags[request] = _Lag(item.start, taken)
            else:
                lag.places += taken
            places += taken
            rows += item.rows
        if rows:
            is_whole, places = len(rows) == len(taps[0]), np.array(places)
            for states, tap in zip(self.states, taps, strict=True):
                row_copies.put(states, places, tap if is_whole else row_copies.take(tap, rows))

    def _caught_up(
        self, due: Sequence[Settled], lags: Sequence[_Lag | None], taps: Sequence[Tensor]
    ) -> tuple[list[Settled], list[Tensor]]:
        """The same with what was kept before it; rows count anew, through the states that are returned."""
        parts: list[list[Tensor]] = [[] for _ in taps]
        settled, first = [], 0
        for item, lag in zip(due, lags, strict=True):
            start, count = item.start, len(item.rows)
            if lag is not None:
                for part, states in zip(parts, self.states, strict=True):
                    part.append(row_copies.take(states, lag.places))
                self.free_places += lag.places
                start, count = lag.start, count + len(lag.places)
            for part, tap in zip(parts, taps, strict=True):
                part.append(row_copies.take(tap, item.rows))
            settled.append(Settled(item.sequence, start, list(range(first, first + count)), item.room))
            first += count
        return settled, [row_copies.join(part) for part in parts]

    def _has_room(self, count: int, taps: Sequence[Tensor]) -> bool:
        """Whether so many places are free; the store grows for them while it may."""
        missing = count - len(self.free_places)
        if missing <= 0:
            return True
        before = len(self.states[0]) if self.states else 0
        most = LARGEST_STORE // sum(tap[0].nbytes for tap in taps)
        if before + missing > most:
            return False
        after = min(max(FIRST_PLACES, 2 * before, before + missing), most)
        larger = [tap.new_empty(after, tap.shape[-1]) for tap in taps]
        for new, old in zip(larger, self.states, strict=False):
            new[:before] = old
        self.states, self.free_places = larger, [*range(after - 1, before - 1, -1), *self.free_places]
        return True
