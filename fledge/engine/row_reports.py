"""What the rows of captured cycles said, on its way to the host: read behind what is launched, and counted."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.engine.cycle_times import CycleTimes, Shape
from fledge.engine.depth_control import DepthControl
from fledge.engine.device_batch import DeviceBatch
from fledge.engine.load_depth import LoadDepth
from fledge.engine.request import Delta, Request
from fledge.kernels.accept import DRAFTED
from fledge.speculation.stats import AcceptanceStats

# The drift guard looks at about so many rows a cycle.
ROWS_WATCHED = 16


@dataclass
class _Snapshot:
    """What rows said in one pass, on its way to the host."""

    owners: dict[int, Request]
    depth: int
    drafted_for: frozenset[int]  # rows
    report: Tensor
    event: torch.cuda.Event | None
    shape: Shape | None  # of a cycle
    before: torch.cuda.Event | None  # behind the work before it, if the device went on from there without a pause


class RowReports:
    def __init__(
        self,
        rows: DeviceBatch,
        depths: LoadDepth,
        stats: AcceptanceStats,
        depth_control: DepthControl,
        times: CycleTimes,
        max_len: int,
    ) -> None:
        self.rows, self.depths, self.stats, self.depth_control, self.times = rows, depths, stats, depth_control, times
        self.max_len = max_len
        self.snapshots: deque[_Snapshot] = deque()
        self.last_work: torch.cuda.Event | None = None  # behind all that was launched so far
        self.readings = 0

    @property
    def most_unread(self) -> int:
        """Tokens that a row may have said since the last reading."""
        return sum(snapshot.depth + 1 for snapshot in self.snapshots)

    @property
    def all_done(self) -> bool:
        """Whether the device is done with all that was launched. A CPU, which is the host, never counts as done."""
        return self.last_work is not None and self.last_work.query()

    def worked(self) -> None:
        """Something was launched that leaves no report."""
        self.last_work = self.rows.mark()

    def snap(
        self,
        owners: dict[int, Request],
        depth: int = 0,
        shape: Shape | None = None,
        drafted_for: frozenset[int] = frozenset(),
    ) -> None:
        """`shape`: of the cycle that was launched last; None: it was a pass over prompts. `drafted_for`: rows."""
        before = None if self.all_done else self.last_work
        report, self.last_work = self.rows.download(self.rows.slots.state.report[: max(owners) + 1])
        self.snapshots.append(_Snapshot(owners, depth, drafted_for, report, self.last_work, shape, before))

    def read(self, *, but_last: int) -> list[Delta]:
        """What all passes but the last so many said, once they are done."""
        snapshots = [self.snapshots.popleft() for _ in range(len(self.snapshots) - but_last)]
        said: dict[Request, list[tuple[int, list[int]]]] = {}  # by pass: its depth and the tokens
        for snapshot in snapshots:
            if snapshot.event is not None:
                snapshot.event.synchronize()
                if snapshot.shape is not None and snapshot.before is not None:
                    self.times.saw(snapshot.shape, snapshot.before.elapsed_time(snapshot.event) / 1e3)
            lines = snapshot.report.tolist()
            for row, request in snapshot.owners.items():
                line = lines[row]
                if line[0]:
                    depth = snapshot.depth if row in snapshot.drafted_for else 0
                    said.setdefault(request, []).append((depth, line[1 : 1 + line[0]]))
        deltas, seen = [], Counter()
        watches = self.watches_now(len(said))
        for request, passes in said.items():
            if request.finished:  # by the host meanwhile
                continue
            tokens = passes[0][1] if len(passes) == 1 else [token for _, some in passes for token in some]
            deltas.append(
                request.append([token % DRAFTED for token in tokens], [token >= DRAFTED for token in tokens], self.max_len)
            )
            for counts in self.counted(request, passes, deltas[-1]):
                seen[counts] += 1
            if watches and request.speculate:
                self.watch(request, passes, deltas[-1])
        for (depth, accepted, emitted), times in seen.items():
            self.depths.saw(depth, accepted, times)
            at = [times] * accepted + [0] * (depth - accepted)
            counts = (times, times * depth, times * accepted, times * emitted)
            self.stats.merge(AcceptanceStats(*counts, [times] * depth, at))
        return deltas

    def counted(self, request: Request, passes: list[tuple[int, list[int]]], delta: Delta) -> list[tuple[int, int, int]]:
        """Depth, accepted and emitted tokens of each speculative pass, as far as the request took what it said."""
        found, first = [], 0
        for depth, tokens in passes:
            drafted = delta.drafted[first : first + len(tokens)]
            first += len(tokens)
            if depth and drafted:
                found.append((depth, sum(drafted), len(drafted)))
                request.stats.add_step(depth, *found[-1])
        return found

    def watches_now(self, num_rows: int) -> bool:
        """With many rows the guard looks at one reading in several, so that it takes the host no longer than with a few."""
        self.readings += 1
        return self.depth_control.guard is not None and self.readings % (1 + num_rows // ROWS_WATCHED) == 0

    def watch(self, request: Request, passes: list[tuple[int, list[int]]], delta: Delta) -> None:
        """Tells the guard what became of each draft, and which misses it could not have helped."""
        guard, outside, first = self.depth_control.guard, self.depth_control.outside, 0
        outside.saw(delta.tokens)
        for depth, tokens in passes:
            end = first + len(tokens)
            drafted = delta.drafted[first:end]
            if depth and drafted:
                stood = sum(drafted)
                missed = stood < min(depth, len(drafted))
                guard.saw(request, stood + missed, stood, nameable=outside.holds(delta.tokens[first + len(drafted) - 1]))
            first = end
