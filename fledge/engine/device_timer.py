"""How long the device spent on what, without making the host wait while it runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class DeviceTimer:
    def __init__(self, device: torch.device) -> None:
        self.on_cuda = device.type == "cuda"
        self.spans: dict[str, list[tuple]] = defaultdict(list)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        start = self._mark()
        yield
        self.spans[name].append((start, self._mark()))

    def _mark(self) -> torch.cuda.Event | float:
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        if not self.on_cuda:
            return {name: sum(end - start for start, end in spans) for name, spans in self.spans.items()}
        torch.cuda.synchronize()
        return {name: sum(start.elapsed_time(end) for start, end in spans) / 1e3 for name, spans in self.spans.items()}
