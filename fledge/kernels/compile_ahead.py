"""Compiles Triton kernels in several processes, before the first of them is launched.

    with side_by_side():
        trace()            launches are skipped; the kernels that they need are recorded
    # forked processes have compiled all of them into Triton's cache on disk, and this process has loaded them

Compiled one after another, the kernels of SmolLM2-135M take 85 s with an empty cache.
"""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

try:
    from triton.runtime import _async_compile
    from triton.runtime.cache import get_cache_manager
    from triton.runtime.jit import JITFunction
except ImportError:
    _async_compile = get_cache_manager = JITFunction = None

log = logging.getLogger("fledge.kernels")

MAX_PROCESSES = 16
MAX_SECONDS = 120.0  # then this process compiles the rest: a forked one may hang on a lock that a thread held at the fork
_tracing: Kernels | None = None


class Kernel:
    """A kernel to compile. It takes the compiled kernel's place in the cache of its Triton function."""

    def __init__(self, key: Hashable, compile_it: Callable[[], Any], finish: Callable[[Any], None]) -> None:
        self.key, self.compile_it, self.finish = key, compile_it, finish

    def result(self, **_options: Any) -> Any:
        kernel = self.compile_it()
        self.finish(kernel)
        return kernel

    @property
    def is_on_disk(self) -> bool:
        folder = getattr(get_cache_manager(hashlib.sha256(str(self.key).encode()).hexdigest()), "cache_dir", None)
        return folder is not None and any(name.startswith("__grp__") for name in os.listdir(folder))  # written last


class Kernels:
    """Replaces Triton's `AsyncCompileMode`: collects the kernels to compile."""

    def __init__(self) -> None:
        self.by_key: dict[Hashable, Kernel] = {}

    def submit(self, key: Hashable, compile_it: Callable[[], Any], finish: Callable[[Any], None]) -> Kernel:
        return self.by_key.setdefault(key, Kernel(key, compile_it, finish))


def is_tracing() -> bool:
    return _tracing is not None


@contextmanager
def side_by_side() -> Iterator[None]:
    """Inside the block kernels are not launched; at its end all that would have been are compiled."""
    global _tracing
    if JITFunction is None or not hasattr(_async_compile, "active_mode"):
        yield
        return
    kernels = _tracing = Kernels()
    run, compile_it = JITFunction.run, JITFunction._do_compile

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **options)

    def note(self: Any, key: Hashable, signature: Any, device: Any, *others: Any, **options: Any) -> Any:
        kernel = compile_it(self, key, signature, device, *others, **options)
        self.device_caches[device][0][key] = kernel  # so that a later launch finds it
        return kernel

    token = _async_compile.active_mode.set(kernels)
    JITFunction.run, JITFunction._do_compile = compile_only, note
    try:
        yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_it
        _async_compile.active_mode.reset(token)
        _tracing = None
    missing = [kernel for kernel in kernels.by_key.values() if not kernel.is_on_disk]
    began = time.perf_counter()
    in_processes([kernel.compile_it for kernel in missing])
    for kernel in kernels.by_key.values():
        kernel.result()  # from disk
    log.info("%d kernels, %d of them new: %.1f s", len(kernels.by_key), len(missing), time.perf_counter() - began)


def in_processes(tasks: Sequence[Callable[[], Any]], max_seconds: float = MAX_SECONDS) -> None:
    """Runs tasks in forked processes; only what they write to disk is kept. The caller must redo tasks that fail or hang."""
    count = min(len(os.sched_getaffinity(0)), MAX_PROCESSES, len(tasks))
    if count < 2:
        return
    children = set()
    for number in range(count):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # about threads, which a fork does not copy: none are needed
            child = os.fork()
        if child == 0:
            try:
                for task in tasks[number::count]:
                    task()
            finally:
                os._exit(0)
        children.add(child)
    deadline = time.monotonic() + max_seconds
    while children:
        for child in list(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)
        if time.monotonic() > deadline:
            for child in children:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
