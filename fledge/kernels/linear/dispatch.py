"""Which kernel runs a linear layer: one table by rows, inputs, weight format, activation type and device.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

A decoding step is bound by launches, not by arithmetic: for few rows each such layer is one kernel; for many it is cuBLAS
between elementwise kernels. The first rule of `TABLE` that serves a case names its kernel.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels import native
from fledge.kernels.linear.cublas import cublas_linear
from fledge.kernels.linear.gemv import gemv
from fledge.kernels.linear.quantized_gemv import dequantize_triton, quantized_gemv
from fledge.kernels.linear.reference import NormLike, linear_reference
from fledge.kernels.linear.register_mma import register_mma, supports_registers
from fledge.kernels.linear.shared_mma import MAX_INPUTS, TILE, shared_mma
from fledge.kernels.linear.tiled import QUICK, tiled_linear
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import use_triton

PLAIN, QUANTIZED = frozenset({"plain"}), frozenset({"int8", "int4"})


class Rule(NamedTuple):
    """A kernel and the cases it serves; None: no limit."""

    kernel: str
    formats: frozenset[str] = PLAIN | QUANTIZED
    max_rows: int | None = None
    max_gated_rows: int | None = None  # None: as `max_rows`
    max_inputs: int | None = None
    min_rows: int = 0

    def serves(self, case: Case) -> bool:
        most = self.max_gated_rows if case.gated and self.max_gated_rows is not None else self.max_rows
        in_range = case.rows >= self.min_rows and (most is None or case.rows <= most)
        fits = self.max_inputs is None or case.inputs <= self.max_inputs
        needs = not self.kernel.startswith("register") or supports_registers(
            case.inputs, case.dtype, case.device, case.group_size
        )
        return case.format in self.formats and in_range and fits and needs


class Case(NamedTuple):
    rows: int
    inputs: int
    format: str  # plain | int8 | int4
    dtype: torch.dtype  # of the activations
    device: torch.device
    gated: bool = False
    group_size: int | None = None  # of a quantised weight


# `benchmarks/gpu.py --stages linears` measures the row limits.
#   register_mma   tensor cores fed from memory, 16 rows a program (bfloat16, Gluon, Hopper or newer); and where it does not run
#   gemv           products are summed, row by row; up to 4,096 inputs a program's part of the weight fits the registers
#   shared_mma     tensor cores by way of shared memory, 16 rows a program
#   tiled          tensor cores, quantised values turned into weights on the way
#   cublas, dequantize_cublas   many rows; a quantised weight is first written out in the activations' type
TABLE: tuple[Rule, ...] = (
    Rule("register_mma", max_rows=128, max_gated_rows=64, min_rows=1),
    Rule("gemv", max_rows=2, max_inputs=4096),
    Rule("shared_mma", PLAIN, max_rows=64, max_inputs=MAX_INPUTS),
    Rule("tiled", QUANTIZED, max_rows=64),
    Rule("cublas", PLAIN),
    Rule("dequantize_cublas", QUANTIZED),
)

# The final norm, the head and the greedy choice in one kernel (`head.py`); else logits by `TABLE`, then a choice.
HEAD_TABLE: tuple[Rule, ...] = (
    Rule("register_head", max_rows=TILE),
    Rule("shared_head", PLAIN, max_rows=TILE, max_inputs=MAX_INPUTS),
    Rule("tiled_head", QUANTIZED, max_rows=TILE),
    Rule("logits"),
)


def choose_kernel(case: Case, rules: Sequence[Rule] | None = None) -> str:
    """The kernel's name in `TABLE`, or in `rules`."""
    return next(rule.kernel for rule in rules or TABLE if rule.serves(case))


def case_of(x_MK: Tensor, weight: Tensor | QuantizedWeight, gated: bool = False) -> Case:
    group_size = weight.group_size if isinstance(weight, QuantizedWeight) else None
    return Case(*x_MK.shape, format_of(weight), x_MK.dtype, x_MK.device, gated, group_size)


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
    in_place: bool = False,
    before_attention: bool = False,
) -> Tensor:
    """`in_place`: the residual may be overwritten; what is returned counts.

    `before_attention` (a PDL barrier): all kernels from the next one on may read, at once, whatever was complete before this
    one waits.
    """
    options = {"norm": norm, "gated": gated, "residual_MO": residual_MO}
    if not use_triton(x_MK):
        return linear_reference(x_MK, weight, bias_O, **options)
    kernel = choose_kernel(case_of(x_MK, weight, gated))
    if kernel == "dequantize_cublas":
        weight = dequantize_triton(weight, x_MK.dtype)
    if kernel in ("cublas", "dequantize_cublas"):
        return cublas_linear(x_MK, weight, bias_O, **options, in_place=in_place)
    return run_kernel(kernel, weight)(x_MK, weight, bias_O, **options, before_attention=before_attention)


def run_kernel(kernel: str, weight: Tensor | QuantizedWeight):
    """The function behind a name of `TABLE` that fuses everything."""
    if kernel == "gemv":
        return quantized_gemv if isinstance(weight, QuantizedWeight) else gemv
    return {"register_mma": register_mma, "shared_mma": shared_mma, "tiled": partial(tiled_linear, tile=QUICK)}[kernel]


class Shape(NamedTuple):
    """A linear of a model, for `table`."""

    name: str
    inputs: int
    outputs: int
    format: str = "plain"
    gated: bool = False
    group_size: int | None = None
    is_head: bool = False  # greedy choices


ROWS = (1, 2, 4, 16, 64, 128, 256)


def table(
    device: torch.device, shapes: Iterable[Shape], dtype: torch.dtype = torch.bfloat16, rows: Sequence[int] = ROWS
) -> list[dict[str, str | int]]:
    """For people: the kernel of each shape by its number of rows; on a CPU one serves all."""
    on_cpu = "native" if native.library() is not None else "torch"
    lines = []
    for shape in shapes:
        cases = (Case(count, shape.inputs, shape.format, dtype, device, shape.gated, shape.group_size) for count in rows)
        rules = HEAD_TABLE if shape.is_head else TABLE
        kernels = (on_cpu if device.type == "cpu" else choose_kernel(case, rules) for case in cases)
        line: dict[str, str | int] = {"linear": shape.name, "K": shape.inputs, "N": shape.outputs, "format": shape.format}
        lines.append(line | {f"{count} rows": kernel for count, kernel in zip(rows, kernels, strict=True)})
    return lines
