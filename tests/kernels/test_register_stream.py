"""The linear whose weights stream through shared memory: compiled for the card anywhere Triton is. `test_linear` runs it there,
`test_gluon_linears` in torch."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.kernels.linear import register_stream as module
from fledge.kernels.linear import stream_codes
from fledge.kernels.linear.mma_fragments import Shape
from fledge.kernels.linear.register_stream import AFTER_LOOP, AFTER_WAITING, AT_ONCE
from fledge.kernels.linear.register_stream import LaunchConfig as Config
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tile_codes import INT4_ZERO
from tests.kernels.ptx import run_assembly
from tests.kernels.support import INTERPRETED
from tests.kernels.test_register_mma import compiled_for_hopper

compiles = pytest.mark.skipif(module.gl is None or INTERPRETED, reason="needs Triton")
FORMATS = {"int8": ("*i8", "*fp16", 32), "int4": ("*i16", "*fp16", 128), "fp8": ("*fp8e4nv", "*fp32", 128)}


@pytest.mark.parametrize("offsets", [False, True])
def test_four_nibbles(offsets: bool) -> None:
    scale, offset = torch.randn(2).half().float().tolist()
    added = offset if offsets else INT4_ZERO * scale
    bits = [int(np.float32(number).view(np.uint32)) for number in (scale, added)]
    for word in torch.randint(0, 1 << 16, (64,)).tolist():
        registers = run_assembly(stream_codes.FOUR_NIBBLES[offsets], 4, word, *bits)
        found = torch.tensor([int(register) for register in registers]).to(torch.int16).view(torch.bfloat16)
        nibbles = torch.tensor([word >> 4 * i & 15 for i in range(4)]).float()
        assert torch.equal(found, (nibbles * scale + offset if offsets else (nibbles - 8) * scale).bfloat16())


def test_where_it_serves() -> None:
    one, odd = Summation(1, False, 4096), Summation(4, False, 2240)
    assert (module.step_of(one), module.step_of(odd)) == (128, 64)
    assert module.serves(4096, one, 4096)
    assert module.serves(8960, odd, 32)
    assert not module.serves(4096, one, 16), "a thread's codes and scales would not match"
    assert not module.serves(4160, Summation(1, False, 4160 + 64), 32)


@compiles
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("size", "outputs", "slices", "gated"), [(4096, 4096, 1, False), (14336, 4096, 2, True), (8960, 1536, 4, False)]
)
def test_it_compiles_for_hopper(format, size, outputs, slices, gated):
    """Products of 16 neighbours in order; only codes and the slices' sums go through shared memory."""
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    step, (codes, scales, group) = module.step_of(order), FORMATS[format]
    bits = 4 if format == "int4" else 8
    shape = Shape(8, 16, gated, slices, order.slice_inputs, step, size, outputs, bits, group)
    constants = {"SHAPE": shape, "STAGES": 4, "START": AFTER_LOOP, "HAS_BIAS": False, "HAS_RESIDUAL": False, "PDL": True}
    types = {"codes_ptr": codes, "scales_ptr": scales, "offsets_ptr": scales}
    constants |= module.layouts(slices, gated, bits, step)
    assembly = compiled_for_hopper(module._register_stream, constants, types, warps=slices)
    assert assembly.count("mma.sync.aligned.m16n8k16") == step // 16 * (2 if gated else 1)
    loop = assembly[assembly.index("cp.async.wait_group") : assembly.rindex("cp.async.wait_group")]
    assert "st.shared" not in loop
    assert loop.count("bar.sync") == 2
    assert assembly.index("cp.async") < assembly.index("griddepcontrol.wait") < assembly.index("griddepcontrol.launch")


PLAIN = [(1536, 8960, 1, True), (8960, 1536, 4, False), (4096, 6144, 1, False), (14336, 4096, 2, False)]


def plain_constants(size, outputs, slices, gated, config, start):
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    step, stages = module.steps_of(config, order, gated, 16)
    shape = Shape(config.rows, 16, gated, slices, order.slice_inputs, step, size, outputs)
    constants = {"SHAPE": shape, "STAGES": stages, "START": start, "HAS_BIAS": True, "HAS_RESIDUAL": True, "PDL": True}
    return constants | module.layouts(slices, gated, 16, step, config.rows)


