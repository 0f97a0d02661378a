"""A block of keys and values from the paged cache, within kernels."""

from __future__ import annotations

from fledge.kernels.triton_support import jit, tl


@jit
def page_numbers(pages, first, last, PAGE: tl.constexpr, PER_SPLIT: tl.constexpr):
    """Of the split that begins at or before `first`, up to `last`. Loaded at once: blocks then do not wait for two loads."""
    COUNT: tl.constexpr = PER_SPLIT // PAGE if PER_SPLIT > PAGE else 1
    page = first // PER_SPLIT * PER_SPLIT // PAGE + tl.arange(0, COUNT)
    return tl.load(pages + page, mask=page * PAGE < last, other=0)


@jit
def cache_block(
    keys_base,
    values_base,
    pages,
    numbers,
    block,
    last,
    MASKED: tl.constexpr,
    KEYS: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    PAGE: tl.constexpr,
    PER_SPLIT: tl.constexpr,
):
    """Keys and values [KEYS, LANES] from position `block` on, a multiple of KEYS; where masked, those from `last` on are 0.

    `numbers`: `page_numbers` of its split, where `ALIGNED` below.
    """
    ALIGNED: tl.constexpr = PAGE % KEYS == 0 and (PER_SPLIT % PAGE == 0 or PAGE % PER_SPLIT == 0)
    lane = tl.arange(0, LANES)
    key = block + tl.arange(0, KEYS)
    if ALIGNED:
        # A block lies in one page.
        COUNT: tl.constexpr = PER_SPLIT // PAGE if PER_SPLIT > PAGE else 1
        page = tl.sum(tl.where(tl.arange(0, COUNT) == block % PER_SPLIT // PAGE, numbers, 0), axis=0)
        slot = page.to(tl.int64) * PAGE + block % PAGE + tl.arange(0, KEYS)
    elif MASKED:
        slot = tl.load(pages + key // PAGE, mask=key < last, other=0).to(tl.int64) * PAGE + key % PAGE
    else:
        slot = tl.load(pages + key // PAGE).to(tl.int64) * PAGE + key % PAGE
    offsets = slot[:, None] * SIZE + lane[None, :]
    if MASKED:
        mask = (key < last)[:, None] & (lane < SIZE)[None, :]
        k, v = tl.load(keys_base + offsets, mask=mask, other=0.0), tl.load(values_base + offsets, mask=mask, other=0.0)
    elif SIZE < LANES:
        mask = (lane < SIZE)[None, :]
        k, v = tl.load(keys_base + offsets, mask=mask, other=0.0), tl.load(values_base + offsets, mask=mask, other=0.0)
    else:
        k, v = tl.load(keys_base + offsets), tl.load(values_base + offsets)
    return k, v
