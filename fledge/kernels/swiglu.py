"""The MLP's gate: silu(gate) * up, from the fused projection [gate ; up]."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from fledge.kernels.triton_support import jit, let_next_start, next_power_of_2, overlap, tl, use_triton, wait_for_inputs


def swiglu(gate_up_N2I: Tensor) -> Tensor:
    return (swiglu_triton if use_triton(gate_up_N2I) else swiglu_reference)(gate_up_N2I)


def swiglu_reference(gate_up_N2I: Tensor) -> Tensor:
    gate, up = gate_up_N2I.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_triton(gate_up_N2I: Tensor) -> Tensor:
    assert gate_up_N2I.is_contiguous()
    num_rows, size = gate_up_N2I.shape[0], gate_up_N2I.shape[1] // 2
    out = gate_up_N2I.new_empty(num_rows, size)
    if num_rows:
        block = min(next_power_of_2(size), 1024)
        grid, warps = (num_rows, -(-size // block)), max(block // 256, 1)
        _swiglu[grid](gate_up_N2I, out, SIZE=size, BLOCK=block, num_warps=warps, **overlap(out))
    return out


@jit
def _swiglu(gate_up_ptr, out_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    wait_for_inputs(PDL)
    gate = tl.load(gate_up_ptr + row * 2 * SIZE + columns, mask=inside, other=0.0)
    up = tl.load(gate_up_ptr + row * 2 * SIZE + SIZE + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    # Rounded between the two products, as the unfused network does.
    silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out_ptr + row * SIZE + columns, (silu.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)
