"""Triton where it is installed. Without it the package still imports, and everything runs on the torch references.

Kernels of a captured step overlap: a kernel may start while the one before it drains (programmatic dependent launch), touches
nothing but weights until `wait_for_inputs`, and allows the next one to start by `let_next_start`. Waiting is for all
of the kernel before, which waited likewise, so everything older is complete too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

# Benchmarks turn it off to measure what it brings.
OVERLAP = True


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function)


def use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls the two functions below."""
    if OVERLAP and x.is_cuda and _can_overlap(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache
def _can_overlap(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


@jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
