"""Triton where it is installed. Without it the package still imports, and everything runs on the torch references."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function)


def use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
