"""Where a Triton kernel can run: for real on CUDA, or in Triton's interpreter (TRITON_INTERPRET=1) on CPU tensors."""

from __future__ import annotations

import os

import pytest
import torch

from fledge.kernels.triton_support import triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# The references are tested everywhere; the kernels where they can run.
runs_triton = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        triton is None or not (torch.cuda.is_available() or INTERPRETED),
        reason="needs CUDA, or Triton with TRITON_INTERPRET=1",
    ),
]


def device_of_kernels() -> str:
    return "cpu" if INTERPRETED else DEVICE
