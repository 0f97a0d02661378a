"""The Gluon kernels compute a linear, emulated with torch on a CPU. Their bits and speed need a card (`test_linear`)."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import register_mma, register_stream, staged_mma, tma_tiles
from fledge.kernels.linear.codes import units_of
from fledge.kernels.linear.mma_fragments import Shape
from fledge.kernels.linear.staged_mma import LaunchConfig
from fledge.kernels.linear.summation import Summation, inputs_of_a_sum
from fledge.kernels.quantization import unpacked
from tests.kernels.gluon_in_torch import Count, Descriptor, run
from tests.kernels.test_linear import SURROUNDINGS, plain, some_case

NOT_ASSEMBLY = {"times": lambda x, y: x * y, "let_next_start": lambda: None, "wait_for_inputs": lambda: None}
SIZE, OUTPUTS = 328, 40  # the last slice is short, and the last program's outputs are partial


def tensors(surroundings: str, rows: int):
    torch.manual_seed(0)
    x, weight, bias, norm, gated, residual = some_case(SIZE, OUTPUTS, rows, surroundings, "cpu")
    out = torch.full((rows, OUTPUTS), float("nan"))
    constants = {"HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "PDL": False, "replaced": NOT_ASSEMBLY}
    parts = [x if part is None else part for part in (bias, None if norm is None else norm.weight, residual)]
    wanted = plain(x, weight, bias, norm, gated, residual)
    return x, weight, parts, norm.eps if norm is not None else 0.0, out, constants, wanted


def mma_constants(surroundings: str, weight: torch.Tensor, rows: int, columns: int):
    shape = Shape(rows, columns, len(weight) > OUTPUTS, 4, 128, 64, SIZE, OUTPUTS)
    has_norm = surroundings not in ("nothing", "residual")
    return {"SHAPE": shape, "HAS_NORM": has_norm, "PDL_BARRIER": False, "W_LAYOUT": None, "X_LAYOUT": None}


@pytest.mark.parametrize("config", [LaunchConfig(16, 16), LaunchConfig(32, 16), LaunchConfig(64, 32, 2)])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_staged_mma(surroundings, config):
    rows = 75
    x, weight, parts, eps, out, constants, wanted = tensors(surroundings, rows)
    constants |= mma_constants(surroundings, weight, config.rows, config.columns) | {"GROUPS": config.groups}
    grid = (-(-rows // config.rows), -(-OUTPUTS // config.columns))
    run(staged_mma._staged_mma, grid, x, weight, *parts, out, rows, eps, **constants)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [3, 19])
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
def test_register_mma(surroundings, rows):
    x, weight, parts, eps, out, constants, wanted = tensors(surroundings, rows)
    constants |= mma_constants(surroundings, weight, 8, 16)
    grid = (-(-rows // 8), -(-OUTPUTS // 16))
    run(register_mma._register_mma, grid, x, weight, *parts, out, rows, eps, **constants)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)


def product_in_order(w, x, total):
    """A product in the tensor cores' order: exact in each group of 16, then rounded to bfloat16 so that the order matters."""
    for k in range(0, w.shape[-1], 16):
        total = (total.double() + w[..., k : k + 16].double() @ x[..., k : k + 16, :].double()).bfloat16().float()
    return total


def nibbles_of(units):
    """Unpacks four codes of each unit of 16 bits; here units are stored as floats."""
    words = units.int() & 0xFFFF
    return torch.stack([words >> 4 * i & 15 for i in range(4)], -1).flatten(-2)


def weights_of(codes, shape):
    if shape.bits == 4:
        codes = nibbles_of(codes) - (0 if shape.has_offsets else 8)
    return codes.bfloat16()


