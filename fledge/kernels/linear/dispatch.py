"""Which kernel runs a linear layer: one table by rows, inputs, outputs, weight format, activation type and device.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

Every kernel sums in the order of `summation`, so the choice changes the speed and no bit of a result. A decoding step is bound
by launches or by reading weights: for few rows such a layer is one kernel (two where a wide weight has a norm). The first rule
of `TABLE` that serves a case names its kernel.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels import native
from fledge.kernels.linear.cublas import cublas_is_exact, cublas_linear
from fledge.kernels.linear.reference import NormLike, linear_reference
from fledge.kernels.linear.register_mma import norm_parts, register_mma
from fledge.kernels.linear.summation import Summation, summation
from fledge.kernels.linear.tiles import tiled_linear, weight_parts
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.triton_support import use_triton


class Case(NamedTuple):
    rows: int
    inputs: int
    outputs: int  # of the weight: both halves of a gated one
    format: str  # plain | int8 | int4
    dtype: torch.dtype  # of the activations
    device: torch.device
    gated: bool = False
    group_size: int = 1  # of a quantised weight

    @property
    def order(self) -> Summation:
        return summation(self.inputs, self.outputs, self.dtype, self.device, gated=self.gated, group_size=self.group_size)


class Rule(NamedTuple):
    """A kernel and the cases it serves."""

    kernel: str
    needs: Callable[[Case], bool] = lambda case: True


# `benchmarks/gpu.py --stages linears` measures the limits.
#   register_mma   few rows of a narrow weight (bfloat16, Gluon, Hopper or newer), fed from memory; fuses the norm
#   cublas         many rows of a plain weight, where a trial shows that it sums in the same order
#   tiles          anything: programs of outputs x rows, with the slices beside, after or apart from each other
TABLE: tuple[Rule, ...] = (
    Rule("register_mma", lambda case: case.order.scales_sums and case.rows <= most_register_rows(case)),
    Rule("cublas", lambda case: case.format == "plain" and case.rows >= fewest_cublas_rows(case)),
    Rule("tiles"),
)


def most_register_rows(case: Case) -> int:
    """Every 8 or 16 rows read the weight again from the L2 cache, so small weights serve more rows."""
    return max(16, min(64, 40_000_000 // (case.inputs * case.outputs) // 16 * 16))


def fewest_cublas_rows(case: Case) -> int:
    """With several slices it computes one after the other in fp32, which pays for prefills alone."""
    if case.order.scales_sums:
        return NEVER
    return 65 if case.order.slices == 1 else 512


NEVER = 1 << 62
_forced: list[str] = []


@contextmanager
def forced(kernel: str) -> Iterator[None]:
    """All linears of plain weights on one kernel, to measure it: `cublas` in whatever order it sums."""
    _forced.append(kernel)
    yield
    _forced.pop()


def choose_kernel(case: Case) -> str:
    return next(rule.kernel for rule in TABLE if rule.needs(case))


def case_of(x_MK: Tensor, weight: Tensor | QuantizedWeight, gated: bool = False) -> Case:
    group_size = weight.group_size if isinstance(weight, QuantizedWeight) else 1
    outputs = weight_parts(weight)[0].shape[0]
    return Case(*x_MK.shape, outputs, format_of(weight), x_MK.dtype, x_MK.device, gated, group_size)


def format_of(weight: Tensor | QuantizedWeight) -> str:
    return f"int{weight.bits}" if isinstance(weight, QuantizedWeight) else "plain"


def linear(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    before_attention: bool = False,
) -> Tensor:
    """`before_attention` (a PDL barrier): all kernels from the next one on may read, at once, whatever was complete before this
    one waits.
    """
    if not use_triton(x_MK):
        return linear_reference(x_MK, weight, bias_O, norm=norm, gated=gated, residual_MO=residual_MO)
    case = case_of(x_MK, weight, gated)
    order, kernel = case.order, choose_kernel(case)
    if _forced and isinstance(weight, Tensor):
        kernel = _forced[-1]
    options = {"order": order, "gated": gated, "residual_MO": residual_MO}
    # Products by a norm's weight that is wider than the activations (Gemma's) would be rounded twice.
    if norm is not None and (_forced or not order.scales_sums or norm.weight.dtype != x_MK.dtype):
        x_MK, norm = add_rms_norm(x_MK, None, norm.weight, norm.eps), None
    if kernel == "register_mma":
        return register_mma(x_MK, weight, bias_O, norm=norm, before_attention=before_attention, **options)
    scale_M = None
    if norm is not None:
        x_MK, scale_M = norm_parts(x_MK, norm, order)
    if kernel == "cublas" and isinstance(weight, Tensor):
        if _forced:
            return cublas_linear(x_MK, weight, bias_O, **options | {"order": order._replace(slices=1)})
        if cublas_is_exact(len(x_MK), weight, order, bias_O):
            return cublas_linear(x_MK, weight, bias_O, **options)
    return tiled_linear(x_MK, weight, bias_O, scale_M=scale_M, before_attention=before_attention, **options)


class Shape(NamedTuple):
    """A linear of a model, for `table`."""

    name: str
    inputs: int
    outputs: int
    format: str = "plain"
    gated: bool = False
    group_size: int = 1


ROWS = (1, 2, 4, 16, 64, 128, 256, 1024)


def table(
    device: torch.device, shapes: Iterable[Shape], dtype: torch.dtype = torch.bfloat16, rows: Sequence[int] = ROWS
) -> list[dict[str, str | int]]:
    """For people: the kernel of each shape by its number of rows; on a CPU one serves all."""
    on_cpu = "native" if native.library() is not None else "torch"
    lines = []
    for shape in shapes:
        sizes = (shape.inputs, shape.outputs, shape.format, dtype, device, shape.gated, shape.group_size)
        cases = [Case(count, *sizes) for count in rows]
        kernels = [on_cpu if device.type == "cpu" else choose_kernel(case) for case in cases]
        line: dict[str, str | int] = {"linear": shape.name, "K": shape.inputs, "N": shape.outputs, "format": shape.format}
        line["slices"] = cases[0].order.slices
        lines.append(line | {f"{count} rows": kernel for count, kernel in zip(rows, kernels, strict=True)})
    return lines
