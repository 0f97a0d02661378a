"""The linear that feeds tensor cores from memory: compiled for the card anywhere Triton is. `test_linear` runs it."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import register_codes
from fledge.kernels.linear import register_mma as module
from fledge.kernels.linear.mma_fragments import Shape
from fledge.kernels.linear.register_mma import layouts, program_rows
from tests.kernels.ptx import as_floats, run_assembly
from tests.kernels.support import INTERPRETED

compiles = pytest.mark.skipif(module.gl is None or INTERPRETED, reason="needs Triton")
CODES = {"bfloat16": (16, False), "int8": (8, False), "int4": (4, False), "int4 with offsets": (4, True), "fp8": (8, False)}


def compiled_for_hopper(kernel, constants, types=None, warps=4, kind="ptx"):
    """Its assembly, or another kind of what the compiler makes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    types = {"num_rows": "i32", "eps": "fp32"} | dict.fromkeys(constants, "constexpr") | (types or {})
    source = GluonASTSource(
        kernel,
        {name: types.get(name, "*bf16") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(place,): [["tt.divisibility", 16]] for place, name in enumerate(kernel.arg_names) if name.endswith("_ptr")},
    )
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).asm[kind]


def test_codes_become_the_floats_they_stand_for():
    """All bytes, four at a time; low nibbles come before high ones."""
    for first in range(0, 256, 4):
        packed = sum((first + i) << 8 * i for i in range(4))
        signed = [(first + i + 128) % 256 - 128 for i in range(4)]
        assert as_floats(run_assembly(register_codes.ASSEMBLY["bytes"], 4, packed)) == signed
        nibbles = [(first + i) & 15 for i in range(4)] + [(first + i) >> 4 for i in range(4)]
        assert as_floats(run_assembly(register_codes.ASSEMBLY["nibbles"], 8, packed)) == nibbles
        halves = torch.tensor([first + i for i in range(4)], dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
        found = as_floats(run_assembly(register_codes.ASSEMBLY["fp8"], 4, packed))
        assert [x for x in found if x == x] == [x for x in halves if x == x]
        assert as_floats(run_assembly(register_codes.ASSEMBLY["nibbles less 8"], 8, packed)) == [
            nibble - 8 for nibble in nibbles
        ]


def of_weight(format: str, gated: bool) -> tuple[Shape, dict[str, str]]:
    """The kernel's shape and types for a kind of weight."""
    bits, offsets = CODES[format]
    kind = Shape(8, 16, gated, 4, 192, 64, 576, 1536, bits, 576 if format == "fp8" else 32, offsets)
    if bits == 16:
        return kind, {}
    if format == "fp8":
        return kind, {"weight_ptr": "*fp8e4nv", "scales_ptr": "*fp32", "offsets_ptr": "*fp32"}
    return kind, {"weight_ptr": "*i8" if bits == 8 else "*u8", "scales_ptr": "*fp16", "offsets_ptr": "*fp16"}


@compiles
@pytest.mark.parametrize("format", CODES)
@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_for_hopper_with_one_barrier(gated, format):
    """What a thread loads is what it multiplies: nothing but the slices' sums goes through shared memory."""
    shape, types = of_weight(format, gated)
    constants = {"SHAPE": shape, "HAS_BIAS": False, "HAS_NORM": True, "HAS_RESIDUAL": False, "PDL_BARRIER": False, "PDL": True}
    assembly = compiled_for_hopper(module._register_mma, constants | layouts(8, gated), types)
    assert assembly.count("bar.sync") == 1
    assert assembly.count("mma.sync") == (24 if gated else 12)
    assert assembly.index("griddepcontrol.launch") < assembly.index("ld.global") < assembly.index("griddepcontrol.wait")
    if format == "bfloat16":
        assert assembly.count("ld.global.v2.b32") == assembly.count("ld.global"), "four inputs a load"


@compiles
@pytest.mark.parametrize("gated", [False, True])
def test_wide_loads_are_exchanged_without_shared_memory(gated):
    shape = of_weight("bfloat16", gated)[0]
    constants = {"SHAPE": shape, "HAS_BIAS": False, "HAS_NORM": False, "HAS_RESIDUAL": False, "PDL_BARRIER": False, "PDL": True}
    assembly = compiled_for_hopper(module._register_mma, constants | layouts(8, gated, True))
    assert assembly.count("bar.sync") == 1
    assert assembly.count("ld.global.v4.b32") == (24 if gated else 12), "eight weights a load"


def test_rows_of_a_program():
    assert [program_rows(rows) for rows in (1, 8, 16, 17, 64)] == [8, 8, 8, 16, 16]
