"""The `register_stream` kernel, compiled for the card wherever Triton is installed. `test_linear` runs it on a card,
`test_gluon_linears` emulated with torch."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import register_stream as module
from fledge.kernels.linear.summation import Summation, summation
from fledge.kernels.quantization import QuantizedWeight
from tests.kernels.support import compiled, compiles

# Bits, types of codes and scales, inputs per scale (0: all).
FORMATS = {
    "int8": (8, torch.int8, torch.float16, 32),
    "int4": (4, torch.uint8, torch.float16, 128),
    "int4 with offsets": (4, torch.uint8, torch.float16, 64),
    "fp8": (8, torch.float8_e4m3fn, torch.float32, 0),
    "fp8 in blocks": (8, torch.float8_e4m3fn, torch.float32, 128),
}


def test_where_it_serves() -> None:
    long, odd = Summation(8, False, 512), Summation(4, False, 2240)
    assert (long.step, odd.step) == (128, 64)
    assert module.serves(4096, long, 4096)
    assert module.serves(8960, odd, 32)
    assert not module.serves(4096, long, 16), "two products of 16 inputs have to share a scale"
    assert not module.serves(4160, Summation(1, False, 4160 + 64), 32)


@compiles
@pytest.mark.parametrize("rows", [1, 16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("size", "outputs", "gated"), [(4096, 4096, False), (4096, 14336, True), (8960, 1536, False)])
def test_it_compiles_for_hopper(format, size, outputs, gated, rows, monkeypatch):
    """Products are of 16 neighbours in order; only codes and the slices' sums go through shared memory."""
    (bits, codes, scales, group), lines = FORMATS[format], outputs * (2 if gated else 1)
    group = group or size
    order = summation(size, lines, torch.bfloat16, torch.device("cuda"), gated=gated, quantised=True)
    factors = torch.zeros(lines, size // group, dtype=scales)
    offsets = factors.float() if "offsets" in format else None
    weight = QuantizedWeight(torch.zeros(lines, size * bits // 8, dtype=codes), factors, offsets, bits, group)
    x = torch.zeros(rows, size).bfloat16()
    call = lambda: module.register_stream(x, weight, order=order, gated=gated)  # noqa: E731
    (kernel,) = compiled(monkeypatch, module, "_register_stream", call)
    assembly = kernel.asm["ptx"]
    products = assembly.count("mma.sync.aligned.m16n8k16")
    # More products for the second half of a gated weight, for the inputs' sums (offsets), and for more than eight rows.
    products_of_a_step = order.step // 16 * (2 if gated else 1) * (1 if offsets is None else 2) * (2 if rows > 8 else 1)
    together = 2 if order.slice_inputs // order.step % 2 == 0 else 1
    assert products == products_of_a_step * together
    loop = assembly[assembly.index("cp.async.wait_group") : assembly.rindex("cp.async.wait_group")]
    assert "st.shared" not in loop
    assert loop.count("bar.sync") == 2 * together
    assert assembly.index("cp.async") < assembly.index("griddepcontrol.wait") < assembly.index("griddepcontrol.launch")
