"""Imports Gluon, Triton's language with explicit layouts, if it is installed."""

from __future__ import annotations

from fledge.kernels.triton_support import counts_of

try:
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia import hopper
    from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:
    gluon = gl = async_copy = hopper = mma_v2 = TensorDescriptor = None


def jit(function):
    return function if gluon is None else gluon.jit(function, do_not_specialize=counts_of(function))
