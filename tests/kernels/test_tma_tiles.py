"""The `tma_tiles` kernel, compiled for the card wherever Triton is installed. `test_gluon_linears` and `test_linear` run it."""

from __future__ import annotations

import re
import subprocess

import pytest
import torch

from fledge.kernels.linear import dispatch, tma_tiles
from fledge.kernels.linear.dispatch import Case
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tma_tiles import MEMORY, PROGRAMS, REGISTERS, LaunchConfig, serves
from fledge.kernels.triton_support import triton
from tests.kernels.support import compiled, compiles

SHARED_BYTES = 227 << 10  # of a multiprocessor
REGISTER_FILE = 1 << 16
CARD = torch.device("cuda", 0)


def compiled_tiles(monkeypatch, config, size, outputs, slices, *, gated=False, bias=False, scale=False, residual=False):
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    drawn = torch.zeros
    x, weight = drawn(300, size, dtype=torch.bfloat16), drawn(outputs, size, dtype=torch.bfloat16)
    extras = {"residual_MO": drawn(300, outputs // (2 if gated else 1), dtype=torch.bfloat16) if residual else None}
    extras["scale_M"] = drawn(300) if scale else None
    some = drawn(outputs, dtype=torch.bfloat16) if bias else None
    call = lambda: tma_tiles.tma_tiles(x, weight, some, order=order, config=config, gated=gated, **extras)  # noqa: E731
    (kernel,) = compiled(monkeypatch, tma_tiles, "_tma_tiles", call, others=("finish",))
    return kernel


def assembled(ptx: str, folder) -> str:
    """Returns the assembler's report on a kernel."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [triton.knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr


# The configs that `benchmarks/gpu_linear_forms.py` measures, with the linears that need most registers and shared memory.
CONFIGS = [
    (LaunchConfig(128, 128, 8, 6, REGISTERS), 1536, 2048, 4, {"bias": True, "scale": True}),
    (LaunchConfig(128, 128, 8, 6, REGISTERS), 8960, 1536, 4, {"residual": True}),
    (LaunchConfig(128, 128, 8, 6, REGISTERS), 576, 3072, 4, {"gated": True, "scale": True, "bias": True}),
    (LaunchConfig(128, 128, 8, 6, PROGRAMS), 8960, 1536, 4, {"residual": True}),
    (LaunchConfig(128, 128, 4, 3, PROGRAMS, 2), 8960, 1536, 4, {"residual": True}),
    (LaunchConfig(64, 128, 4, 4, REGISTERS, 2), 1536, 1536, 4, {"residual": True}),
    (LaunchConfig(64, 64, 4, 6, REGISTERS, 2), 1536, 2048, 4, {"bias": True, "scale": True}),
    (LaunchConfig(64, 64, 4, 6, PROGRAMS, 2), 576, 3072, 4, {"gated": True}),
    (LaunchConfig(128, 256, 8, 4, PROGRAMS), 14336, 4096, 2, {"residual": True}),
    (LaunchConfig(128, 256, 8, 4, MEMORY), 14336, 4096, 2, {"residual": True}),
    (LaunchConfig(128, 256, 8, 4, MEMORY), 1536, 2048, 4, {"bias": True, "scale": True}),
    (LaunchConfig(128, 256, 8, 4, MEMORY), 8960, 1536, 4, {"residual": True}),
    (LaunchConfig(64, 32, 4, 8, REGISTERS, 2, 1), 4096, 4096, 1, {"residual": True}),
    (LaunchConfig(64, 64, 4, 6, REGISTERS, 1, 1), 1536, 17920, 1, {"gated": True}),
    (LaunchConfig(64, 64, 4, 12, REGISTERS, 1, 1), 4096, 6144, 1, {"bias": True}),
    (LaunchConfig(64, 128, 4, 8, REGISTERS, 1, 1), 4096, 28672, 1, {"gated": True}),
    (LaunchConfig(64, 64, 4, 6, PROGRAMS, 1, 1), 14336, 4096, 2, {"residual": True}),
    (LaunchConfig(64, 128, 4, 4, PROGRAMS, 1, 1), 8960, 1536, 4, {"residual": True}),
]


@compiles
@pytest.mark.parametrize(("config", "size", "outputs", "slices", "extras"), CONFIGS)
def test_products_and_copies_overlap(config, size, outputs, slices, extras, monkeypatch, tmp_path):
    kernel = compiled_tiles(monkeypatch, config, size, outputs, slices, **extras)
    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\w+)", ptx)) == {f"m64n{config.outputs}k16"}
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    # The first weights are requested before the kernel waits for its rows.
    halves = 2 if "gated" in extras else 1
    assert ptx.split("griddepcontrol.wait")[0].count("cp.async.bulk.tensor.2d.shared") == halves * (config.stages - 1)
    # The next kernel may start before this one waits (`early`), or after a program's last product.
    before, after = ptx.split("griddepcontrol.wait")
    assert ("griddepcontrol.launch_dependents" in before, "griddepcontrol.launch_dependents" in after) == (
        (True, False) if config.early else (False, True)
    )
    # One product stays in flight, and inputs are overwritten only when all warps have multiplied them.
    assert "wgmma.wait_group.sync.aligned 1;" in ptx
    for after in re.split(r"wgmma\.wait_group", ptx)[1:]:
        assert "cp.async.bulk.tensor" not in after.split("bar.sync")[0]
    report = assembled(ptx, tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in report
    assert "Performance Loss" not in report, "the assembler serialised the products"
    registers = int(re.search(r"Used (\d+) registers", report)[1])
    assert config.beside * (kernel.metadata.shared + 1024) <= SHARED_BYTES + 1024
    assert config.beside * registers * 32 * config.warps <= REGISTER_FILE
    assert len(kernel.metadata.tensordesc_meta) == 2
    assert kernel.metadata.launch_pdl


def test_measured_configs_need_wgmma(monkeypatch):
    numbers = (128, 128, 8, 6, 0, 1)
    monkeypatch.setattr(dispatch, "CONFIGS", {(8960, 1536, False): ((1 << 20, "tma_tiles", numbers),)})
    case = Case(8192, 8960, 1536, "plain", torch.bfloat16, CARD)
    monkeypatch.setattr(dispatch, "supports_wgmma", lambda device: True)
    assert dispatch.choose_kernel(case) == ("tma_tiles", numbers)
    assert dispatch.choose_kernel(case._replace(format="int8", group_size=32))[0] == "tiles"
    monkeypatch.setattr(dispatch, "supports_wgmma", lambda device: False)
    assert dispatch.choose_kernel(case) == ("cublas", ())


def test_operands_that_tma_cannot_read_go_to_tiles(monkeypatch):
    ran = []
    monkeypatch.setattr(dispatch, "use_triton", lambda x: True)
    monkeypatch.setattr(dispatch, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(dispatch, "CONFIGS", {(64, 40, False): ((1 << 20, "tma_tiles", (64, 64, 4, 6, 0, 2)),)})
    monkeypatch.setattr(dispatch.tma, "tma_tiles", lambda *_, config, **__: ran.append(config))
    monkeypatch.setattr(dispatch, "tiled_linear", lambda *_, **__: ran.append("tiles"))
    x, weight = torch.zeros(129, 64).bfloat16(), torch.zeros(40, 64).bfloat16()
    shifted = torch.zeros(129 * 64 + 1).bfloat16()[1:].view(129, 64)
    assert serves(x, weight)
    assert not serves(shifted, weight)
    dispatch.linear(x, weight)
    dispatch.linear(shifted, weight)
    assert ran == [LaunchConfig(64, 64, 4, 6, 0, 2), "tiles"]


def test_a_cpu_has_no_wgmma():
    assert not tma_tiles.supports_wgmma(torch.device("cpu"))
