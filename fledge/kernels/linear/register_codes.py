"""Weights in 8 (int8, FP8) or 4 bits on their way into `register_mma`'s products.

A thread reads four neighbouring codes, all of one group, and makes weights of them in its registers.
"""

from __future__ import annotations

from fledge.kernels.gluon_support import gl, jit


@jit
def read_codes(
    codes_ptr,
    scales_ptr,
    offsets_ptr,
    first_column,
    chunk,
    SHAPE: gl.constexpr,
    layout: gl.constexpr,
):
    """Of a chunk: its codes as they lie in memory, and the scales and offsets of its halves (each lies in one group)."""
    PACKED: gl.constexpr = 8 // SHAPE.bits  # codes a byte
    SLICES: gl.constexpr = SHAPE.slices
    PRODUCTS: gl.constexpr = SHAPE.products
    COLUMNS: gl.constexpr = SHAPE.columns
    OUTPUTS: gl.constexpr = SHAPE.outputs
    SIZE: gl.constexpr = SHAPE.size
    GROUP: gl.constexpr = SHAPE.group
    operand = gl.zeros([SLICES, PRODUCTS, 64], gl.int8, layout=layout)
    # The layout of bytes is that of every PACKED-th input.
    bytes_: gl.constexpr = gl.SliceLayout(3, gl.reshape(operand, [SLICES, PRODUCTS, 64 // PACKED, PACKED]).type.layout)
    halves: gl.constexpr = gl.SliceLayout(3, gl.reshape(operand, [SLICES, PRODUCTS, 2, 32]).type.layout)
    piece = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, bytes_)))[:, None, None]
    product = gl.arange(0, PRODUCTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, bytes_)))[None, :, None]
    byte = gl.arange(0, 64 // PACKED, layout=gl.SliceLayout(0, gl.SliceLayout(1, bytes_)))[None, None, :]
    column = first_column + product % COLUMNS
    line = (column + product // COLUMNS * OUTPUTS).to(gl.int64) * (SIZE // PACKED)
    place = (piece * SHAPE.steps + chunk) * (64 // PACKED) + byte
    inside = (column < OUTPUTS) & (place < SIZE // PACKED)
    if codes_ptr.dtype.element_ty == gl.float8e4nv:
        codes = gl.load(codes_ptr + line + place, mask=inside, other=0.0)
    else:
        codes = gl.load(codes_ptr + line + place, mask=inside, other=0)
    piece_s = gl.arange(0, SLICES, layout=gl.SliceLayout(1, gl.SliceLayout(2, halves)))[:, None, None]
    product_s = gl.arange(0, PRODUCTS, layout=gl.SliceLayout(0, gl.SliceLayout(2, halves)))[None, :, None]
    half_s = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(1, halves)))[None, None, :]
    column_s = first_column + product_s % COLUMNS
    line_s = (column_s + product_s // COLUMNS * OUTPUTS).to(gl.int64) * (SIZE // GROUP)
    k = (piece_s * SHAPE.steps + chunk) * 64 + half_s * 32
    inside_s = (column_s < OUTPUTS) & (k < SIZE)
    scale = gl.load(scales_ptr + line_s + k // GROUP, mask=inside_s, other=0.0)
    offset = scale
    if SHAPE.offsets:
        offset = gl.load(offsets_ptr + line_s + k // GROUP, mask=inside_s, other=0.0)
    return codes, scale, offset


def _floats(source: str, first: int, zero: str) -> str:
    """Assembly: the bytes of `source` as float32, less what stands for zero.

    A byte at the end of 2²³ makes that number larger by it: two quick instructions, where a conversion waits for a slow unit.
    """
    parts = [
        f"prmt.b32 ${first + i}, {source}, 0x4B000000, 0x765{i}; sub.rn.f32 ${first + i}, ${first + i}, {zero};"
        for i in range(4)
    ]
    return " ".join(parts)


def _from_nibbles(zero: str) -> str:
    low, high = "and.b32 low, $8, 0x0F0F0F0F;", "shr.u32 high, $8, 4; and.b32 high, high, 0x0F0F0F0F;"
    return f"{{ .reg .b32 low, high; {low} {high} {_floats('low', 0, zero)} {_floats('high', 4, zero)} }}"


ASSEMBLY = {
    "bytes": "{ .reg .b32 u; xor.b32 u, $4, 0x80808080; " + _floats("u", 0, "0f4B000080") + " }",
    "nibbles": _from_nibbles("0f4B000000"),
    "nibbles less 8": _from_nibbles("0f4B000008"),
    "fp8": "{ .reg .b16 a, b, c, d; .reg .b32 p, q; mov.b32 {a, b}, $4; cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b; "
    "mov.b32 {a, b}, p; mov.b32 {c, d}, q; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
}
if gl is not None:
    _FROM_BYTES, _FROM_NIBBLES, _FROM_NIBBLES_LESS_8, _FROM_FP8 = map(gl.constexpr, ASSEMBLY.values())


@jit
def weights_of(
    read,
    SHAPE: gl.constexpr,
    layout: gl.constexpr,
    dtype: gl.constexpr,
):
    """What a chunk's codes stand for [SLICES, PRODUCTS, 64]. Each thread keeps what it has: nothing moves."""
    SLICES: gl.constexpr = SHAPE.slices
    PRODUCTS: gl.constexpr = SHAPE.products
    if read[0].dtype == gl.float8e4nv:
        values = gl.inline_asm_elementwise(_FROM_FP8, "=r,=r,=r,=r,r", [read[0]], dtype=gl.float32, is_pure=True, pack=4)
    elif SHAPE.bits == 8:
        values = gl.inline_asm_elementwise(_FROM_BYTES, "=r,=r,=r,=r,r", [read[0]], dtype=gl.float32, is_pure=True, pack=4)
    else:
        nibbles: gl.constexpr = _FROM_NIBBLES if SHAPE.offsets else _FROM_NIBBLES_LESS_8
        kinds: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r"
        low, high = gl.inline_asm_elementwise(nibbles, kinds, [read[0]], dtype=(gl.float32, gl.float32), is_pure=True, pack=4)
        values = gl.reshape(gl.join(low, high), [SLICES, PRODUCTS, 64])  # low: the even inputs'
    values = gl.convert_layout(values, layout)
    values = gl.reshape(values, [SLICES, PRODUCTS, 2, 32])
    values = values * read[1].to(gl.float32)[:, :, :, None]
    if SHAPE.offsets:
        values = values + read[2].to(gl.float32)[:, :, :, None]
    return gl.convert_layout(gl.reshape(values.to(dtype), [SLICES, PRODUCTS, 64]), layout)
