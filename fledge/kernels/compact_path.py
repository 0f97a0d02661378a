"""Moves the keys and values of an accepted tree path to the consecutive slots of a chain, in all layers at once.

slots from `start`   | pending | node 0 | node 1 | node 2 | node 3 |    verified as a tree, in index order
path  0 2 4          |    0    |        |    2   |        |    4   |    rows: the pending token's, then the accepted nodes'
afterwards           | pending | node 1 | node 3 | …               |    the text is in consecutive slots again
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, next_power_of_2, tl


def compact_path_reference(
    keys_LKSE: Tensor,
    values_LKSE: Tensor,
    page_table_BP: Tensor,
    page_size: int,
    starts_B: Tensor,
    path_BT: Tensor,
    counts_B: Tensor,
) -> None:
    """`starts_B`: position of the pending token. `path_BT`: its row 0, then the `counts_B` rows of the accepted nodes.

    A row whose count is 0 reads and writes nothing: its pages may belong to another request by now.
    """
    place_T = torch.arange(path_BT.shape[1], device=path_BT.device)
    moved = (place_T > 0) & (place_T <= counts_B[:, None])
    rows = torch.arange(len(path_BT), device=path_BT.device)[:, None].expand_as(path_BT)[moved]
    source, target = (starts_B[rows] + x.expand_as(path_BT)[moved] for x in (path_BT, place_T))
    source, target = (page_table_BP[rows, x // page_size].long() * page_size + x % page_size for x in (source, target))
    for cache in (keys_LKSE, values_LKSE):
        cache[:, :, target] = cache[:, :, source]


def compact_path_triton(
    keys_LKSE: Tensor,
    values_LKSE: Tensor,
    page_table_BP: Tensor,
    page_size: int,
    starts_B: Tensor,
    path_BT: Tensor,
    counts_B: Tensor,
) -> None:
    (num_layers, num_kv_heads, _, head_dim), (batch, num_places) = keys_LKSE.shape, path_BT.shape
    assert keys_LKSE.stride() == values_LKSE.stride() == (*keys_LKSE.stride()[:2], head_dim, 1)
    assert page_table_BP.stride(1) == 1
    assert path_BT.is_contiguous()
    if num_places == 1:
        return
    _compact_path[(batch, num_layers * num_kv_heads)](
        keys_LKSE,
        values_LKSE,
        page_table_BP,
        starts_B,
        path_BT,
        counts_B,
        keys_LKSE.stride(0),
        keys_LKSE.stride(1),
        page_table_BP.stride(0),
        PLACES=num_places,
        PLACES_BLOCK=next_power_of_2(num_places),
        KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEAD_BLOCK=next_power_of_2(head_dim),
        PAGE=page_size,
        num_warps=2,
    )


compact_path = by_device(compact_path_triton, compact_path_reference)


@jit
def _compact_path(
    keys_ptr,
    values_ptr,
    page_table_ptr,
    starts_ptr,
    path_ptr,
    counts_ptr,
    layer_stride,
    head_stride,
    table_stride,
    PLACES: tl.constexpr,
    PLACES_BLOCK: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    layer = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    head = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    count = tl.load(counts_ptr + sequence)
    if count > 0:
        start = tl.load(starts_ptr + sequence).to(tl.int64)
        place = tl.arange(0, PLACES_BLOCK)
        row = tl.load(path_ptr + sequence * PLACES + place, mask=place < PLACES, other=0).to(tl.int64)
        moved = (place > 0) & (place <= count) & (place < PLACES) & (row != place)
        source = start + row
        target = start + place
        table = page_table_ptr + sequence * table_stride
        source = tl.load(table + source // PAGE, mask=moved, other=0).to(tl.int64) * PAGE + source % PAGE
        target = tl.load(table + target // PAGE, mask=moved, other=0).to(tl.int64) * PAGE + target % PAGE
        lane = tl.arange(0, HEAD_BLOCK)
        mask = moved[:, None] & (lane < HEAD_DIM)[None, :]
        base = layer * layer_stride + head * head_stride
        from_offsets = base + source[:, None] * HEAD_DIM + lane[None, :]
        to_offsets = base + target[:, None] * HEAD_DIM + lane[None, :]
        keys = tl.load(keys_ptr + from_offsets, mask=mask, other=0.0)
        values = tl.load(values_ptr + from_offsets, mask=mask, other=0.0)
        # One thread's target may be another's source, so all are read before any is written.
        tl.debug_barrier()
        tl.store(keys_ptr + to_offsets, keys, mask=mask)
        tl.store(values_ptr + to_offsets, values, mask=mask)
