"""Device work recorded once per batch size and replayed without the host. The eager twin runs the same function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

WARM_UPS = 2


class StepGraphs:
    """`step(size)` for each of a few batch sizes, captured as CUDA graphs; without capture it is simply called.

    A step reads and writes tensors that stay where they are, and runs once or more while being recorded: the caller sees
    to it that this has no effect (empty rows).
    """

    def __init__(self, step: Callable[[int], None], sizes: Sequence[int], device: torch.device, *, capture: bool) -> None:
        self.step, self.sizes = step, sorted(sizes)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if capture:
            self._capture(device)

    def size_for(self, num_rows: int) -> int:
        """The smallest recorded size that holds so many rows."""
        return next(size for size in self.sizes if size >= num_rows)

    def run(self, size: int) -> None:
        if self.graphs:
            self.graphs[size].replay()
        else:
            self.step(size)

    def _capture(self, device: torch.device) -> None:
        pool = torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream(device)
        # The largest first: the smaller ones then fit into the memory it took.
        for size in reversed(self.sizes):
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                # Kernels are compiled and libraries set up outside the recording.
                for _ in range(WARM_UPS):
                    self.step(size)
            torch.cuda.current_stream(device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.step(size)
            self.graphs[size] = graph


def batch_sizes(largest: int, smallest: int = 16) -> list[int]:
    """Powers of two up to `largest`, and it itself."""
    sizes = [largest]
    size = smallest
    while size < largest:
        sizes.append(size)
        size *= 2
    return sorted(sizes)
