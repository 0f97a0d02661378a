"""Chooses the kernel of a linear layer by rows, inputs, outputs, weight format, activation type and device, and calls it.

    out = [residual +] [swiglu] ( [norm] x · weightᵀ + bias )

Every kernel sums in the order of `summation`, so the choice changes the speed and no bit of a result. A decode step is bound by
kernel launches or by reading weights, so for few rows a layer is one kernel (two if a wide weight has a norm). On cards like
the measured one, measured shapes take their launch configs from `measured.CONFIGS`; otherwise the first rule of `TABLE` whose
condition holds names the kernel.

Shapes: M rows, K inputs, O outputs. With SwiGLU the weight is [gate ; up] and there are half as many outputs.

The head is a linear, too, after the final norm. For few rows and greedy decoding its logits are not written to memory
(`head_choice`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.kernels import native
from fledge.kernels.linear import register_stream as streams
from fledge.kernels.linear import staged_mma as staged
from fledge.kernels.linear import summation as orders
from fledge.kernels.linear import tma_tiles as tma
from fledge.kernels.linear.cublas import cublas_is_exact, cublas_linear
from fledge.kernels.linear.measured import CONFIGS
from fledge.kernels.linear.reference import NormLike, linear_reference
from fledge.kernels.linear.register_mma import norm_parts, register_mma
from fledge.kernels.linear.staged_mma import staged_mma
from fledge.kernels.linear.summation import Summation, summation
from fledge.kernels.linear.tiles import Tile, tiled_head, tiled_linear, weight_parts
from fledge.kernels.linear.tma_tiles import supports_wgmma
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.rms_norm import rms_norm
from fledge.kernels.sample import PartialArgmax, SamplingState, choose
from fledge.kernels.triton_support import MEASURED_MULTIPROCESSORS, multiprocessors, shared_memory, use_triton


class Case(NamedTuple):
    rows: int
    inputs: int
    outputs: int  # of the weight: both halves of a gated one
    format: str  # plain | fp8 | int8 | int4
    dtype: torch.dtype  # of the activations
    device: torch.device
    gated: bool = False
    group_size: int = 1  # of a quantised weight

    @property
    def order(self) -> Summation:
        quantised = self.format != "plain"
        return summation(self.inputs, self.outputs, self.dtype, self.device, gated=self.gated, quantised=quantised)


class Rule(NamedTuple):
    """A kernel and the condition for choosing it."""

    kernel: str
    needs: Callable[[Case], bool] = lambda case: True


# `benchmarks/gpu_linears.py` measures the limits.
#   register_mma     few rows, narrow weight (bfloat16, Gluon, Hopper or newer): loads operands into registers; fuses the norm
#   staged_mma       up to 64 rows, small plain weight, if all programs run at the same time; fuses the norm
#   register_stream  few rows, quantised weight (bfloat16, Gluon, Hopper or newer): streams codes through shared memory
#   cublas           many rows, plain weight, if a trial shows that cuBLAS sums in the same order
#   tma_tiles        many rows, plain weight with several slices (bfloat16, Gluon, Hopper): only for measured shapes, no rule
#   tiles            anything: programs of outputs x rows; slices run side by side, in sequence, or as programs of their own
TABLE: tuple[Rule, ...] = (
    Rule("register_mma", lambda case: case.order.scales_sums and case.rows <= most_register_rows(case)),
    Rule("staged_mma", lambda case: case.format == "plain" and case.order.scales_sums and can_be_staged(case)),
    Rule("register_stream", lambda case: case.format != "plain" and case.rows <= streams.ROWS[-1] and can_stream(case)),
    Rule("cublas", lambda case: case.format == "plain" and case.rows >= fewest_cublas_rows(case)),
    Rule("tiles"),
)


def most_register_rows(case: Case) -> int:
    """The most rows for `register_mma`. Every 8 or 16 rows read the weight again from the L2 cache: more for small weights."""
    return max(16, min(64, 40_000_000 // (case.inputs * case.outputs) // 16 * 16))


def can_stream(case: Case) -> bool:
    supported = orders.supports_registers(case.inputs, case.dtype, case.device)
    return supported and streams.serves(case.inputs, case.order, case.group_size)


def fewest_cublas_rows(case: Case) -> int:
    """The fewest rows for cuBLAS. With several slices it computes one after the other in fp32, which pays only for prefills."""
    if case.order.scales_sums:
        return NEVER
    return 65 if case.order.slices == 1 else 512


def can_be_staged(case: Case) -> bool:
    """Whether `staged_mma` is used. Beyond these limits `tiles` is faster: 7.1 instead of 9.6 µs for 128 rows of 135M's
    gate_up, 4.7 instead of 6.5 for 64 rows of 1.5B's o."""
    return case.rows <= 64 and case.inputs * case.outputs <= 2_000_000 and staged_config(case) is not None


def staged_config(case: Case) -> staged.LaunchConfig | None:
    outputs = case.outputs // (2 if case.gated else 1)
    card = multiprocessors(case.device), shared_memory(case.device)
    return staged.choose_config(case.rows, outputs, case.order, case.gated, *card)


NEVER = 1 << 62


def choose_kernel(case: Case) -> tuple[str, tuple[int, ...]]:
    """Returns the kernel and the numbers of its launch config (see `measured`); empty: the kernel chooses its config."""
    # A config fills the card that it was measured on; cards with fewer or more multiprocessors use the rules.
    is_measured = multiprocessors(case.device) == MEASURED_MULTIPROCESSORS
    if case.format == "plain" and case.dtype == torch.bfloat16 and is_measured:
        for most, kernel, config in CONFIGS.get((case.inputs, case.outputs, case.gated), ()):
            if case.rows <= most and serves_plain(kernel, case):
                return kernel, config
    return next(rule.kernel for rule in TABLE if rule.needs(case)), ()


