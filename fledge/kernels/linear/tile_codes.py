"""Weights in 8 or 4 bits on their way into the products of `tiles`: int8, int4 and FP8, rounded once to the activations' type.

Two rules keep the order of `summation`, whatever the tile; both were read off the code that Triton 3.6 makes for sm_90:

- Weights pass an assembly block that the compiler does not look behind (`layout_fence`). Else it gives each thread of a tile of
  fewer than 64 outputs four neighbouring codes, and the 16 inputs of a product are no neighbours.
- A product is complete before the next step (`finished_step`). Else wgmma, which reads weights from registers while the program
  goes on, has up to seven products under way when the next step writes to those registers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.triton_support import COMPILED, jit, tl


class CodesShape(NamedTuple):
    """Of a weight and the steps it is read in: a constant of its kernel."""

    size: int  # inputs
    bits: int
    group: int  # inputs that share a scale
    part: int  # of a group that a step reads at once
    offsets: int  # `kind_of_offsets`
    step: int  # inputs


def kind_of_offsets(weight: Tensor | QuantizedWeight) -> int:
    """0: none. 1: nibble * scale + offset. 2: offset - 128 * scale is precomputed, once a group; it is added to
    (128 + nibble) * scale, as a nibble is read in the float 128, which saves an instruction a weight."""
    if isinstance(weight, Tensor) or weight.offsets is None:
        return 0
    return 2 if weight.offsets_fold else 1


def _rounded(pairs: str) -> str:
    """The four floats f0 … f3 as two pairs of bfloat16. `pairs`: the two outputs."""
    low, high = pairs.split()
    return f"cvt.rn.bf16x2.f32 {low}, f1, f0; cvt.rn.bf16x2.f32 {high}, f3, f2;"


def _scaled(source: str, magic: str, selector: str, first: int) -> str:
    """Bytes of `source`, placed in a float of exponent `magic`, times scale ($first …) plus what that adds ($first + 4 …)."""
    parts = [
        f"prmt.b32 f{i}, {source}, {magic}, {selector.format(i)}; fma.rn.f32 f{i}, f{i}, ${first + i}, ${first + 4 + i};"
        for i in range(4)
    ]
    return " ".join(parts)


def _nibbles_plus(zero: str) -> str:
    """Nibbles as whole numbers times scale plus offset; `zero` is what their place in a float adds."""
    halves = []
    for source, outputs in (("low", "$0 $1"), ("high", "$2 $3")):
        parts = [
            f"prmt.b32 f{i}, {source}, 0x43000000, 0x7{i}44; sub.rn.f32 f{i}, f{i}, {zero}; "
            f"fma.rn.f32 f{i}, f{i}, ${5 + i}, ${9 + i};"
            for i in range(4)
        ]
        halves.append(" ".join(parts) + " " + _rounded(outputs))
    return " ".join(halves)


_FLOATS = ".reg .b32 f0, f1, f2, f3;"
_NIBBLES = ".reg .b32 low, high; and.b32 low, $4, 0x0F0F0F0F; shr.u32 high, $4, 4; and.b32 high, high, 0x0F0F0F0F;"
# Four bytes of codes, four scales and four offsets to bfloat16. A byte at bit 8 of 2^15 makes that number larger by it, a
# nibble at bit 16 of 2^7 likewise: two quick instructions, where a conversion of integers waits for a slow unit. The product by
# a scale of 11 bits is exact, so is the zero's: -32896 (int8) or -136 (int4) times the scale.
INT8_ZERO, INT4_ZERO = -32896.0, -136.0
ASSEMBLY = {
    "int8": f"{{ {_FLOATS} .reg .b32 u; xor.b32 u, $2, 0x80808080; "
    f"{_scaled('u', '0x47000000', '0x74{}4', 3)} {_rounded('$0 $1')} }}",
    "int4": f"{{ {_FLOATS} {_NIBBLES} {_scaled('low', '0x43000000', '0x7{}44', 5)} {_rounded('$0 $1')} "
    f"{_scaled('high', '0x43000000', '0x7{}44', 5)} {_rounded('$2 $3')} }}",
    "int4 with offsets": f"{{ {_FLOATS} {_NIBBLES} {_nibbles_plus('0f43000000')} }}",
    "fp8": f"{{ {_FLOATS} .reg .b16 a, b, c, d; .reg .b32 p, q; mov.b32 {{a, b}}, $2; "
    "cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; mov.b32 {a, b}, p; mov.b32 {c, d}, q; "
    "cvt.f32.f16 f0, a; cvt.f32.f16 f1, b; cvt.f32.f16 f2, c; cvt.f32.f16 f3, d; "
    + " ".join(f"mul.rn.f32 f{i}, f{i}, ${3 + i};" for i in range(4))
    + f" {_rounded('$0 $1')} }}",
}
if tl is not None:
    _INT8, _INT4, _INT4_OFFSETS, _FP8 = map(tl.constexpr, ASSEMBLY.values())
    _INT8_ZERO, _INT4_ZERO = tl.constexpr(INT8_ZERO), tl.constexpr(INT4_ZERO)


@jit
def read_scales(scales_ptr, offsets_ptr, line, inside, start, CODES: tl.constexpr):
    """[lines, parts] scales and offsets of a step, from input `start` on. Read a step ahead: nothing else hides them."""
    SIZE: tl.constexpr = CODES.size
    GROUP: tl.constexpr = CODES.group
    PART: tl.constexpr = CODES.part
    STEP: tl.constexpr = CODES.step
    groups = (start + tl.arange(0, STEP // PART) * PART) // GROUP
    mask = inside[:, None] & (groups < SIZE // GROUP)[None, :]
    places = line[:, None] * (SIZE // GROUP) + groups[None, :]
    scale = tl.load(scales_ptr + places, mask=mask, other=0.0)
    offset = scale
    if CODES.offsets:
        offset = tl.load(offsets_ptr + places, mask=mask, other=0.0)
    return scale, offset


@jit
def read_weights(
    codes_ptr,
    scale,
    offset,
    line,
    inside,
    start,
    LINES: tl.constexpr,
    CODES: tl.constexpr,
    dtype: tl.constexpr,
):
    """[LINES, STEP] of a quantised weight in the activations' type, from input `start` on."""
    SIZE: tl.constexpr = CODES.size
    BITS: tl.constexpr = CODES.bits
    PART: tl.constexpr = CODES.part
    HAS_OFFSETS: tl.constexpr = CODES.offsets
    STEP: tl.constexpr = CODES.step
    IS_FP8: tl.constexpr = codes_ptr.dtype.element_ty == tl.float8e4nv
    PACKED: tl.constexpr = 8 // BITS  # codes a byte
    byte = start // PACKED + tl.arange(0, STEP // PACKED)
    mask = inside[:, None] & (byte < SIZE // PACKED)[None, :]
    places = codes_ptr + line[:, None] * (SIZE // PACKED) + byte[None, :]
    if IS_FP8:
        codes = tl.load(places, mask=mask, other=0.0)
    else:
        codes = tl.load(places, mask=mask, other=0)
    codes = tl.reshape(codes, (LINES, STEP // PART, PART // PACKED))
    scale, offset = scale.to(tl.float32)[:, :, None], offset.to(tl.float32)[:, :, None]
    if COMPILED and dtype == tl.bfloat16:
        if IS_FP8:
            parts: tl.constexpr = "=r,=r,r,r,r,r,r"
            w = tl.inline_asm_elementwise(_FP8, parts, [codes, scale], dtype=tl.bfloat16, is_pure=True, pack=4)
        elif BITS == 8:
            zero = scale * _INT8_ZERO
            parts: tl.constexpr = "=r,=r,r,r,r,r,r,r,r,r,r"
            w = tl.inline_asm_elementwise(_INT8, parts, [codes, scale, zero], dtype=tl.bfloat16, is_pure=True, pack=4)
        else:
            parts: tl.constexpr = "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r"
            if HAS_OFFSETS == 1:
                w = tl.inline_asm_elementwise(
                    _INT4_OFFSETS, parts, [codes, scale, offset], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
                )
            else:
                zero = offset + scale * -128.0 if HAS_OFFSETS else scale * _INT4_ZERO
                w = tl.inline_asm_elementwise(
                    _INT4, parts, [codes, scale, zero], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
                )
            w = tl.join(w[0], w[1])
    elif BITS == 8:
        w = scaled(codes, scale, offset, False, HAS_OFFSETS, dtype)
    else:
        even = scaled(codes & 15, scale, offset, not HAS_OFFSETS, HAS_OFFSETS, dtype)
        odd = scaled(codes >> 4, scale, offset, not HAS_OFFSETS, HAS_OFFSETS, dtype)
        w = tl.join(even, odd)
    return layout_fence(tl.reshape(w, (LINES, STEP)))


@jit
def layout_fence(w):
    """The weights themselves. The compiler moves no change of layout above this."""
    if COMPILED:
        if w.dtype.primitive_bitwidth == 16:
            w = tl.inline_asm_elementwise("// $0", "=r,0", [w], dtype=w.dtype, is_pure=False, pack=2)
        else:
            w = tl.inline_asm_elementwise("// $0", "=r,0", [w], dtype=w.dtype, is_pure=False, pack=1)
    return w


@jit
def scaled(codes, scale, offset, CENTRED: tl.constexpr, HAS_OFFSETS: tl.constexpr, dtype: tl.constexpr):
    """Codes as weights, rounded to the activations' type: every kernel multiplies by the same. `CENTRED`: 8 is zero."""
    value = codes.to(tl.float32)
    if CENTRED:
        value -= 8.0
    value *= scale  # exact for integers: at most 8 bits times 11
    if HAS_OFFSETS:
        value += offset
    return value.to(dtype)


@jit
def finished_step(sums):
    """The sums themselves, read by something that is no product: all products of the step are then complete."""
    if COMPILED:
        sums = tl.inline_asm_elementwise("// $0", "=f,0", [sums], dtype=tl.float32, is_pure=False, pack=1)
    return sums
