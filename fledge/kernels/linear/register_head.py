"""The final norm, the head and the greedy choice for a handful of rows, on tensor cores fed straight from memory.

As `register_mma`, but each program keeps the best of its columns instead of writing them; see `sample.Choice`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.gluon_support import gl, jit
from fledge.kernels.linear.register_mma import CHUNK, TILE, direct_products, num_warps, weight_arguments
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.sample import Choice
from fledge.kernels.triton_support import overlap

COLUMNS = 32  # of the vocabulary, a program


def register_head(x_ND: Tensor, norm, weight_VD: Tensor | QuantizedWeight, ids_V: Tensor | None = None) -> Choice:
    """As `head_choice` without draws."""
    parts, kind = weight_arguments(weight_VD)
    (num_rows, size), vocab_size = x_ND.shape, parts[0].shape[0]
    assert x_ND.is_contiguous()
    warps, num_blocks = num_warps(size), -(-vocab_size // COLUMNS)
    best = torch.empty((num_rows, num_blocks), dtype=torch.float32, device=x_ND.device)
    ids = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=x_ND.device)
    _direct_head[(-(-num_rows // TILE), num_blocks)](
        x_ND,
        *parts,
        norm.weight,
        ids_V if ids_V is not None else ids,
        best,
        ids,
        num_rows,
        norm.eps,
        ROWS=TILE,
        COLUMNS=COLUMNS,
        CHUNKS=-(-size // (CHUNK * warps)),
        SIZE=size,
        VOCAB=vocab_size,
        BLOCKS=num_blocks,
        **kind,
        HAS_IDS=ids_V is not None,
        WARPS=warps,
        num_warps=warps,
        **overlap(x_ND),
    )
    return Choice(best, ids)


@jit
def _direct_head(
    x_ptr,
    weight_ptr,
    scales_ptr,
    offsets_ptr,
    norm_ptr,
    target_ids_ptr,
    best_ptr,
    ids_ptr,
    num_rows,
    eps,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    CHUNKS: gl.constexpr,
    SIZE: gl.constexpr,
    VOCAB: gl.constexpr,
    BLOCKS: gl.constexpr,
    BITS: gl.constexpr,
    GROUP: gl.constexpr,
    HAS_OFFSETS: gl.constexpr,
    HAS_IDS: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    last: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 32 // COLUMNS, COLUMNS], [1, WARPS, 1], [2, 1, 0])
    answer: gl.constexpr = gl.SliceLayout(0, last)
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    column = gl.program_id(1) * COLUMNS + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, answer))[None, :]
    token = column
    if HAS_IDS:
        token = gl.load(target_ids_ptr + column, mask=column < VOCAB, other=0).to(gl.int32)
    shares, scale, _ = direct_products(
        x_ptr,
        weight_ptr,
        scales_ptr,
        offsets_ptr,
        norm_ptr,
        x_ptr,
        num_rows,
        eps,
        ROWS,
        COLUMNS,
        CHUNKS,
        SIZE,
        VOCAB,
        BITS,
        GROUP,
        HAS_OFFSETS,
        HAS_NORM=True,
        HAS_RESIDUAL=False,
        GATED=False,
        HOLD=False,
        PDL=PDL,
        WARPS=WARPS,
    )
    # Rounded like the logits of a network in this type, so that ties are the same ones.
    logits = (gl.sum(shares.load(last), axis=0) * scale).to(dtype).to(gl.float32)
    logits = gl.where(column < VOCAB, logits, float("-inf"))
    top = gl.max(logits, axis=1)
    first = gl.min(gl.where(logits == top[:, None], token, 2147483647), axis=1)
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, answer))
    place = row * BLOCKS + gl.program_id(1)
    gl.store(best_ptr + place, top, mask=row < num_rows)
    gl.store(ids_ptr + place, first, mask=row < num_rows)
