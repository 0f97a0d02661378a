"""The linear whose weights stream through shared memory: compiled for the card anywhere Triton is. `test_linear` runs it there,
`test_gluon_linears` in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fledge.kernels.linear import register_stream as module
from fledge.kernels.linear.summation import Summation
from fledge.kernels.linear.tile_codes import INT4_ZERO
from fledge.kernels.quantization import QuantizedWeight
from tests.kernels.ptx import run_assembly
from tests.kernels.support import compiled, compiles

# Bits, types of codes and scales, inputs that share a scale.
FORMATS = {
    "int8": (8, torch.int8, torch.float16, 32),
    "int4": (4, torch.uint8, torch.float16, 128),
    "fp8": (8, torch.float8_e4m3fn, torch.float32, 128),
}


@pytest.mark.parametrize("offsets", [False, True])
def test_four_nibbles(offsets: bool) -> None:
    scale, offset = torch.randn(2).half().float().tolist()
    added = offset if offsets else INT4_ZERO * scale
    bits = [int(np.float32(number).view(np.uint32)) for number in (scale, added)]
    for word in torch.randint(0, 1 << 16, (64,)).tolist():
        registers = run_assembly(module.FOUR_NIBBLES[offsets], 4, word, *bits)
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
def test_it_compiles_for_hopper(format, size, outputs, slices, gated, monkeypatch):
    """Products of 16 neighbours in order; only codes and the slices' sums go through shared memory."""
    order = Summation(slices, False, -(-size // (64 * slices)) * 64)
    step, lines, (bits, codes, scales, group) = module.step_of(order), outputs * (2 if gated else 1), FORMATS[format]
    parts = torch.zeros(lines, size * bits // 8, dtype=codes), torch.zeros(lines, size // group, dtype=scales)
    weight, x = QuantizedWeight(*parts, None, bits, group), torch.zeros(1, size).bfloat16()
    call = lambda: module.register_stream(x, weight, order=order, gated=gated)  # noqa: E731
    (kernel,) = compiled(monkeypatch, module, "_register_stream", call)
    assembly = kernel.asm["ptx"]
    assert assembly.count("mma.sync.aligned.m16n8k16") == step // 16 * (2 if gated else 1)
    loop = assembly[assembly.index("cp.async.wait_group") : assembly.rindex("cp.async.wait_group")]
    assert "st.shared" not in loop
    assert loop.count("bar.sync") == 2
    assert assembly.index("cp.async") < assembly.index("griddepcontrol.wait") < assembly.index("griddepcontrol.launch")
