"""The linear layer for many rows on cuBLAS, for shapes where cuBLAS sums in the order of `summation`.

cuBLAS splits K for some shapes and not for others. So it is used for a shape only after a trial on random inputs gave the same
bits as `tiles`. For a weight with several slices, cuBLAS computes one slice after the other, in fp32.

A trial runs at the first use of a shape; for a CUDA graph, before the capture. The host waits for the result, except where
requests would wait too (`background_trials`): then the linear runs on `tiles`, with the same bits, until the result is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.gate import apply_gate
from fledge.kernels.linear.slice_sums import finish
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tiles import tiled_linear


class _Trial(NamedTuple):
    """A trial whose result the host has not read yet."""

    is_exact: Tensor  # on the host; valid once the event has completed
    event: torch.cuda.Event


_trials: dict[tuple, bool | _Trial] = {}
_wait_for_trials = True


@contextmanager
def background_trials() -> Iterator[None]:
    """Inside this context the host does not wait for trials."""
    global _wait_for_trials
    before, _wait_for_trials = _wait_for_trials, False
    try:
        yield
    finally:
        _wait_for_trials = before


def cublas_is_exact(rows: int, weight_OK: Tensor, order: Summation, bias_O: Tensor | None) -> bool:
    """Whether cuBLAS is known to give the same bits as `tiles` for this shape. No trial starts while a graph is captured."""
    key = (rows, *weight_OK.shape, order.slices, weight_OK.dtype, weight_OK.device, bias_O is not None)
    trial = _trials.get(key)
    if torch.cuda.is_current_stream_capturing():
        return trial is True
    if trial is None:
        trial = _trials[key] = _start_trial(rows, weight_OK, order, bias_O)
    if isinstance(trial, _Trial):
        if not _wait_for_trials and not trial.event.query():
            return False
        trial.event.synchronize()
        trial = _trials[key] = bool(trial.is_exact)
    return trial


def _start_trial(rows: int, weight_OK: Tensor, order: Summation, bias_O: Tensor | None) -> _Trial:
    generator = torch.Generator(weight_OK.device).manual_seed(rows)
    x_MK = torch.randn((rows, weight_OK.shape[1]), generator=generator, device=weight_OK.device).to(weight_OK.dtype)
    wanted = tiled_linear(x_MK, weight_OK, bias_O, order=order)
    found = cublas_linear(x_MK, weight_OK, bias_O, order=order)
    is_exact = torch.empty(1, dtype=torch.bool, pin_memory=True)
    is_exact.copy_((found == wanted).all()[None], non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return _Trial(is_exact, event)


def cublas_linear(
    x_MK: Tensor,
    weight_OK: Tensor,
    bias_O: Tensor | None = None,
    *,
    order: Summation,
    gated: bool = False,
    residual_MO: Tensor | None = None,
) -> Tensor:
    if order.slices > 1:
        parts = zip(x_MK.split(order.slice_inputs, 1), weight_OK.split(order.slice_inputs, 1), strict=True)
        total: Tensor | None = None
        for x, weight in parts:
            if total is None:
                total = torch.mm(x, weight.t(), out_dtype=torch.float32)
            else:
                total = torch.addmm(total, x, weight.t(), out_dtype=torch.float32)
        assert total is not None
        return finish(total[None], x_MK.dtype, bias_O, gated=gated, residual_MO=residual_MO)
    out = F.linear(x_MK, weight_OK, bias_O)
    if gated:
        out = apply_gate(out)
    return out if residual_MO is None else out.add_(residual_MO)
