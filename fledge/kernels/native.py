"""`native.c` compiled for this machine on first use, where there is a C compiler; without one the torch path serves."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fledge.sources import cache_folder

SOURCE = Path(__file__).with_name("native.c")
# Compiled and linked apart: linking with -ffast-math would switch off denormals for the whole process.
COMPILE = ("-O3", "-march=native", "-ffast-math", "-fPIC", "-c")


@cache
def library() -> ctypes.PyDLL | None:
    """None where there is no compiler, or FLEDGE_NATIVE=0."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None or os.environ.get("FLEDGE_NATIVE") == "0":
        return None
    try:
        built = ctypes.PyDLL(str(_built(compiler)))  # which holds the interpreter's lock: the calls take microseconds
    except (OSError, subprocess.SubprocessError):
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_long
    built.add_rms_norm.argtypes = [pointer] * 4 + [number] * 2 + [ctypes.c_float]
    built.swiglu.argtypes = [pointer] * 2 + [number] * 2
    built.attend.argtypes = [pointer] * 5 + [number] * 7 + [pointer]
    return built


def _built(compiler: str) -> Path:
    """The shared library, kept by source, compiler and processor: -march=native does not travel."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.machine(), platform.processor()]
    flags = next((line for line in lines if line.startswith("flags")), "".join(lines[:2]))
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    key = hashlib.sha256("\0".join([SOURCE.read_text(), version, flags, *COMPILE]).encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"fledge-{key}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled, linked = Path(folder) / "native.o", Path(folder) / "native.so"
            for command in ([*COMPILE, str(SOURCE), "-o", str(compiled)], ["-shared", str(compiled), "-o", str(linked), "-lm"]):
                subprocess.run([compiler, *command], capture_output=True, timeout=120, check=True)
            os.replace(linked, target)
    return target


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def add_rms_norm(x_ND: Tensor, delta_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    """Adds `delta` to `x` in place; returns the norm of the sum."""
    out = torch.empty_like(x_ND)
    rows, size = x_ND.shape
    library().add_rms_norm(x_ND.data_ptr(), _address(delta_ND), weight_D.data_ptr(), out.data_ptr(), rows, size, eps)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    library().swiglu(gate_up.data_ptr(), out.data_ptr(), rows, width // 2)
    return out


def attend(
    qkv: Tensor,
    cos_TE: Tensor,
    sin_TE: Tensor,
    keys_KSE: Tensor,
    values_KSE: Tensor,
    first_slot: int,
    kv_len: int,
    num_heads: int,
    window: int | None,
    out: Tensor,
) -> None:
    """One sequence with consecutive slots: its new keys and values go into the cache, and `out` [T, H·E] is written."""
    num_kv_heads, slots, head_dim = keys_KSE.shape
    offset = keys_KSE.element_size() * first_slot * head_dim
    failed = library().attend(
        qkv.data_ptr(),
        cos_TE.data_ptr(),
        sin_TE.data_ptr(),
        keys_KSE.data_ptr() + offset,
        values_KSE.data_ptr() + offset,
        slots * head_dim,
        qkv.shape[0],
        kv_len,
        num_heads,
        num_kv_heads,
        head_dim,
        window or 0,
        out.data_ptr(),
    )
    if failed:
        raise MemoryError("no memory for attention scores")
