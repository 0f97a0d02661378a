"""The `staged_mma` kernel, compiled for the card wherever Triton is installed. `test_linear` runs it."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import measured, register_mma, summation
from fledge.kernels.linear import staged_mma as module
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.staged_mma import CONFIGS, choose_config, layouts, programs_at_once
from fledge.kernels.linear.staged_mma import LaunchConfig as Config
from fledge.kernels.linear.summation import Summation
from fledge.kernels.triton_support import MEASURED_SHARED_MEMORY
from tests.kernels.support import compiled, compiles

SHORT, LONG = Summation(4, True, 192), Summation(4, True, 384)
CARD = (132, MEASURED_SHARED_MEMORY)  # an H200


@compiles
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    "config",
    [Config(16, 16), Config(16, 32, 2), Config(32, 16), Config(64, 16), Config(32, 32, 2)],
)
def test_it_compiles_for_hopper_with_a_barrier_a_tile(config, gated, monkeypatch):
    """Weights are loaded before the wait, all rows are copied after it, and each thread multiplies what it loads."""
    x, weight = torch.zeros(300, 576).bfloat16(), torch.zeros(3072 if gated else 1536, 576).bfloat16()
    options = {"order": SHORT, "config": config, "norm": Norm(torch.ones(576).bfloat16(), 1e-5), "gated": gated}
    (kernel,) = compiled(monkeypatch, module, "_staged_mma", lambda: module.staged_mma(x, weight, **options))
    assembly, products = kernel.asm["ptx"], config.columns * (2 if gated else 1)
    tiles = config.rows // 16
    assert assembly.count("bar.sync") == tiles + 1
    assert assembly.count("mma.sync") == tiles * 24 * products // 16 // config.groups
    assert assembly.index("ld.global.v2") < assembly.index("griddepcontrol.wait") < assembly.index("cp.async.cg")
    last_copy = assembly.rindex("cp.async.cg")
    assert last_copy < assembly.index("cp.async.wait_group")
    assert ".local" not in assembly, "registers are spilled"


def test_rows_have_the_layout_of_register_mma():
    """The layout determines the order in which squares are summed."""
    if module.gl is None:
        pytest.skip("needs Triton")
    assert layouts(16, 1)["X_LAYOUT"] == register_mma.layouts(16, False)["X_LAYOUT"]
    assert layouts(16, 1)["W_LAYOUT"] == register_mma.layouts(16, False)["W_LAYOUT"]
    assert layouts(32, 1)["W_LAYOUT"] == register_mma.layouts(16, True)["W_LAYOUT"]


def test_programs_that_fit_a_multiprocessor():
    memory = MEASURED_SHARED_MEMORY
    assert programs_at_once(Config(32, 16), SHORT, False, memory) == 3
    assert programs_at_once(Config(32, 16), SHORT, True, memory) == 2
    assert programs_at_once(Config(64, 32), SHORT, False, memory) == 1, "limited by memory"
    assert programs_at_once(Config(32, 32), LONG, False, memory) == 0, "limited by registers"
    assert all(programs_at_once(config, LONG, True, memory) == 0 for config in CONFIGS if config.groups == 1)
    assert programs_at_once(Config(32, 16), SHORT, False, 99 << 10) == 1
    assert programs_at_once(Config(64, 16), SHORT, False, 99 << 10) == 0, "needs more shared memory than 99 KB"


def test_the_smallest_programs_that_run_at_once():
    assert choose_config(64, 1536, SHORT, True, *CARD) == Config(32, 16)
    assert choose_config(256, 960, SHORT, False, *CARD) == Config(32, 32)
    assert choose_config(256, 1536, SHORT, True, *CARD) is None
    assert choose_config(64, 576, LONG, False, *CARD) == Config(32, 16)


# The index in CONFIGS of the config for each number of ROWS; "-": none.
ROWS = (1, 16, 17, 32, 33, 64, 65, 96, 128, 129, 200, 256, 300, 512)
CHOICES = {
    (576, 960, False): "000000000011--",
    (576, 576, False): "0000000000000-",
    (576, 3072, True): "000000444-----",
    (1536, 576, False): "0000000000044-",
    (1152, 960, False): "000000000444--",
    (1536, 2048, False): "000000444-----",
    (1536, 1536, False): "000000444-----",
}


def test_configs_on_an_h200(monkeypatch):
    """For every measured shape, as when the limit was a constant. The other shapes do not fit in registers."""
    monkeypatch.setattr(summation, "supports_registers", lambda *_: True)
    found = {}
    for inputs, outputs, gated in measured.CONFIGS:
        order = summation.summation(inputs, outputs, torch.bfloat16, torch.device("cuda", 0), gated=gated)
        configs = [choose_config(rows, outputs // (2 if gated else 1), order, gated, *CARD) for rows in ROWS]
        found[inputs, outputs, gated] = "".join("-" if config is None else str(CONFIGS.index(config)) for config in configs)
        assert order.scales_sums or set(found.pop((inputs, outputs, gated))) == {"-"}
    assert found == CHOICES
