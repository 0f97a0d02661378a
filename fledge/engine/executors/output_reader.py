"""Copies the output of captured passes to the host after each launch and reads it later (`OutputReader`). Decides how many
cycles are launched together, so that the device does not wait for the host (`LaunchAhead`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.engine.executors.base import Output, not_numbers
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.request import Request, TokenLogprob
from fledge.kernels.accept import DRAFTED, NOT_A_NUMBER
from fledge.kernels.logprobs import TokenLogprobs, unpack_logprobs
from fledge.speculation.costs import GraphShape
from fledge.speculation.verification import VerifiedPass

MAX_CYCLES = 4
TOO_OFTEN = 2  # one more cycle is launched together after the device ran out of work this many times …
CALM_LAUNCHES = 64  # … and one fewer after this many launches in a row at which it had not


@dataclass
class _Copy:
    """A copy on the host of what rows emitted in one pass."""

    rows: dict[int, Request]
    depth: int
    drafted_rows: frozenset[int]
    report: Tensor
    event: torch.cuda.Event | None
    shape: GraphShape | None  # the cycle's shape; None: a prefill
    before: torch.cuda.Event | None  # recorded after the previous launch; None if the device was idle in between
    logprobs: Tensor | None = None  # packed, by row and position, if a request asked for them


class OutputReader:
    def __init__(self, batch: DeviceBatch) -> None:
        self.batch = batch
        self.copies: deque[_Copy] = deque()
        self.last_launch: torch.cuda.Event | None = None  # recorded after everything that was launched
        self.failures: dict[Request, Exception] = {}  # of requests that cannot continue

    @property
    def has_unread(self) -> bool:
        return bool(self.copies)

    @property
    def max_unread_tokens(self) -> int:
        """The most tokens that a row may have emitted since the last read."""
        return sum(copy.depth + 1 for copy in self.copies)

    @property
    def all_done(self) -> bool:
        """Whether the device has finished everything that was launched; always False on a CPU, which has no events."""
        return self.last_launch is not None and self.last_launch.query()

    def mark(self) -> None:
        """Call it after launching work that has no output to read."""
        self.last_launch = self.batch.mark()

    def enqueue_copy(
        self,
        rows: dict[int, Request],
        depth: int = 0,
        shape: GraphShape | None = None,
        drafted_rows: Collection[int] = (),
        logprobs: Tensor | None = None,
    ) -> None:
        """Copies what the last launch emitted for these rows, without waiting for it."""
        before = None if self.all_done else self.last_launch
        copied = None if logprobs is None else self.batch.download(logprobs)[0]
        report, self.last_launch = self.batch.download(self.batch.state.rows.report[: max(rows) + 1])
        self.copies.append(_Copy(rows, depth, frozenset(drafted_rows), report, self.last_launch, shape, before, copied))

    def read(self, *, but_last: int, record: Callable[[GraphShape, float], None]) -> list[Output]:
        """Waits for and returns the output of all launches except the last `but_last`. Calls `record(shape, seconds)` for each
        cycle."""
        outputs: dict[Request, Output] = {}
        for request, failure in self.failures.items():
            outputs[request] = Output(request, [], [], [], failure=failure)
        self.failures.clear()
        for _ in range(len(self.copies) - but_last):
            copy = self.copies.popleft()
            if copy.event is not None:
                copy.event.synchronize()
                if copy.shape is not None and copy.before is not None:
                    record(copy.shape, copy.before.elapsed_time(copy.event) / 1e3)
            lines = copy.report.tolist()
            logprobs = unpack_logprobs(copy.logprobs) if copy.logprobs is not None else None
            for row, request in copy.rows.items():
                count, *emitted = lines[row]
                if not count:
                    continue
                depth = copy.depth if row in copy.drafted_rows else 0
                output = outputs.get(request)
                if output is None:
                    output = outputs[request] = Output(request, [], [], [])
                emitted = emitted[:count]
                if emitted[-1] % DRAFTED >= NOT_A_NUMBER:
                    output.failure = not_numbers()
                output.tokens += [token % DRAFTED for token in emitted]
                output.drafted += [token >= DRAFTED for token in emitted]
                nodes = self.batch.method.num_drafted(depth) if depth and self.batch.method is not None else 0
                output.passes.append(VerifiedPass(count, depth, nodes, depth))
                if logprobs is not None and request.params.logprobs is not None:
                    first, most = row * (copy.depth + 1), request.params.logprobs
                    output.logprobs += _logprobs(logprobs, first, output.tokens[-count:], most)
        return list(outputs.values())


def _logprobs(found: TokenLogprobs, first: int, tokens: list[int], count: int) -> list[TokenLogprob]:
    """Log-probabilities of consecutive tokens, from row `first` on, each with the `count` likeliest tokens at its position."""
    rows = slice(first, first + len(tokens))
    columns = (found.chosen_N[rows], found.values_NC[rows, :count], found.ids_NC[rows, :count])
    return [
        TokenLogprob(token, chosen, list(zip(ids, values, strict=True)))
        for token, chosen, values, ids in zip(tokens, *(column.tolist() for column in columns), strict=True)
    ]


class LaunchAhead:
    """Decides how many cycles are launched together: as few as keep the device busy while the host reads the previous ones.

    Launching costs the host time for each cycle; reading takes hardly longer for several than for one. The host sees that a
    request has ended only after all cycles of the launch, so one at a time is best if the host keeps up.
    """

    def __init__(self) -> None:
        self.cycles = 1
        self.num_idle = self.num_calm = 0
        self.skips_next = False  # set after other work ran: then an idle device does not mean that the host was too slow

    def record(self, *, device_was_idle: bool) -> None:
        """Called at each launch. `device_was_idle`: whether the device had finished all earlier work."""
        if self.skips_next:
            self.skips_next = False
            return
        if device_was_idle:
            self.num_idle, self.num_calm = self.num_idle + 1, 0
        else:
            self.num_calm += 1
        if self.num_idle >= TOO_OFTEN:
            self.cycles, self.num_idle = min(self.cycles + 1, MAX_CYCLES), 0
        elif self.num_calm >= CALM_LAUNCHES:
            self.cycles, self.num_idle, self.num_calm = max(self.cycles - 1, 1), 0, 0
