"""Converts codes of quantised weights (int8, int4, FP8) to bfloat16 without rounding. Scales are applied to sums (`summation`).

Integer-to-float conversions run on a slow unit. Instead, bits are placed in a float's mantissa: 0x4300 is the bfloat16 128,
whose last bit is worth 1, so 0x4300 | n is 128 + n for n below 128. One fma then leaves n, for two values at once (GPUs before
Hopper cannot subtract bfloat16).

    int8   2.0 instructions per weight   128 + low seven bits, minus 128, or minus 256 if the sign bit is set
    int4   1.75                          128 + nibble, minus 136 (value = nibble - 8), or minus 128 (formats with offsets)
    FP8    2.0                           to float16, then float32, then bfloat16: there is no shorter way

An earlier version scaled each weight in float32 and rounded it, in 2.75 to 3 instructions.

4-bit weights are loaded in units of 16 bits: four neighbouring inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.triton_support import COMPILED, jit, tl


class Codes(NamedTuple):
    """A weight's format and the step size in which its kernel reads it. A compile-time constant of the kernel."""

    size: int  # inputs
    bits: int
    group: int = 1  # inputs that share a scale
    has_offsets: bool = False
    scales_slices: bool = False  # all inputs share a scale, applied to the sum of a slice; else to the sum of each step
    step: int = 64  # inputs per step


def units_of(codes: Tensor, bits: int) -> Tensor:
    """Returns the codes as kernels load them: 4-bit codes as int16 words."""
    return codes.view(torch.int16) if bits == 4 else codes


def _pairs_of_bytes() -> str:
    steps = ["mov.b32 minus, 0xBF80BF80; prmt.b32 low, $2, 0x43434343, 0x4140; prmt.b32 high, $2, 0x43434343, 0x4342;"]
    for i, pair in enumerate(("low", "high")):
        steps.append(
            f"and.b32 zero, {pair}, 0xFF80FF80; and.b32 {pair}, {pair}, 0xFF7FFF7F; fma.rn.bf16x2 ${i}, zero, minus, {pair};"
        )
    return f"{{ .reg .b32 low, high, zero, minus; {' '.join(steps)} }}"


def _four_nibbles(zero: str) -> str:
    """Returns PTX for four nibbles. `zero`: the bfloat16 to add, twice. Each pair's second nibble is moved to bit 16."""
    spread = "cvt.u32.u16 u, $4; shl.b32 low, u, 12; or.b32 high, u, low;"
    pairs = (
        "lop3.b32 low, high, 0x000F000F, 0x43004300, 0xEA; "
        "shr.u32 high, high, 8; lop3.b32 high, high, 0x000F000F, 0x43004300, 0xEA;"
    )
    constants = f"mov.b32 zero, {zero}; mov.b32 one, 0x3F803F80;"
    less = f"{constants} fma.rn.bf16x2 low, low, one, zero; fma.rn.bf16x2 high, high, one, zero;"
    return (
        f"{{ .reg .b32 u, low, high, zero, one; {spread} {pairs} {less} mov.b32 {{$0, $1}}, low; mov.b32 {{$2, $3}}, high; }}"
    )


ASSEMBLY = {
    "int8": _pairs_of_bytes(),
    "int4": _four_nibbles("0xC308C308"),
    "int4 with offsets": _four_nibbles("0xC300C300"),
    "fp8": "{ .reg .b16 a, b, c, d; .reg .b32 p, q; .reg .b32 f0, f1, f2, f3; mov.b32 {a, b}, $2; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
    "cvt.f32.f16 f0, a; cvt.f32.f16 f1, b; cvt.f32.f16 f2, c; cvt.f32.f16 f3, d; "
    "cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }",
}
if tl is not None:
    _INT8, _INT4, _INT4_OFFSETS, _FP8 = map(tl.constexpr, ASSEMBLY.values())


