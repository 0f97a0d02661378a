"""What the target settled and the drafter has not taken in, because nothing was to be drafted from it.

Synchronising the drafter takes a twentieth of a plain step on CPU, and of reading a prompt. While the load leaves no room for
speculation the target's states are kept instead, as the passes left them; they are taken in, all at once, when the request is
drafted for again. Copying them would cost a hundredth of a step. They take memory up to a limit, so that a server's stays what
it is: at the limit each request keeps its own rows of the passes alone, and those that find no room even so go on plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fledge.engine.request import Request
from fledge.kernels import row_copy as row_copies
from fledge.speculation.drafting import Settled

# A request whose states find no room in this is not caught up with any more: it goes on plainly.
LARGEST_STORE = 128 * 2**20  # bytes


@dataclass
class _States:
    """Of a pass, by tap; kept for as long as requests lag behind in it."""

    taps: Sequence[Tensor]
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tap.nbytes for tap in self.taps)


@dataclass
class _Lag:
    start: int  # position of the first state
    count: int = 0
    parts: list[tuple[_States, Sequence[int]]] = field(default_factory=list)  # rows of passes, in order

    def rows(self, tap: int) -> Iterable[Tensor]:
        return (row_copies.take(states.taps[tap], rows) for states, rows in self.parts)


class Backlog:
    def __init__(self) -> None:
        self.reach: dict[Request, int] = {}  # how far its text was computed when it was last seen
        self.lags: dict[Request, _Lag] = {}
        self.left: set[Request] = set()  # left behind: the drafter lacks a part of them
        self.apart: set[Request] = set()  # requests whose pages others may find before the drafter has taken them in
        self.num_bytes = 0  # of all states that are kept

    def lag(self, request: Request) -> int:
        """How many tokens the drafter is behind."""
        lag = self.lags.get(request)
        return lag.count if lag is not None else 0

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
        self._drop(request)

    def _drop(self, request: Request) -> None:
        if (lag := self.lags.pop(request, None)) is not None:
            self._release(lag)

    def _release(self, lag: _Lag) -> None:
        for states, _ in lag.parts:
            states.num_users -= 1
            if not states.num_users:
                self.num_bytes -= states.num_bytes

    def _keep(self, postponed: Sequence[Settled], taps: Sequence[Tensor]) -> None:
        if not postponed:
            return
        states = _States(taps)
        if self.num_bytes + states.num_bytes > LARGEST_STORE:
            for lag in self.lags.values():
                self._squeeze(lag)
        for item in postponed:
            request = item.sequence
            own = states
            if self.num_bytes + (0 if states.num_users else states.num_bytes) > LARGEST_STORE:
                own = _States([row_copies.take(tap, item.rows) for tap in taps])
                if self.num_bytes + own.num_bytes > LARGEST_STORE:
                    self._drop(request)
                    self.left.add(request)
                    continue
            lag = self.lags.setdefault(request, _Lag(item.start))
            self._hold(lag, own, item.rows if own is states else range(len(item.rows)))

    def _hold(self, lag: _Lag, states: _States, rows: Sequence[int]) -> None:
        if not states.num_users:
            self.num_bytes += states.num_bytes
        states.num_users += 1
        lag.parts.append((states, rows))
        lag.count += len(rows)

    def _squeeze(self, lag: _Lag) -> None:
        """Its own rows alone: the others of the passes may be nobody's any more."""
        own = _States([row_copies.join(list(lag.rows(tap))) for tap in range(len(lag.parts[0][0].taps))])
        self._release(lag)
        lag.parts, lag.count = [], 0
        self._hold(lag, own, range(len(own.taps[0])))

    def _caught_up(
        self, due: Sequence[Settled], lags: Sequence[_Lag | None], taps: Sequence[Tensor]
    ) -> tuple[list[Settled], list[Tensor]]:
        """The same with what was kept before it; rows count anew, through the states that are returned."""
        parts: list[list[Tensor]] = [[] for _ in taps]
        settled, first = [], 0
        for item, lag in zip(due, lags, strict=True):
            start, count = item.start, len(item.rows)
            if lag is not None:
                for tap, part in enumerate(parts):
                    part += lag.rows(tap)
                self._release(lag)
                start, count = lag.start, count + lag.count
            for part, tap in zip(parts, taps, strict=True):
                part.append(row_copies.take(tap, item.rows))
            settled.append(Settled(item.sequence, start, list(range(first, first + count)), item.room))
            first += count
        return settled, [row_copies.join(part) for part in parts]