def serves_plain(kernel: str, case: Case) -> bool:
    if kernel == "tma_tiles":
        return supports_wgmma(case.device)
    if kernel == "cublas":
        return not case.order.scales_sums  # cuBLAS cannot apply the norm's scale to the sums
    return case.order.scales_sums or kernel == "tiles"


def case_of(x_MK: Tensor, weight: Tensor | QuantizedWeight, gated: bool = False) -> Case:
    format, group_size = (weight.format, weight.group_size) if isinstance(weight, QuantizedWeight) else ("plain", 1)
    return Case(*x_MK.shape, weight_parts(weight)[0].shape[0], format, x_MK.dtype, x_MK.device, gated, group_size)


def linear(
    x_MK: Tensor,
    weight: Tensor | QuantizedWeight,
    bias_O: Tensor | None = None,
    *,
    norm: NormLike | None = None,
    gated: bool = False,
    residual_MO: Tensor | None = None,
    pdl_barrier: bool = False,
) -> Tensor:
    """Computes a linear layer with norm, bias, gate and residual. With programmatic dependent launch (PDL) a kernel starts
    while the previous one still runs (see `triton_support`). `pdl_barrier`: the next kernel, attention, starts only when this
    one has waited for all earlier ones, so it may read what those wrote (settled keys, lengths) without waiting itself.
    """
    if not use_triton(x_MK):
        return linear_reference(x_MK, weight, bias_O, norm=norm, gated=gated, residual_MO=residual_MO)
    case = case_of(x_MK, weight, gated)
    order, (kernel, config) = case.order, choose_kernel(case)
    options: dict[str, Any] = {"order": order, "gated": gated, "residual_MO": residual_MO}
    # If the norm's weight has a wider type than the activations (Gemma), input * weight would be rounded twice.
    if norm is not None and (not order.scales_sums or norm.weight.dtype != x_MK.dtype):
        x_MK, norm = rms_norm(x_MK, norm.weight, norm.eps), None
    fused = options | {"norm": norm, "pdl_barrier": pdl_barrier}
    if kernel == "register_mma":
        assert isinstance(weight, Tensor), "a norm never scales the sums of quantised weights"
        rows, wide = config or (None, 0)
        return register_mma(x_MK, weight, bias_O, rows=rows, wide=bool(wide), **fused)
    if kernel == "staged_mma":
        assert isinstance(weight, Tensor)
        program = staged.LaunchConfig(*config) if config else staged_config(case)
        assert program is not None
        return staged_mma(x_MK, weight, bias_O, config=program, **fused)
    if kernel == "register_stream":
        assert isinstance(weight, QuantizedWeight)
        return streams.register_stream(x_MK, weight, bias_O, **options)
    scale_M = None
    if norm is not None:
        x_MK, scale_M = norm_parts(x_MK, norm, order)
    if kernel == "cublas" and isinstance(weight, Tensor) and cublas_is_exact(len(x_MK), weight, order, bias_O):
        return cublas_linear(x_MK, weight, bias_O, **options)
    if kernel == "tma_tiles" and isinstance(weight, Tensor) and tma.serves(x_MK, weight):
        options |= {"scale_M": scale_M, "pdl_barrier": pdl_barrier}
        return tma.tma_tiles(x_MK, weight, bias_O, config=tma.LaunchConfig(*config), **options)
    if config and kernel == "tiles":
        options |= tile_options(config) | {"split": bool(config[5])}
    return tiled_linear(x_MK, weight, bias_O, scale_M=scale_M, pdl_barrier=pdl_barrier, **options)


def tile_options(config: tuple[int, ...]) -> dict[str, Any]:
    """Returns options for `tiles` from the numbers of a launch config."""
    return {"tile": Tile(*config[:5])} if config else {}


FUSED_ROWS = 64  # most rows for which the kernel that computes the logits also chooses the best of each vocabulary block


def head_choice(
    x_ND: Tensor,
    norm: NormLike,
    weight_VD: Tensor | QuantizedWeight,
    draws: SamplingState | None = None,
    num_new: int = 1,
    ahead: int = 0,
    ids_V: Tensor | None = None,
) -> PartialArgmax:
    """Computes the final norm, the head and the choice of a token. `x_ND`: before the norm. The rest: see `sample.choose`."""
    hidden = rms_norm(x_ND, norm.weight, norm.eps)
    if use_triton(x_ND) and draws is None and len(x_ND) <= FUSED_ROWS:
        case = case_of(hidden, weight_VD)
        if case.order.slices == 1:  # a vocabulary of at least 3,840 (quantised: 32,000)
            kernel, config = choose_kernel(case)
            options = tile_options(config) if kernel == "tiles" else {}
            return tiled_head(hidden, weight_VD, case.order, ids_V, **options)
    return choose(linear(hidden, weight_VD), draws, num_new, ahead, ids_V)


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
    """Returns, for display, the kernel of each shape for each number of rows; on a CPU all use the same one."""
    on_cpu = "native" if native.library() is not None else "torch"
    lines = []
    for shape in shapes:
        sizes = (shape.inputs, shape.outputs, shape.format, dtype, device, shape.gated, shape.group_size)
        cases = [Case(count, *sizes) for count in rows]
        kernels = [on_cpu if device.type == "cpu" else choose_kernel(case)[0] for case in cases]
        line: dict[str, str | int] = {"linear": shape.name, "K": shape.inputs, "N": shape.outputs, "format": shape.format}
        line["slices"] = cases[0].order.slices
        lines.append(line | {f"{count} rows": kernel for count, kernel in zip(rows, kernels, strict=True)})
    return lines