def in_order(x, weight, bias, gated, residual_MO, order):
    """A linear in the order of `summation`, with the roundings of `tiles`."""
    size, part = x.shape[1], inputs_of_a_sum(order, weight)
    codes, scales = unpacked(weight).bfloat16(), weight.scales.float()
    sums = torch.zeros(len(codes), len(x))
    for first in range(0, size, order.slice_inputs):
        total = torch.zeros_like(sums)
        for start in range(first, min(first + order.slice_inputs, size), part):
            some, group = slice(start, min(start + part, size)), start // weight.group_size
            found = product_in_order(codes[:, some], x[:, some].t(), torch.zeros_like(sums))
            total = found * scales[:, group, None] + total
            if weight.offsets is not None:
                ones = torch.ones_like(codes[:, some])
                inputs = product_in_order(ones, x[:, some].t(), torch.zeros_like(sums))
                total = inputs * weight.offsets.float()[:, group, None] + total
        sums += total
    out = sums.t() if bias is None else sums.t() + bias.float()
    if gated:
        gate, up = out.bfloat16().float().chunk(2, 1)
        out = (gate / (1 + (-gate).exp())).bfloat16().float() * up
    return (out if residual_MO is None else residual_MO.float() + out.bfloat16().float()).bfloat16()


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 16, 19])
@pytest.mark.parametrize("surroundings", ["nothing", "residual", "all with bias"])
@pytest.mark.parametrize("format", ["int8", "int4", "int4 with offsets", "fp8"])
def test_register_stream(format, surroundings, rows, slices, monkeypatch):
    """Slices of 384 inputs, 192 (in steps of 64) and 128; with four of them the last is empty."""

    class InTorch:
        def __getitem__(self, grid):
            def launch(*arguments, num_warps, enable_fp_fusion, **constants):
                run(kernel, grid, *arguments, replaced=replaced, **constants)

            return launch

    kernel = register_stream._register_stream
    replaced = {**NOT_ASSEMBLY, "weights_of": weights_of, "mma_v2": product_in_order}
    no_layouts = dict.fromkeys(("CODES_LAYOUT", "X_LAYOUT", "COPY_LAYOUT", "SHARED_LAYOUT"))
    monkeypatch.setattr(register_stream, "_register_stream", InTorch())
    monkeypatch.setattr(register_stream, "layouts", lambda *_: no_layouts)
    monkeypatch.setattr(register_stream, "units_of", lambda codes, bits: units_of(codes, bits).float())
    size = 384
    x, weight, bias, _, gated, residual = some_case(size, OUTPUTS, rows, surroundings, "cpu", format, torch.bfloat16)
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    options = {"order": order, "gated": gated, "residual_MO": residual}
    found = register_stream.register_stream(x, weight, bias, **options)
    assert found.dtype == torch.bfloat16
    limit = 0.0 if not gated else 2**-5  # a CPU's exp may differ in the last bit
    torch.testing.assert_close(found, in_order(x, weight, bias, **options), rtol=limit, atol=limit)
    if format == "fp8":  # its slices are long sums
        plainly = {"gated": False, "residual_MO": None}
        other = order._replace(slice_inputs=512 if slices > 1 else 64)
        right = in_order(x, weight, None, order=order, **plainly)
        assert not torch.equal(in_order(x, weight, None, order=other, **plainly), right), "the order would not matter"


# MEMORY does not support gated weights, and a single slice has no sums to keep.
KEPT = [(sums, inputs) for sums in (tma_tiles.REGISTERS, tma_tiles.PROGRAMS) for inputs in (64, 128, 384)]
WHERE = [(what, *kept) for what in ("nothing", "norm and gate", "residual", "all with bias") for kept in KEPT]
WHERE += [(what, tma_tiles.MEMORY, inputs) for what in ("nothing", "residual") for inputs in (64, 128)]


@pytest.mark.parametrize("programs", [2, 100])
@pytest.mark.parametrize("stages", [2, 5])
@pytest.mark.parametrize(("surroundings", "sums", "slice_inputs"), WHERE)
def test_tma_tiles(surroundings, sums, slice_inputs, stages, programs):
    """Programs with several tiles and with none; more stages than a slice has steps; nothing is read too late."""
    rows, slices = 75, -(-SIZE // slice_inputs)
    x, weight, (bias, _, residual), _, out, constants, _ = tensors(surroundings, rows)
    gated = len(weight) > OUTPUTS
    scale = torch.rand(rows) if "norm" in surroundings else None
    parts = torch.full((slices, rows, len(weight)), float("nan"))
    constants |= {"SIZE": SIZE, "OUTPUTS": OUTPUTS, "GATED": gated}
    constants |= {"SLICES": slices, "SLICE_STEPS": slice_inputs // 64, "SUMS_IN": sums, "HAS_SCALE": scale is not None}
    constants |= {"ROWS": 16, "COLUMNS": 16, "STAGES": stages, "GROUP": 3, "START": 0}
    constants |= dict.fromkeys(("SUMS", "QUARTER", "STORED", "STAGED"))
    pointers = (bias, residual, x if scale is None else scale, out, parts, Count(rows))
    run(tma_tiles._tma_tiles, (programs,), Descriptor(x), Descriptor(weight), *pointers, **constants)
    sliced = [a @ b.t() for a, b in zip(x.split(slice_inputs, 1), weight.split(slice_inputs, 1), strict=True)]
    if sums == tma_tiles.PROGRAMS:
        torch.testing.assert_close(parts, torch.stack(sliced), atol=1e-4, rtol=1e-4)
        return
    if sums == tma_tiles.MEMORY:
        torch.testing.assert_close(parts[:-1], torch.stack(sliced[:-1]), atol=1e-4, rtol=1e-4)
    extras = [part if constants[name] else None for name, part in (("HAS_BIAS", bias), ("HAS_RESIDUAL", residual))]
    wanted = plain(x if scale is None else x * scale[:, None], weight, extras[0], None, gated, extras[1])
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-4)
