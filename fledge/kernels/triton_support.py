"""Triton where it is installed. Without it the package still imports, and everything runs on the torch references.

Kernels of a captured step overlap: a kernel may start while the one before it drains (programmatic dependent launch), touches
nothing but weights until `wait_for_inputs`, and allows the next one to start by `let_next_start`. Waiting is for all
of the kernel before, which waited likewise, so everything older is complete too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

P = ParamSpec("P")
R = TypeVar("R")

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The interpreter knows no assembly.
COMPILED = True if tl is None else tl.constexpr(not INTERPRETED)


def constant(value: int) -> Any:
    """A global that kernels read. The compiler takes a `constexpr` alone; in the interpreter it is not a number."""
    return value if tl is None or INTERPRETED else tl.constexpr(value)


INT_MAX = constant(2**31 - 1)
OVERLAP = True  # benchmarks turn it off to measure what it brings


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function, do_not_specialize=counts_of(function))


def counts_of(function: Callable) -> list[str]:
    """Arguments for whose values (one, multiples of 16) Triton would compile a kernel again, for no gain."""
    return [name for name in inspect.signature(function).parameters if name == "num_rows"]


def use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda


def by_device(kernel: Callable[..., R], reference: Callable[P, R]) -> Callable[P, R]:
    """Calls the kernel where the first tensor of the arguments lies on a GPU, else the torch reference."""

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(arg for arg in args if isinstance(arg, (Tensor, tuple)))
        on_gpu = use_triton(first if isinstance(first, Tensor) else first[0])
        return kernel(*args, **kwargs) if on_gpu else reference(*args, **kwargs)

    return run


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls the two functions below."""
    if OVERLAP and x.is_cuda and is_hopper_or_newer(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache
def is_hopper_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


# Of the card that the launch configurations were measured on, an NVIDIA H200; the interpreter, and tables that are printed
# without a card, take that card's.
MEASURED_MULTIPROCESSORS = 132
MEASURED_SHARED_MEMORY = 227 << 10


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEASURED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention_programs(device: torch.device) -> int:
    """Programs of an attention that fill the device, two a multiprocessor: below this the keys are split."""
    return 2 * multiprocessors(device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of it that one program can have; Triton refuses to launch one that wants more."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEASURED_SHARED_MEMORY
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


@jit
def wait_for_inputs(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()


@jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def load_fence(x):
    """x itself. The compiler moves what is done with a load up to it, and has a barrier wait for it there; it does not move
    that above this. So with several loads and then this for each, they are all under way together."""
    if COMPILED:
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x
