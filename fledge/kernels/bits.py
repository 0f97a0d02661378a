"""Sets of token ids as bits: bit v % 32 of int32 word v // 32, as in xgrammar's masks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from fledge.kernels.triton_support import by_device, jit, let_next_start, overlap, tl, wait_for_inputs

KEEP = -2  # as the first of a row's ids: the row stays unchanged
BLOCK = 1024


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack_bits(ids: Iterable[int], words: int) -> np.ndarray:
    """Returns the words of one set, on the host, int32 [W]. Ids may repeat; thousands take some 10 µs."""
    bits = np.zeros(32 * words, dtype=bool)
    bits[np.fromiter(ids, dtype=np.int64) if not isinstance(ids, np.ndarray) else ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def set_bits_reference_(bits_RW: Tensor, rows_B: Tensor, ids_BS: Tensor) -> Tensor:
    """Makes each of these rows the set of its S ids (-1: none); unchanged if the first id is KEEP. Capturable."""
    new = torch.zeros((len(rows_B), bits_RW.shape[1]), dtype=bits_RW.dtype, device=bits_RW.device)
    for ids in ids_BS.unbind(1):
        word = (ids.clamp(min=0) // 32)[:, None]
        bit = torch.where(ids >= 0, 1 << (ids % 32), 0).to(new.dtype)[:, None]
        new.scatter_(1, word, new.gather(1, word) | bit)
    return bits_RW.index_copy_(0, rows_B, torch.where(ids_BS[:, :1] == KEEP, bits_RW[rows_B], new))


def set_bits_triton_(bits_RW: Tensor, rows_B: Tensor, ids_BS: Tensor) -> Tensor:
    words = bits_RW.shape[1]
    if len(rows_B):
        _set_bits[(len(rows_B), -(-words // BLOCK))](
            bits_RW,
            rows_B,
            ids_BS,
            rows_B.stride(0),
            ids_BS.stride(0),
            ids_BS.stride(1),
            WORDS=words,
            IDS=ids_BS.shape[1],
            KEPT=KEEP,
            BLOCK=BLOCK,
            num_warps=4,
            **overlap(bits_RW),
        )
    return bits_RW


set_bits_ = by_device(set_bits_triton_, set_bits_reference_)


@jit
def _set_bits(
    bits_ptr,
    rows_ptr,
    ids_ptr,
    rows_stride,
    ids_stride,
    id_stride,
    WORDS: tl.constexpr,
    IDS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    index = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PDL)
    row = tl.load(rows_ptr + index * rows_stride)
    ids = ids_ptr + index * ids_stride
    bits = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(IDS):
        token = tl.load(ids + place * id_stride).to(tl.int32)
        bits |= tl.where((token >= 0) & (word == token // 32), 1 << (token % 32), 0)
    changed = tl.load(ids) != KEPT
    tl.store(bits_ptr + row * WORDS + word, bits, mask=(word < WORDS) & changed)


def has_bit(bits_BW: Tensor, ids_BN: Tensor) -> Tensor:
    """Whether each id is in its row's set, bool [B, N]."""
    return (bits_BW.gather(1, ids_BN // 32) >> (ids_BN % 32)) & 1 != 0


def unpack_bits(bits_BW: Tensor, vocab_size: int) -> Tensor:
    """Whether each id of the vocabulary is in the set, bool [B, V]."""
    shifts = torch.arange(32, dtype=bits_BW.dtype, device=bits_BW.device)
    return ((bits_BW[..., None] >> shifts) & 1 != 0).flatten(-2)[..., :vocab_size]
