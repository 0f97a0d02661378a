"""The linear whose rows lie in shared memory: compiled for the card anywhere Triton is. `test_linear` runs it."""

from __future__ import annotations

import pytest

from fledge.kernels.linear import register_mma
from fledge.kernels.linear import staged_mma as module
from fledge.kernels.linear.staged_mma import FORMS, Form, choose_form, layouts, programs_at_once
from fledge.kernels.linear.summation import Summation
from tests.kernels.test_register_mma import compiled_for_hopper, compiles

SHORT, LONG = Summation(4, True, 192), Summation(4, True, 384)


@compiles
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", [Form(32, 16), Form(64, 16), Form(32, 32, 2)])
def test_it_compiles_for_hopper_with_a_barrier_a_tile(form, gated):
    """Weights are loaded before the wait, rows are copied after it, all at once; what a thread loads it multiplies."""
    constants = {"ROWS": form.rows, "COLUMNS": form.columns, "SLICES": 4, "GROUPS": form.groups, "CHUNKS": 3, "SIZE": 576}
    constants |= {"OUTPUTS": 1536, "HAS_BIAS": False, "HAS_NORM": True, "HAS_RESIDUAL": False, "GATED": gated, "HOLD": False}
    products = form.columns * (2 if gated else 1)
    constants |= layouts(products, form.groups) | {"PDL": 1}
    assembly = compiled_for_hopper(module._staged_mma, constants, warps=4 * form.groups)
    tiles = form.rows // 16
    assert assembly.count("bar.sync") == tiles + 1
    assert assembly.count("mma.sync") == tiles * 24 * products // 16 // form.groups
    assert assembly.index("ld.global.v2") < assembly.index("griddepcontrol.wait") < assembly.index("cp.async.cg")
    last_copy = assembly.rindex("cp.async.cg")
    assert last_copy < assembly.index("cp.async.wait_group")
    assert ".local" not in assembly, "no register is spilt"


def test_a_tile_s_rows_are_spread_as_in_the_register_kernel():
    """The order in which squares are summed follows from it."""
    if module.gl is None:
        pytest.skip("needs Triton")
    assert layouts(16, 1)["X_LAYOUT"] == register_mma.layouts(16, False)["X_LAYOUT"]
    assert layouts(16, 1)["W_LAYOUT"] == register_mma.layouts(16, False)["W_LAYOUT"]
    assert layouts(32, 1)["W_LAYOUT"] == register_mma.layouts(16, True)["W_LAYOUT"]


def test_programs_that_fit_a_multiprocessor():
    assert programs_at_once(Form(32, 16), SHORT, False) == 3
    assert programs_at_once(Form(32, 16), SHORT, True) == 2
    assert programs_at_once(Form(64, 32), SHORT, False) == 1, "memory"
    assert programs_at_once(Form(32, 32), LONG, False) == 0, "registers"
    assert all(programs_at_once(form, LONG, True) == 0 for form in FORMS if form.groups == 1)


def test_the_smallest_programs_that_run_at_once():
    assert choose_form(64, 1536, SHORT, True, 132) == Form(32, 16)
    assert choose_form(256, 960, SHORT, False, 132) == Form(32, 32)
    assert choose_form(256, 1536, SHORT, True, 132) is None
    assert choose_form(64, 576, LONG, False, 132) == Form(32, 16)
