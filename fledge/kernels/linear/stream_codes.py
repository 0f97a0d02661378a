"""Scales and codes of `register_stream`'s quantised weights, and the weights that a thread makes of them in its registers."""

from __future__ import annotations

from fledge.kernels.gluon_support import gl, jit
from fledge.kernels.linear.tile_codes import ASSEMBLY, INT4_ZERO, INT8_ZERO


def _four_nibbles(offsets: bool) -> str:
    """Assembly: the four nibbles of 16 bits, times a scale plus what is added, to bfloat16; see `tile_codes`."""
    parts = [
        f"prmt.b32 f{i}, {'high' if i % 2 else 'low'}, 0x43000000, 0x7{i // 2}44; "
        + (f"sub.rn.f32 f{i}, f{i}, 0f43000000; " if offsets else "")
        + f"fma.rn.f32 f{i}, f{i}, $5, $6;"
        for i in range(4)
    ]
    split = "cvt.u32.u16 u, $4; and.b32 low, u, 0x0F0F; shr.u32 high, u, 4; and.b32 high, high, 0x0F0F;"
    rounded = "cvt.rn.bf16x2.f32 low, f1, f0; cvt.rn.bf16x2.f32 high, f3, f2; mov.b32 {$0, $1}, low; mov.b32 {$2, $3}, high;"
    return f"{{ .reg .b32 f0, f1, f2, f3, u, low, high; {split} {' '.join(parts)} {rounded} }}"


FOUR_NIBBLES = {offsets: _four_nibbles(offsets) for offsets in (False, True)}
if gl is not None:
    _INT8, _FP8 = gl.constexpr(ASSEMBLY["int8"]), gl.constexpr(ASSEMBLY["fp8"])
    _FOUR, _FOUR_OFFSETS = gl.constexpr(FOUR_NIBBLES[False]), gl.constexpr(FOUR_NIBBLES[True])
    _INT8_ZERO, _INT4_ZERO = gl.constexpr(INT8_ZERO), gl.constexpr(INT4_ZERO)


@jit
def load_scales(scales_ptr, first_column, number, SHAPE: gl.constexpr, layout: gl.constexpr):
    """[slices * products, parts of a step]"""
    PRODUCTS: gl.constexpr = SHAPE.products
    line = gl.arange(0, SHAPE.slices * PRODUCTS, layout=gl.SliceLayout(1, layout))[:, None]
    part = gl.arange(0, SHAPE.step // SHAPE.part, layout=gl.SliceLayout(0, layout))[None, :]
    column = first_column + line % PRODUCTS % SHAPE.columns
    k = (line // PRODUCTS * SHAPE.steps + number) * SHAPE.step + part * SHAPE.part
    row = (column + line % PRODUCTS // SHAPE.columns * SHAPE.outputs).to(gl.int64) * (SHAPE.size // SHAPE.group)
    inside = (column < SHAPE.outputs) & (k < SHAPE.size) & (number < SHAPE.steps)
    return gl.load(scales_ptr + row + k // SHAPE.group, mask=inside, other=0.0)


@jit
def weights_of(codes, scale, offset, SHAPE: gl.constexpr):
    """[lines, step] in bfloat16 of codes [lines, parts, bytes] and scales [lines, parts]."""
    LINES: gl.constexpr = codes.shape[0]
    scale, offset = scale.to(gl.float32), offset.to(gl.float32)
    if codes.dtype == gl.float8e4nv:
        kinds: gl.constexpr = "=r,=r,r,r,r,r,r"
        w = gl.inline_asm_elementwise(_FP8, kinds, [codes, scale[:, :, None]], dtype=gl.bfloat16, is_pure=True, pack=4)
    elif SHAPE.bits == 8:
        kinds: gl.constexpr = "=r,=r,r,r,r,r,r,r,r,r,r"
        zero = scale * _INT8_ZERO
        operands = [codes, scale[:, :, None], zero[:, :, None]]
        w = gl.inline_asm_elementwise(_INT8, kinds, operands, dtype=gl.bfloat16, is_pure=True, pack=4)
    else:
        kinds: gl.constexpr = "=h,=h,=h,=h,h,r,r"
        nibbles: gl.constexpr = _FOUR_OFFSETS if SHAPE.offsets == 1 else _FOUR
        if SHAPE.offsets == 1:
            added = offset
        else:
            added = offset + scale * -128.0 if SHAPE.offsets else scale * _INT4_ZERO
        operands = [codes, scale[:, :, None], added[:, :, None]]
        w = gl.inline_asm_elementwise(
            nibbles, kinds, operands, dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=1
        )
        w = gl.join(gl.join(w[0], w[2]), gl.join(w[1], w[3]))
    return gl.reshape(w, [LINES, SHAPE.step])
