"""Triton where it is installed. Without it the package still imports, and everything runs on the torch references.

Kernels of a captured step overlap: a kernel may start while the one before it drains (programmatic dependent launch), touches
nothing but weights until `wait_for_inputs`, and allows the next one to start by `let_next_start`. Waiting is for all
of the kernel before, which waited likewise, so everything older is complete too.

How far they overlap is a choice: a kernel that lets the next one start at once has several behind it that hold their weights
(FAR); one that does so after it has waited has one (NEAR).
"""

from __future__ import annotations

import ctypes
import inspect
import os
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

P = ParamSpec("P")
R = TypeVar("R")

# The interpreter knows no assembly.
COMPILED = True if tl is None else tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")
NONE, FAR, NEAR = range(3)
OVERLAP = FAR  # benchmarks change it to measure what it brings


# Percent of a multiprocessor's memory that every kernel here asks to be shared memory; None: as the driver thinks best, for
# each by itself. To change it the multiprocessor must be empty, so kernels that disagree do not overlap there.
SHARED_MEMORY: int | None = None
_SHARED_MEMORY_ATTRIBUTE = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
_PREFER_SHARED = 1  # CU_FUNC_CACHE_PREFER_SHARED: what Triton itself asks for where a kernel needs more than 48 KB
kernel_names: set[str] = set()  # of the kernels here
_loaded: list[int] = []  # their handles


def jit(function: Callable) -> Callable:
    kernel_names.add(function.__name__)
    return function if triton is None else triton.jit(function, do_not_specialize=counts_of(function))


def counts_of(function: Callable) -> list[str]:
    """Arguments for whose values (one, multiples of 16) Triton would compile a kernel again, for no gain."""
    return [name for name in inspect.signature(function).parameters if name == "num_rows"]


def share_memory(percent: int) -> None:
    """All kernels loaded now or later ask for it; -1: for more of it rather than less. Hints: nothing depends on them."""
    global SHARED_MEMORY
    SHARED_MEMORY = percent
    for handle in _loaded:
        _ask_for(handle, percent)


def _ask_for(handle: int, percent: int) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuFuncSetCacheConfig(ctypes.c_void_p(handle), _PREFER_SHARED)
    driver.cuFuncSetAttribute(ctypes.c_void_p(handle), _SHARED_MEMORY_ATTRIBUTE, percent)


def _was_loaded(_module: object, handle: int, name: str, *_others: object) -> None:
    if name in kernel_names:
        _loaded.append(handle)
        if SHARED_MEMORY is not None:
            _ask_for(handle, SHARED_MEMORY)


if triton is not None and hasattr(getattr(triton, "knobs", None), "runtime"):
    triton.knobs.runtime.kernel_load_end_hook.add(_was_loaded)


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


def overlap(x: Tensor) -> dict[str, int | bool]:
    """Launch options of a kernel that calls the two functions below."""
    if OVERLAP and x.is_cuda and is_hopper_or_newer(x.device):
        return {"PDL": OVERLAP, "launch_pdl": True}
    return {"PDL": NONE}


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
    if PDL == 2:  # NEAR
        tl.extra.cuda.gdc_launch_dependents()


@jit
def let_next_start(PDL: tl.constexpr):
    if PDL == 1:  # FAR
        tl.extra.cuda.gdc_launch_dependents()


@jit
def loaded(x):
    """x itself. The compiler moves what is done with a load up to it, and has a barrier wait for it there; it does not move
    that above this. So with several loads and then this for each, they are all under way together."""
    if COMPILED:
        if x.dtype.primitive_bitwidth == 16:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
        else:
            x = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=1)
    return x
