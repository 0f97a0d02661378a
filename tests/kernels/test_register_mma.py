"""The linear that feeds tensor cores from memory: on the card against float64, and compiled for it anywhere Triton is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fledge.kernels.linear import register_codes
from fledge.kernels.linear import register_mma as module
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.register_mma import OF_CODES, Form, choose_form, num_warps, register_mma
from fledge.kernels.quantization import dequantize, quantize
from tests.kernels.support import INTERPRETED

on_card = [
    pytest.mark.gpu,
    pytest.mark.skipif(module.gluon is None or INTERPRETED or not torch.cuda.is_available(), reason="needs CUDA"),
]
compiles = pytest.mark.skipif(module.gluon is None or INTERPRETED, reason="needs Triton")
CODES = {"bfloat16": (16, False), "int8": (8, False), "int4": (4, False), "int4 with offsets": (4, True)}
SHAPES = [(576, 960, 1), (576, 1536, 5), (576, 576, 16), (1536, 576, 17), (64, 40, 3), (200, 30, 6), (1728, 576, 64)]


@pytest.mark.parametrize(("size", "outputs", "rows"), [pytest.param(*shape, marks=on_card) for shape in SHAPES])
@pytest.mark.parametrize("surroundings", ["nothing", "norm", "norm and gate", "residual", "all with bias"])
def test_it_is_as_near_to_float64_as_bfloat16_is(size, outputs, rows, surroundings):
    gated = surroundings in ("norm and gate", "all with bias")

    def drawn(*shape):
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    x, weight = drawn(rows, size), drawn(outputs * (2 if gated else 1), size) / size**0.5
    bias = drawn(len(weight)) if surroundings == "all with bias" else None
    norm = Norm(drawn(size), 1e-5) if surroundings not in ("nothing", "residual") else None
    residual = drawn(rows, outputs) if surroundings in ("residual", "all with bias") else None
    wanted = x.double()
    if norm is not None:
        wanted = wanted / (wanted.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()
    wanted = wanted @ weight.double().t() + (bias.double() if bias is not None else 0)
    if gated:
        gate, up = wanted.chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
    wanted = wanted + (residual.double() if residual is not None else 0)
    for form in (Form(columns=8), Form(), Form(rows=32), Form(columns=32), Form(warps=8)):
        form = form._replace(warps=max(form.warps, num_warps(size)))
        found = register_mma(x, weight, bias, norm=norm, gated=gated, residual_MO=residual, form=form).double()
        assert (found - wanted).norm() / wanted.norm() < 6e-3


@pytest.mark.parametrize(
    ("size", "outputs", "rows", "group"),
    [
        pytest.param(*shape, marks=on_card)
        for shape in [(576, 960, 1, 32), (1536, 576, 17, 32), (96, 30, 5, 32), (192, 40, 40, 64)]
    ],
)
@pytest.mark.parametrize("format", list(CODES)[1:])
@pytest.mark.parametrize("gated", [False, True])
def test_codes_are_multiplied_as_the_weights_they_stand_for(size, outputs, rows, group, format, gated):
    """The same products in the same order as of those weights in bfloat16: nothing may differ."""
    bits, offsets = CODES[format]
    weight = quantize(torch.randn(outputs * (2 if gated else 1), size, device="cuda"), bits, group, offsets=offsets)
    x = torch.randn(rows, size, device="cuda").bfloat16()
    norm = Norm(torch.randn(size, device="cuda").bfloat16(), 1e-5)
    same = register_mma(x, dequantize(weight, torch.bfloat16), norm=norm, gated=gated, form=OF_CODES)
    assert torch.equal(register_mma(x, weight, norm=norm, gated=gated), same)


@pytest.mark.parametrize("rows", [pytest.param(rows, marks=on_card) for rows in (2, 6, 16, 40, 64, 128)])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_others(rows, gated):
    """Nor on the form of the programs, which changes with the number of rows."""
    x = torch.randn(rows, 576, device="cuda").bfloat16()
    weight = torch.randn(3072 if gated else 960, 576, device="cuda").bfloat16()
    options = {"norm": Norm(torch.randn(576, device="cuda").bfloat16(), 1e-5), "gated": gated}
    together = register_mma(x, weight, **options)
    assert all(torch.equal(register_mma(x[row : row + 1], weight, **options)[0], together[row]) for row in range(rows))


def compiled_for_hopper(kernel, constants, types=None) -> str:
    """Its assembly."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {"num_rows": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr") | (types or {})
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "*bf16") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place in range(8)},
    )
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4}).asm["ptx"]


