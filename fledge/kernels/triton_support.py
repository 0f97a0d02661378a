"""Imports Triton if it is installed. Without it the package still imports, and everything runs on the torch references.

Kernels of a captured step overlap (programmatic dependent launch): a kernel may start while the previous one finishes, reads
only weights until `wait_for_inputs`, and lets the next one start by `let_next_start`. `wait_for_inputs` waits until the whole
previous kernel is complete; as that one waited in the same way, everything older is complete too.
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
# The interpreter cannot run inline assembly.
COMPILED = True if tl is None else tl.constexpr(not INTERPRETED)


def constant(value: int) -> Any:
    """A global constant for kernels. The compiler accepts only a `constexpr`, which the interpreter cannot use as a number."""
    return value if tl is None or INTERPRETED else tl.constexpr(value)


INT_MAX = constant(2**31 - 1)
OVERLAP = True  # benchmarks turn it off to measure its effect


def jit(function: Callable) -> Callable:
    return function if triton is None else triton.jit(function, do_not_specialize=counts_of(function))


def counts_of(function: Callable) -> list[str]:
    """The arguments that Triton should not specialise on (1, multiples of 16): it would compile again for no gain."""
    return [name for name in inspect.signature(function).parameters if name == "num_rows"]


def use_triton(x: Tensor) -> bool:
    return triton is not None and x.is_cuda


def by_device(kernel: Callable[..., R], reference: Callable[P, R]) -> Callable[P, R]:
    """A function that calls the kernel if the first tensor of the arguments is on a GPU, else the torch reference."""

    @wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = next(arg for arg in args if isinstance(arg, (Tensor, tuple)))
        on_gpu = use_triton(first if isinstance(first, Tensor) else first[0])
        return kernel(*args, **kwargs) if on_gpu else reference(*args, **kwargs)

    return run


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def overlap(x: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that calls `wait_for_inputs` and `let_next_start`."""
    if OVERLAP and x.is_cuda and is_hopper_or_newer(x.device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@lru_cache
def is_hopper_or_newer(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


# The figures of the NVIDIA H200, on which the launch configurations were measured. They are also used by the interpreter, and
# for tables that are printed without a GPU.
MEASURED_MULTIPROCESSORS = 132
MEASURED_SHARED_MEMORY = 227 << 10


@lru_cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda" or not torch.cuda.is_available():
        return MEASURED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def attention_programs(device: torch.device) -> int:
    """The number of attention programs that fill the device, two per multiprocessor: with fewer, the keys are split."""
    return 2 * multiprocessors(device)


@lru_cache
def shared_memory(device: torch.device) -> int:
    """The most shared memory in bytes that a program can have; Triton refuses to launch one that needs more."""
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
    """Returns x. The compiler moves operations on a loaded value up to its load, where they wait for it, but not above this
    fence. So with several loads, followed by a fence for each, all loads are in flight together."""
    if COMPILED:
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x


@jit
def prefetch(lines_ptr, start, SIZE: tl.constexpr, INPUTS: tl.constexpr):
    """Prefetches INPUTS 16-bit weights of each line, from `start` on, into the L2 cache."""
    if COMPILED:
        k = tl.minimum(start + tl.arange(0, INPUTS // 64) * 64, SIZE - 1)  # one request per 128 bytes
        places = (lines_ptr[:, None] + k[None, :]).to(tl.int64)
        request: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(request, "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)
