"""CUDA graphs: device work recorded once per shape and replayed with one launch. Without capture it runs eagerly."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from fledge.kernels import compile_ahead

log = logging.getLogger("fledge.engine")
WARM_UPS = 2


class StepGraphs:
    """Runs `step(*shape)` for any shape, captured as a CUDA graph on first use; without capture it is simply called.

    A step reads and writes tensors at fixed addresses and runs at least once before it is recorded; the context `idle` makes
    those runs have no effect (no row is active).
    """

    def __init__(
        self,
        step: Callable[..., None],
        device: torch.device,
        *,
        capture: bool,
        idle: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.step, self.device, self.capture, self.idle = step, device, capture, idle
        self.graphs: dict[tuple, torch.cuda.CUDAGraph] = {}
        self.seconds: dict[tuple, float] = {}  # time of a replay with all rows empty, measured when it was recorded
        self.pool: Any = None  # torch's handle of the memory that all graphs share

    def run(self, *shape: Any) -> None:
        if not self.capture:
            self.step(*shape)
            return
        if shape not in self.graphs:
            self.record_late(shape, self.record)
        self.graphs[shape].replay()

    def record_late(self, shape: tuple, record: Callable[[list[tuple]], None]) -> None:
        """Records a graph while requests wait for it, and logs that. `record`: the function that records it."""
        began = time.perf_counter()
        record([shape])
        log.info("recorded a graph of %s while requests waited: %.2f s", shape, time.perf_counter() - began)

    def record(self, shapes: Iterable[tuple]) -> None:
        """Records graphs ahead of use. Pass the largest first: smaller ones then fit into the memory it allocated."""
        missing = [shape for shape in shapes if self.capture and shape not in self.graphs]
        if not missing:
            return
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(self.device)
        current = torch.cuda.current_stream(self.device)
        # Garbage collection could free device memory, which is not allowed during capture.
        with self.idle(), without_collection():
            for shape in missing:
                side.wait_stream(current)
                with torch.cuda.stream(side):
                    if compile_ahead.is_tracing():  # recorded and discarded: nothing runs
                        self._captured(shape)
                        continue
                    # Kernels must be compiled and libraries initialised before the capture.
                    for _ in range(WARM_UPS):
                        self.step(*shape)
                    graph = self._captured(shape)
                current.wait_stream(side)
                self.graphs[shape] = graph
                self.seconds[shape] = replay_seconds(graph)

    def _captured(self, shape: tuple) -> torch.cuda.CUDAGraph:
        # `torch.cuda.graph` would collect garbage and empty the allocator's cache for each graph: tens of milliseconds.
        graph = torch.cuda.CUDAGraph()
        # A memory pool whose only graph is discarded cannot be used for another capture.
        graph.capture_begin(pool=None if compile_ahead.is_tracing() else self.pool)
        try:
            self.step(*shape)
        finally:
            graph.capture_end()
        return graph


@contextmanager
def without_collection() -> Iterator[None]:
    """Disables garbage collection inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def replay_seconds(graph: torch.cuda.CUDAGraph, rounds: int = 5) -> float:
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / rounds


def batch_sizes(largest: int, smallest: int = 1) -> list[int]:
    """Powers of two from `smallest` up to `largest`, and `largest` itself."""
    sizes = [largest]
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return sorted(sizes)


def size_for(sizes: Sequence[int], num_rows: int) -> int:
    """The smallest of the (ascending) sizes that is at least `num_rows`."""
    return next(size for size in sizes if size >= num_rows)
