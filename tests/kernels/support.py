"""Helpers for kernel tests. Triton kernels run on CUDA, or on CPU tensors in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.formats.fp8 import LARGEST, Fp8Weight, quantize_fp8
from fledge.kernels.triton_support import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# References are tested everywhere, kernels where they can run.
runs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        triton is None or not (torch.cuda.is_available() or INTERPRETED),
        reason="needs CUDA, or Triton with TRITON_INTERPRET=1",
    ),
]


KERNELS = ["reference", pytest.param("triton", marks=runs_triton)]


def device_of_kernels() -> str:
    return "cpu" if INTERPRETED else DEVICE


def running(kernel: str, reference: Callable[..., Any], triton_kernel: Callable[..., Any]) -> tuple[Callable[..., Any], str]:
    """Returns the function for one of KERNELS and the device that it runs on."""
    return (reference, "cpu") if kernel == "reference" else (triton_kernel, device_of_kernels())


class Card:
    """The parts of Triton's driver that compiling for a card needs, without that card."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 1000 + self.capability  # not a device that kernels are launched on

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


class NotLaunched:
    """Stands in for a kernel, or for a function that launches some."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self

    def __call__(self, *_: object, **__: object) -> None:
        pass


def compiled(
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    call: Callable[[], object],
    *,
    others: tuple[str, ...] = (),
    capability: int = 90,
) -> list[Any]:
    """Compiles a module's kernel for the launches that `call` would make on a card. `others`: functions that are not run."""
    from triton.runtime import driver

    kernel, found = getattr(module, name), []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *args, **options: found.append(kernel.run(*args, grid=grid, warmup=True, **options))

    overlaps = {"PDL": True, "launch_pdl": True} if capability >= 90 else {"PDL": False}
    with monkeypatch.context() as patch:
        patch.setattr(module, name, Recorder())
        for other in others:
            patch.setattr(module, other, NotLaunched())
        patch.setattr(module, "overlap", lambda x: overlaps, raising=False)
        patch.setattr(driver, "_active", Card(capability))
        call()
    return found


compiles = pytest.mark.skipif(triton is None or INTERPRETED, reason="needs Triton")


def fp8_weight(weight_OI: Tensor, block: tuple[int, int] | None = None) -> Fp8Weight:
    """Quantises to FP8, rounding to nearest, with one scale per output or per block of outputs and inputs."""
    if block is None:
        return quantize_fp8(weight_OI)
    outputs, inputs = weight_OI.shape
    padded = F.pad(weight_OI.float(), (0, -inputs % block[1], 0, -outputs % block[0]))
    scales = (padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0])).abs().amax((1, 3)) / LARGEST).clamp(min=1e-12)
    wide = scales.repeat_interleave(block[0], 0)[:outputs]
    codes = weight_OI.float() / wide.repeat_interleave(block[1], 1)[:, :inputs]
    return Fp8Weight(codes.to(torch.float8_e4m3fn), wide, block[1])


def quantised_activations(x_NI: Tensor) -> Tensor:
    """Activations as the CPU kernels of GGUF blocks round them, in fp32: 8 bits, with one scale per 32 inputs of a row."""
    units = x_NI.float().unflatten(-1, (-1, 32))
    largest = units.abs().amax(-1, keepdim=True)
    codes = (units * torch.where(largest > 0, 127 / largest, 0.0)).round()
    return (codes * (largest / 127)).flatten(-2)
