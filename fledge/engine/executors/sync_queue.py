"""The drafter sync queue: hidden states of accepted tokens that the drafter has not processed, because nothing is drafted.

Syncing the drafter takes 5 % of a plain step on CPU, and of prefill. While the load is too high for speculation, the target's
hidden states are queued instead, as references to the passes' tensors (a copy would cost 1 % of a step), and processed at once
when the request is drafted for again. Memory is bounded: at the limit each request keeps copies of only its own rows, and one
whose copy does not fit either becomes stale and continues without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from fledge.engine.request import Request
from fledge.kernels import row_copy as row_copies
from fledge.speculation.methods.base import AcceptedSpan

MAX_BYTES = 128 * 2**20  # of all queued hidden states


@dataclass
class _States:
    """Hidden states of a pass, one tensor per layer; kept as long as a request has rows of it queued."""

    taps: Sequence[Tensor]
    num_users: int = 0

    @property
    def num_bytes(self) -> int:
        return sum(tap.nbytes for tap in self.taps)


@dataclass
class _Pending:
    """Queued rows of one request."""

    start: int  # position of the first state
    count: int = 0
    parts: list[tuple[_States, Sequence[int]]] = field(default_factory=list)  # passes and the request's rows in them, in order

    def rows(self, tap: int) -> Iterable[Tensor]:
        return (row_copies.take(states.taps[tap], rows) for states, rows in self.parts)


class SyncQueue:
    def __init__(self) -> None:
        self.ends: dict[Request, int] = {}  # position behind the last span of each request
        self.pending: dict[Request, _Pending] = {}
        self.num_bytes = 0  # of all queued states

    def num_tokens(self, request: Request) -> int:
        """Tokens that the drafter has not processed yet."""
        pending = self.pending.get(request)
        return pending.count if pending is not None else 0

    def forget(self, request: Request) -> None:
        self.ends.pop(request, None)
        self._drop(request)

    def due(
        self, spans: Sequence[AcceptedSpan], taps: Sequence[Tensor], may_postpone: Callable[[Request], bool]
    ) -> tuple[list[AcceptedSpan], Sequence[Tensor]]:
        """Returns the spans that the drafter must process now and their states; queues the rest. Hot path: runs every step."""
        due: list[AcceptedSpan] = []
        queued: list[_Pending | None] = []  # earlier states of the due requests
        postponed: list[AcceptedSpan] = []
        for span in spans:
            request, start = span.request, span.start
            if start != self.ends.get(request, 0):  # it was preempted, or starts after a cached prefix
                self._drop(request)
                if start and request.page_keys is not None and not request.page_keys.drafted:
                    request.drafter_stale = True
            self.ends[request] = start + len(span.rows)
            if request.drafter_stale:
                continue
            if span.max_draft_tokens or (start < len(request.prompt) and not may_postpone(request)):
                queued.append(self.pending.pop(request, None))
                due.append(span)
            else:
                postponed.append(span)
        self._keep(postponed, taps)
        return self._joined(due, queued, taps) if any(one is not None for one in queued) else (due, taps)

    def _drop(self, request: Request) -> None:
        if (pending := self.pending.pop(request, None)) is not None:
            self._release(pending)

    def _release(self, pending: _Pending) -> None:
        for states, _ in pending.parts:
            states.num_users -= 1
            if not states.num_users:
                self.num_bytes -= states.num_bytes

    def _keep(self, postponed: Sequence[AcceptedSpan], taps: Sequence[Tensor]) -> None:
        if not postponed:
            return
        states = _States(taps)
        if self.num_bytes + states.num_bytes > MAX_BYTES:
            for pending in self.pending.values():
                self._squeeze(pending)
        for item in postponed:
            request = item.request
            own = states
            if self.num_bytes + (0 if states.num_users else states.num_bytes) > MAX_BYTES:
                own = _States([row_copies.take(tap, item.rows) for tap in taps])
                if self.num_bytes + own.num_bytes > MAX_BYTES:
                    self._drop(request)
                    request.drafter_stale = True
                    continue
            pending = self.pending.setdefault(request, _Pending(item.start))
            self._hold(pending, own, item.rows if own is states else range(len(item.rows)))

    def _hold(self, pending: _Pending, states: _States, rows: Sequence[int]) -> None:
        if not states.num_users:
            self.num_bytes += states.num_bytes
        states.num_users += 1
        pending.parts.append((states, rows))
        pending.count += len(rows)

    def _squeeze(self, pending: _Pending) -> None:
        """Replaces references to whole passes by copies of the request's rows: other rows may belong to requests that left."""
        own = _States([row_copies.join(list(pending.rows(tap))) for tap in range(len(pending.parts[0][0].taps))])
        self._release(pending)
        pending.parts, pending.count = [], 0
        self._hold(pending, own, range(len(own.taps[0])))

    def _joined(
        self, due: Sequence[AcceptedSpan], queued: Sequence[_Pending | None], taps: Sequence[Tensor]
    ) -> tuple[list[AcceptedSpan], list[Tensor]]:
        """Returns the spans extended by what was queued before them, and the states that their rows now refer to."""
        parts: list[list[Tensor]] = [[] for _ in taps]
        spans, first = [], 0
        for span, pending in zip(due, queued, strict=True):
            start, count = span.start, len(span.rows)
            if pending is not None:
                for tap, part in enumerate(parts):
                    part += pending.rows(tap)
                self._release(pending)
                start, count = pending.start, count + pending.count
            for part, states in zip(parts, taps, strict=True):
                part.append(row_copies.take(states, span.rows))
            spans.append(AcceptedSpan(span.request, start, list(range(first, first + count)), span.max_draft_tokens))
            first += count
        return spans, [row_copies.join(part) for part in parts]
