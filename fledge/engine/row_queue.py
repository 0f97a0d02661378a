"""Who is in which row of a captured batch, and who waits for one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from fledge.engine.device_batch import Entry
from fledge.engine.engine import Engine
from fledge.engine.request import Request


@dataclass
class RowQueue:
    """The requests of the rows, and those of the eager engine, as a scheduler shows them."""

    engine: Engine
    waiting_rows: deque[Request] = field(default_factory=deque)
    owners: dict[int, Request] = field(default_factory=dict)  # by row
    reading: deque[tuple[Entry, int]] = field(default_factory=deque)  # long prompts, and how far they are read
    num_rows_preempted: int = 0

    @property
    def running(self) -> list[Request]:
        return [*self.owners.values(), *self.engine.scheduler.running]

    @property
    def waiting(self) -> list[Request]:
        return [*self.waiting_rows, *self.engine.scheduler.waiting]

    @property
    def num_preemptions(self) -> int:
        return self.engine.scheduler.num_preemptions + self.num_rows_preempted
