"""Times single kernels of the engine in a captured graph of many launches, for `gpu.py`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest.mock import patch

import torch

from fledge.config import ModelConfig
from fledge.engine.config import DEVICE_PAGE_SIZE
from fledge.engine.executors.device_batch import DeviceBatch, Verified
from fledge.kernels.attention.rope_attention import rope_attention, rope_attention_triton
from fledge.kernels.sample import PartialArgmax
from fledge.models.layers import MLP, Rotary
from fledge.ops.base import Ops
from fledge.ops.cuda_ops import CudaOps

DEVICE = "cuda"


def attention_times(config: ModelConfig, longest: int) -> dict[str, dict[str, float]]:
    """One layer's attention by batch, new tokens and context, in microseconds."""
    page = DEVICE_PAGE_SIZE
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    table = Rotary(size, config.max_positions, config.rope).device_table(longest, torch.device(DEVICE))
    pages = -(-longest // page)
    found = {}
    for batch in (1, 4, 16, 64, 256, 1024):
        caches = torch.randn(2, kv_heads, batch * pages * page, size, device=DEVICE, dtype=torch.bfloat16)
        tables = torch.arange(batch * pages, device=DEVICE, dtype=torch.int32).view(batch, pages)
        for new in (1, 4, 6) if batch <= 256 else (1,):
            qkv = torch.randn(batch * new, (heads + 2 * kv_heads) * size, device=DEVICE, dtype=torch.bfloat16)
            times = {}
            run = rope_attention_triton if torch.cuda.is_available() else lambda *where, streamed: rope_attention(*where)
            for context in (128, 256, 384, 512, 1900):
                starts, counts = (torch.full((batch,), n, device=DEVICE, dtype=torch.int32) for n in (context, new))
                where = (table, starts, counts, *caches, tables, page)
                for name, streamed in {"": None, ", streamed": True, ", not streamed": False}.items():
                    if not name or batch >= 64:
                        times[f"{context} keys{name}"] = graph_time(partial(run, qkv, *where, streamed=streamed))
            found[f"batch {batch}, {new} new"] = times
        del caches
    return found


def left_out(rows: DeviceBatch) -> dict[str, Callable[[], AbstractContextManager]]:
    """By name, a context in which steps of `rows` skip that part. Shapes stay the same; results are wrong."""
    size = rows.decoder.config.num_heads * rows.decoder.config.head_dim

    def no_attention(ops: Ops, attention: object, qkv: torch.Tensor, meta: object) -> torch.Tensor:
        return qkv[:, :size].contiguous() if len(qkv) > 1 else qkv[:, :size]

    def no_head(verified: Verified, depth: int, mode: int) -> PartialArgmax:
        shape = (len(verified.x_ND), 768)
        return PartialArgmax(torch.zeros(shape, device=DEVICE), torch.zeros(shape, dtype=torch.int32, device=DEVICE))

    def no_mlp(mlp: MLP, x: torch.Tensor, ops: Ops, norm: object) -> torch.Tensor:
        return x

    return {
        "nothing": nullcontext,
        "attention": lambda: patch.object(CudaOps, "attention", no_attention),
        "MLP": lambda: patch.object(MLP, "forward", no_mlp),
        "the target's head": lambda: patch.object(rows, "choose", no_head),
    }


def graph_time(run: Callable[[], object], repeats: int = 20, rounds: int = 30) -> float:
    """Microseconds per call, in a captured graph of many calls."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            run()
    return event_time(graph.replay, rounds) / repeats


def event_time(run: Callable[[], object], rounds: int) -> float:
    """Microseconds per warm call, measured on the device; without a GPU, on the host."""
    run()
    if not torch.cuda.is_available():
        began = time.perf_counter()
        for _ in range(rounds):
            run()
        return 1e6 * (time.perf_counter() - began) / rounds
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(rounds):
        run()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / rounds