@compiles
@pytest.mark.parametrize(
    ("config", "start"),
    [
        (Config(8, 32), AFTER_LOOP),
        (Config(8, 96, 1), AT_ONCE),
        (Config(16, 32), AFTER_LOOP),
        (Config(16, 96, 1), 2),
    ],
)
@pytest.mark.parametrize(("size", "outputs", "slices", "gated"), PLAIN)
def test_plain_weights_compile_for_hopper(size, outputs, slices, gated, config, start, tmp_path):
    """A thread reads 8 bytes of the ring at once and multiplies what it read; nothing spills."""
    constants = plain_constants(size, outputs, slices, gated, config, start)
    assembly = compiled_for_hopper(module._register_stream, constants, {"x_ptr": "*i32"}, slices)
    step = constants["SHAPE"].step
    products = step // 16 * (2 if gated else 1)
    assert assembly.count("mma.sync.aligned.m16n8k16") == products * config.rows // 8
    loop = assembly[assembly.index("cp.async.wait_group") : assembly.rindex("cp.async.wait_group")]
    assert "st.shared" not in loop
    assert "shfl" not in loop
    assert loop.count("bar.sync") == 2
    assert loop.count("ld.shared") == loop.count("ld.shared.v2.b32") == 2 * products
    assert loop.count("cp.async.cg.shared.global") == products, "16 bytes each"
    assert loop.count("ld.global") == loop.count("ld.global.v2.b32") == step // 16 * config.rows // 8
    let_start, wait = assembly.index("griddepcontrol.launch"), assembly.index("griddepcontrol.wait")
    assert assembly.count("griddepcontrol") == 2
    assert assembly.index("cp.async") < wait < assembly.index("ld.global")
    first_wait, last_wait = assembly.index("cp.async.wait_group"), assembly.rindex("cp.async.wait_group")
    if start == AT_ONCE:
        assert let_start < wait
    elif start == AFTER_WAITING:
        assert wait < let_start < first_wait
    else:
        assert last_wait < let_start
    assert spilled(module._register_stream, constants, slices, tmp_path) == {"STACK": 0, "LOCAL": 0}


def spilled(kernel, constants, warps, folder: Path) -> dict[str, int]:
    """Bytes of it, as the compiler's own tool reads them."""
    import triton

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled_for_hopper(kernel, constants, {"x_ptr": "*i32"}, warps, "cubin"))
    usage = subprocess.run(
        [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(cubin)], capture_output=True, text=True, check=True
    ).stdout
    return {name: int(count) for name, count in re.findall(r"(STACK|LOCAL):(\d+)", usage)}


def banks(shared, line: int, place: int, num_bytes: int) -> set[int]:
    """Of shared memory, that a thread reads or writes which has neighbouring numbers of a line of 16-bit ones."""
    assert shared.order == [1, 0]
    phase = line // shared.per_phase % shared.max_phase
    place = (place // shared.vec ^ phase) * shared.vec + place % shared.vec
    first = (line * 128 + place) * 2 // 4
    return {bank % 32 for bank in range(first, first + num_bytes // 4)}


@compiles
def test_threads_do_not_meet_in_a_bank() -> None:
    """Half a warp reads 8 bytes each, a quarter writes 16: together all 128 bytes once."""
    layouts = module.layouts(1, False, 16, 128)
    codes, copies, shared = (layouts[name] for name in ("CODES_LAYOUT", "COPY_LAYOUT", "SHARED_LAYOUT"))
    assert codes.reg_bases[:2] == [[0, 1], [0, 2]], "four numbers at once"
    for half in (0, 16):
        lanes = [
            [sum(base[i] for bit, base in enumerate(codes.lane_bases) if lane >> bit & 1) for i in (0, 1)]
            for lane in range(half, half + 16)
        ]
        for first in range(0, 128, 16):
            found = [banks(shared, line, first + place, 8) for line, place in lanes]
            assert len(set.union(*found)) == sum(map(len, found)) == 32
    assert copies.size_per_thread == [1, 8]
    assert copies.threads_per_warp == [2, 16]
    for first in (0, 8, 16, 24):
        found = [banks(shared, lane // 16, lane % 16 * 8, 16) for lane in range(first, first + 8)]
        assert len(set.union(*found)) == sum(map(len, found)) == 32


def test_steps_of_the_ring() -> None:
    down, gate_up = Summation(4, False, 2240), Summation(1, False, 1536)
    assert module.steps_of(Config(8, 32), down, False, 16) == (64, 4)
    assert module.steps_of(Config(8, 96), down, False, 16) == (128, 6)
    assert module.steps_of(Config(16, 48), gate_up, True, 16) == (128, 6)
    assert module.steps_of(Config(16, 16), gate_up, True, 16) == (64, 4)
    assert module.steps_of(Config(), down, False, 8) == (64, 4)
    assert module.steps_of(Config(), Summation(1, False, 4096), False, 8) == (128, 8)
