"""Gluon, Triton's language with explicit layouts, where it is installed."""

from __future__ import annotations

from fledge.kernels.triton_support import kernel_names

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.ampere import mma_v2
except ImportError:
    gluon = gl = mma_v2 = None


def jit(function):
    kernel_names.add(function.__name__)
    return function if gluon is None else gluon.jit(function)
