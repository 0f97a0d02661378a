"""The gate of an MLP, from the fused projection [gate ; up]: silu(gate) * up, or Gemma's gelu(gate) * up in the tanh form."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, let_next_start, next_power_of_2, overlap, tl, wait_for_inputs


def apply_gate_reference(gate_up_N2I: Tensor, *, gelu: bool = False) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up."""
    gate, up = gate_up_N2I.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def apply_gate_triton(gate_up_N2I: Tensor, *, gelu: bool = False) -> Tensor:
    assert gate_up_N2I.is_contiguous()
    num_rows, size = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out = gate_up_N2I.new_empty(num_rows, size)
    if num_rows:
        block = min(next_power_of_2(size), 1024)
        grid, warps = (num_rows, -(-size // block)), max(block // 256, 1)
        _gate[grid](gate_up_N2I, out, SIZE=size, BLOCK=block, GELU=gelu, num_warps=warps, **overlap(out))
    return out


apply_gate = by_device(apply_gate_triton, apply_gate_reference)


@jit
def _gate(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    if GELU:
        # tanh(y) = 1 - 2 / (exp(2 y) + 1), and gelu = x/2 (1 + tanh y) = x - x / (exp(2 y) + 1)
        twice = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        x = x - x / (tl.exp(twice) + 1.0)
    else:
        x = x / (1.0 + tl.exp(-x))
    # Rounded between the two products, as the unfused network does.
    product = x.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * SIZE + columns, product.to(gate.dtype), mask=inside)
