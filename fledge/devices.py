"""Devices: resolves their names, measures their matrix-product rate, and releases their memory."""

from __future__ import annotations

import gc
import time

import torch

from fledge.errors import UserError


def resolve_device(name: str) -> torch.device:
    """The device of that name; `auto`: the GPU if there is one. Refuses a device that this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"{name!r} is not a device; use cpu, cuda or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use the device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"there is no {name} on this machine; use {'cuda:0' if not last else f'cuda:0 to cuda:{last}'}")
    return device


def product_rate(device: torch.device) -> float:
    """FLOP/s of a matrix product on this device, measured for 0.1 seconds."""
    on_gpu = device.type == "cuda"
    size, dtype = (4096, torch.bfloat16) if on_gpu else (384, torch.float32)
    a = torch.randn(size, size, device=device, dtype=dtype)
    for _ in range(3):
        a @ a

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize(device)

    wait()
    began, times = time.perf_counter(), 0
    while time.perf_counter() - began < 0.1:
        for _ in range(4):
            a @ a
        wait()
        times += 4
    return 2 * size**3 * times / (time.perf_counter() - began)


def release_memory(device: torch.device) -> None:
    """Frees unused memory. Runs the garbage collector first: engines and trainers are reference cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)  # the peak then counts only what follows
