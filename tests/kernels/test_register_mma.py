"""The linear that feeds tensor cores from memory: compiled for the card anywhere Triton is. `test_linear` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fledge.kernels.linear import register_codes
from fledge.kernels.linear import register_mma as module
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.register_mma import program_rows
from fledge.kernels.linear.summation import Summation
from tests.kernels.ptx import as_floats, run_assembly
from tests.kernels.support import compiled, compiles
from tests.kernels.test_linear import INTEGERS, some_weight


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


def assembly_of(monkeypatch: pytest.MonkeyPatch, format: str, gated: bool, **options: Any) -> str:
    weight, order = some_weight(format, 3072 if gated else 1536, 576, "cpu"), Summation(4, True, 192)
    weight = weight.bfloat16() if format == "plain" else weight
    x = torch.zeros(1, 576).bfloat16()
    call = lambda: module.register_mma(x, weight, order=order, gated=gated, **options)  # noqa: E731
    (kernel,) = compiled(monkeypatch, module, "_register_mma", call)
    return kernel.asm["ptx"]


@compiles
@pytest.mark.parametrize("format", ["plain", *INTEGERS, "fp8"])
@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_for_hopper_with_one_barrier(gated, format, monkeypatch):
    """What a thread loads is what it multiplies: nothing but the slices' sums goes through shared memory."""
    assembly = assembly_of(monkeypatch, format, gated, norm=Norm(torch.ones(576).bfloat16(), 1e-5))
    assert assembly.count("bar.sync") == 1
    assert assembly.count("mma.sync") == (24 if gated else 12)
    assert assembly.index("griddepcontrol.launch") < assembly.index("ld.global") < assembly.index("griddepcontrol.wait")
    if format == "plain":
        assert assembly.count("ld.global.v2.b32") == assembly.count("ld.global"), "four inputs a load"


@compiles
@pytest.mark.parametrize("gated", [False, True])
def test_wide_loads_are_exchanged_without_shared_memory(gated, monkeypatch):
    assembly = assembly_of(monkeypatch, "plain", gated, wide=True)
    assert assembly.count("bar.sync") == 1
    assert assembly.count("ld.global.v4.b32") == (24 if gated else 12), "eight weights a load"


def test_rows_of_a_program():
    assert [program_rows(rows) for rows in (1, 8, 16, 17, 64)] == [8, 8, 8, 16, 16]
