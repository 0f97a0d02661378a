"""What a user may call a device."""

from __future__ import annotations

import torch

from fledge.errors import UserError


def resolve_device(name: str) -> torch.device:
    """`auto`: the GPU, if there is one. Refuses what this machine does not have."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not one; use cpu, cuda or auto")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available; use the device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise UserError(f"there is no {name} on this machine; use {'cuda:0' if not last else f'cuda:0 to cuda:{last}'}")
    return device