@jit
def read_weights(codes_ptr, line, inside, start, LINES: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """Loads codes [LINES, STEP] from input `start` on and converts them, not scaled, to the activations' type."""
    BITS: tl.constexpr = CODES.bits
    STEP: tl.constexpr = CODES.step
    IS_FP8: tl.constexpr = codes_ptr.dtype.element_ty == tl.float8e4nv
    PACKED: tl.constexpr = 4 if BITS == 4 else 1  # codes per unit
    UNITS: tl.constexpr = CODES.size // PACKED
    ZERO: tl.constexpr = 0.0 if IS_FP8 else 0
    unit = start // PACKED + tl.arange(0, STEP // PACKED)
    mask = inside[:, None] & (unit < UNITS)[None, :]
    codes = tl.load(codes_ptr + line[:, None] * UNITS + unit[None, :], mask=mask, other=ZERO)
    if COMPILED and dtype == tl.bfloat16:
        if IS_FP8:
            w = tl.inline_asm_elementwise(_FP8, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif BITS == 8:
            w = tl.inline_asm_elementwise(_INT8, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            nibbles: tl.constexpr = _INT4_OFFSETS if CODES.has_offsets else _INT4
            four: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
            w = tl.inline_asm_elementwise(nibbles, "=h,=h,=h,=h,h", [codes], dtype=four, is_pure=True, pack=1)
            w = tl.join(tl.join(w[0], w[2]), tl.join(w[1], w[3]))
    elif BITS == 8:
        w = codes.to(tl.float32).to(dtype)
    else:
        ZERO_CODE: tl.constexpr = 0 if CODES.has_offsets else 8
        even = tl.join((codes & 15) - ZERO_CODE, ((codes >> 8) & 15) - ZERO_CODE)
        odd = tl.join(((codes >> 4) & 15) - ZERO_CODE, ((codes >> 12) & 15) - ZERO_CODE)
        w = tl.join(even, odd).to(tl.float32).to(dtype)
    return layout_fence(tl.reshape(w, (LINES, STEP)))


@jit
def scaled(sums, factors_ptr, line, inside, start, total, CODES: tl.constexpr):
    """Returns total + sums [LINES, ROWS] * factors. `factors_ptr`: scales or offsets; read for the lines' groups at `start`."""
    GROUPS: tl.constexpr = CODES.size // CODES.group
    group = start // CODES.group
    factors = tl.load(factors_ptr + line * GROUPS + group, mask=inside & (group < GROUPS), other=0.0)
    return tl.fma(sums, factors.to(tl.float32)[:, None], total)


@jit
def add_product(
    total,
    x,
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    line,
    inside,
    start,
    LINES: tl.constexpr,
    CODES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Adds the product of a step's inputs [STEP, ROWS], from `start` on, to the sums [LINES, ROWS] of a slice. If all inputs
    share a scale, the caller scales the sums at the end of the slice."""
    w = read_weights(codes_ptr, line, inside, start, LINES, CODES, dtype)
    if CODES.scales_slices:
        total = finished_step(tl.dot(w, x, total, input_precision="ieee"))
    else:
        ROWS: tl.constexpr = x.shape[1]
        none = tl.zeros([LINES, ROWS], tl.float32)
        total = scaled(tl.dot(w, x, none, input_precision="ieee"), scales_ptr, line, inside, start, total, CODES)
        if CODES.has_offsets:
            # A product with 16 identical lines of ones sums the inputs in the same order as the products.
            ones = tl.full([16, CODES.step], 1.0, dtype)
            inputs = tl.dot(ones, x, tl.zeros([16, ROWS], tl.float32), input_precision="ieee")
            inputs = tl.max(inputs, axis=0)[None, :] + none
            total = scaled(inputs, offsets_ptr, line, inside, start, total, CODES)
    return total


@jit
def layout_fence(w):
    """Returns the weights unchanged; keeps the compiler from moving a layout conversion above this point. It would give each
    thread of a tile of fewer than 64 outputs four neighbouring codes, and a product's 16 inputs would not be neighbours."""
    if COMPILED:
        if w.dtype.primitive_bitwidth == 16:
            w = tl.inline_asm_elementwise("// $0", "=r,0", [w], dtype=w.dtype, is_pure=False, pack=2)
        else:
            w = tl.inline_asm_elementwise("// $0", "=r,0", [w], dtype=w.dtype, is_pure=False, pack=1)
    return w


@jit
def finished_step(sums):
    """Returns the sums unchanged, read by an instruction that is not a product, so that all products of the step are complete.
    Otherwise wgmma, which reads weights from registers asynchronously, may still read some that the next step overwrites."""
    if COMPILED:
        sums = tl.inline_asm_elementwise("// $0", "=f,0", [sums], dtype=tl.float32, is_pure=False, pack=1)
    return sums
