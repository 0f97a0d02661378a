"""Times captured steps on a GPU, as a whole and by kernel."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch
from gpu_kernels import event_time
from gpu_show import show

from fledge.engine.executors.batch_state import GREEDY, RowInit
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.executors.graphs import size_for
from fledge.kernels import triton_support

if TYPE_CHECKING:
    from gpu import Bench

H200_BYTES_PER_S = 4.8e12


def filled(bench: Bench, rows: DeviceBatch, concurrency: int, tokens: int) -> None:
    """Prefills prompts into the first rows, with pages for `tokens` more. Nothing else may use the batch meanwhile."""
    rows.state.rows.active.zero_()
    page, entries = 0, []
    for row, prompt in enumerate(bench.some_prompts(concurrency)):
        count = -(-(len(prompt) + tokens + rows.lookahead) // rows.config.page_size)
        entries.append(RowInit(row, prompt, range(page, page + count), tokens))
        page += count
    rows.prefill(entries)


@torch.inference_mode()
def step_time(bench: Bench, rows: DeviceBatch, concurrency: int, depth: int, steps: int = 40) -> float:
    """Microseconds per replay, with all rows running."""
    size = size_for(rows.sizes, concurrency)
    tokens = (depth + 1) * (steps + 8)
    filled(bench, rows, concurrency, tokens)
    for _ in range(3):
        rows.graphs.run(size, depth, GREEDY)
    found = event_time(lambda: rows.graphs.run(size, depth, GREEDY), steps)
    assert int(rows.state.rows.active.sum()) == concurrency, "a row ended while it was timed"
    rows.state.rows.active.zero_()
    return found


def forget(rows: DeviceBatch) -> None:
    """Drops all captured cycles, after a change to what they contain."""
    rows.graphs.graphs.clear()
    rows.graphs.pool = None  # torch refuses a pool whose graphs have all been freed


def profile(bench: Bench) -> dict[str, object]:
    parameters = {id(p): p.numel() * p.element_size() for p in bench.decoder.parameters()}
    floor = sum(parameters.values()) / H200_BYTES_PER_S * 1e6
    found: dict[str, object] = {"floor_us": floor}
    overlap, triton_support.OVERLAP = triton_support.OVERLAP, False
    for count in (1, 64):
        rows = bench.batch(count)
        for depth in [0] + ([3] if bench.drafter is not None else []):
            step = step_time(bench, rows, count, depth)
            figures = {"step_us": step, "over_floor": step / floor, "launch_us": launch_time(bench, rows, count, depth)}
            figures |= kernel_times(bench, rows, count, depth)
            found[f"batch {count}, depth {depth}"] = figures
    triton_support.OVERLAP = overlap
    show("profile: microseconds a step, launches a step", found)
    return found


@torch.inference_mode()
def launch_time(bench: Bench, rows: DeviceBatch, concurrency: int, depth: int, steps: int = 10) -> float:
    """Host time in microseconds to launch a step while the device is idle."""
    filled(bench, rows, concurrency, (depth + 1) * (steps + 8))
    seconds = []
    for _ in range(steps):
        torch.cuda.synchronize()
        began = time.perf_counter()
        rows.graphs.run(concurrency, depth, GREEDY)
        seconds.append(time.perf_counter() - began)
    rows.state.rows.active.zero_()
    return statistics.median(seconds) * 1e6


@torch.inference_mode()
def kernel_times(bench: Bench, rows: DeviceBatch, concurrency: int, depth: int, steps: int = 10) -> dict[str, object]:
    filled(bench, rows, concurrency, (depth + 1) * (steps + 8))
    rows.graphs.run(concurrency, depth, GREEDY)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(steps):
            rows.graphs.run(concurrency, depth, GREEDY)
        torch.cuda.synchronize()
    kernels = {
        event.key[:60]: {"us": event.self_device_time_total / steps, "launches": event.count / steps}
        for event in recorded.key_averages()
        if event.self_device_time_total
    }
    rows.state.rows.active.zero_()
    ordered = dict(sorted(kernels.items(), key=lambda item: -item[1]["us"]))
    launches = sum(kernel["launches"] for kernel in kernels.values())
    return {"launches": launches, "sum_us": sum(kernel["us"] for kernel in kernels.values()), "kernels": ordered}
