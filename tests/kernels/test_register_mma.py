"""The `register_mma` kernel, compiled for the card wherever Triton is installed. `test_linear` runs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fledge.kernels.linear import register_mma as module
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.register_mma import program_rows
from fledge.kernels.linear.summation import Summation
from tests.kernels.support import compiled, compiles


def assembly_of(monkeypatch: pytest.MonkeyPatch, gated: bool, **options: Any) -> str:
    weight, order = torch.zeros(3072 if gated else 1536, 576).bfloat16(), Summation(4, True, 192)
    x = torch.zeros(1, 576).bfloat16()
    call = lambda: module.register_mma(x, weight, order=order, gated=gated, **options)  # noqa: E731
    (kernel,) = compiled(monkeypatch, module, "_register_mma", call)
    return kernel.asm["ptx"]


@compiles
@pytest.mark.parametrize("gated", [False, True])
def test_it_compiles_for_hopper_with_one_barrier(gated, monkeypatch):
    """Each thread multiplies what it loads: only the slices' sums go through shared memory."""
    assembly = assembly_of(monkeypatch, gated, norm=Norm(torch.ones(576).bfloat16(), 1e-5))
    assert assembly.count("bar.sync") == 1
    assert assembly.count("mma.sync") == (24 if gated else 12)
    assert assembly.index("griddepcontrol.launch") < assembly.index("ld.global") < assembly.index("griddepcontrol.wait")
    assert assembly.count("ld.global.v2.b32") == assembly.count("ld.global"), "four inputs per load"


@compiles
@pytest.mark.parametrize("gated", [False, True])
def test_wide_loads_are_exchanged_without_shared_memory(gated, monkeypatch):
    assembly = assembly_of(monkeypatch, gated, wide=True)
    assert assembly.count("bar.sync") == 1
    assert assembly.count("ld.global.v4.b32") == (24 if gated else 12), "eight weights per load"


def test_rows_of_a_program():
    assert [program_rows(rows) for rows in (1, 8, 16, 17, 64)] == [8, 8, 8, 16, 16]