def run_assembly(text: str, num_outputs: int, source: int) -> list[float]:
    """What a few instructions of PTX leave in the outputs, as float32; the last operand is the input."""
    registers = {f"${num_outputs}": np.uint32(source)}

    def value(name: str) -> np.uint32:
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16)) if name.startswith("0f") else np.uint32(int(name, 0))

    def permuted(a: np.uint32, b: np.uint32, selector: np.uint32) -> np.uint32:
        data = np.array([a, b], dtype="<u4").view(np.uint8)
        return np.array([data[int(selector) >> 4 * i & 7] for i in range(4)], dtype=np.uint8).view("<u4")[0]

    operations = {
        "xor.b32": np.bitwise_xor,
        "and.b32": np.bitwise_and,
        "shr.u32": np.right_shift,
        "prmt.b32": permuted,
        "sub.rn.f32": lambda a, b: (a.view(np.float32) - b.view(np.float32)).view(np.uint32),
    }
    for line in text.strip("{} ").split(";"):
        name, _, operands = line.strip().partition(" ")
        if name in operations:
            target, *sources = operands.split(", ")
            registers[target] = operations[name](*map(value, sources))
        else:
            assert name in ("", ".reg"), name
    return [float(registers[f"${i}"].view(np.float32)) for i in range(num_outputs)]


def test_codes_become_the_floats_they_stand_for():
    """All bytes, four at a time; low nibbles come before high ones."""
    for first in range(0, 256, 4):
        packed = sum((first + i) << 8 * i for i in range(4))
        signed = [(first + i + 128) % 256 - 128 for i in range(4)]
        assert run_assembly(register_codes.ASSEMBLY["bytes"], 4, packed) == signed
        nibbles = [(first + i) & 15 for i in range(4)] + [(first + i) >> 4 for i in range(4)]
        assert run_assembly(register_codes.ASSEMBLY["nibbles"], 8, packed) == nibbles
        assert run_assembly(register_codes.ASSEMBLY["nibbles less 8"], 8, packed) == [nibble - 8 for nibble in nibbles]


def of_weight(format: str) -> tuple[dict[str, int | bool], dict[str, str]]:
    """The kernels' constants and types for a kind of weight."""
    bits, offsets = CODES[format]
    kind = {"BITS": bits, "GROUP": 32, "HAS_OFFSETS": offsets}
    if bits == 16:
        return kind, {}
    return kind, {"weight_ptr": "*i8" if bits == 8 else "*u8", "scales_ptr": "*fp16", "offsets_ptr": "*fp16"}


@compiles
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_for_hopper_with_one_barrier(gated, format):
    kind, types = of_weight(format)
    constants = {"ROWS": 16, "COLUMNS": 8, "CHUNKS": 3, "SIZE": 576, "OUTPUTS": 1536, "HAS_BIAS": False, "HAS_NORM": True}
    constants |= {"HAS_RESIDUAL": False, "GATED": gated, "HOLD": False, "PDL": 1, "WARPS": 4}
    assembly = compiled_for_hopper(module._direct_linear, constants | kind, types)
    assert assembly.count("bar.sync") == 1
    assert assembly.count("mma.sync") == (24 if gated else 12)
    assert assembly.index("griddepcontrol.launch") < assembly.index("ld.global") < assembly.index("griddepcontrol.wait")


def test_larger_programs_where_small_ones_would_take_turns():
    """As measured on an H200, which has 132 multiprocessors."""
    gates = {rows: choose_form(rows, 576, 1536, True, 132) for rows in (1, 16, 32, 33, 64)}
    assert gates == {1: Form(), 16: Form(), 32: Form(), 33: Form(rows=32), 64: Form(rows=32)}
    projections = {rows: choose_form(rows, 576, 960, False, 132) for rows in (1, 64, 80, 128)}
    assert projections == {1: Form(), 64: Form(), 80: Form(), 128: Form(columns=32)}
    assert choose_form(64, 576, 16384, True, 132) == Form()  # they would take turns too
    assert choose_form(128, 1536, 576, False, 132) == Form(warps=8)


def test_warps_by_size():
    assert [num_warps(size) for size in (576, 1024, 1536)] == [4, 4, 8]
