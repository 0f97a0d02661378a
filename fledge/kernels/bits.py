"""Sets of token ids as bits: bit v % 32 of int32 word v // 32, as in xgrammar's masks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def pack_bits(ids: Iterable[int], words: int) -> np.ndarray:
    """The words of one set, on the host, int32 [W]. Ids may repeat; thousands take some 10 us."""
    bits = np.zeros(32 * words, dtype=bool)
    bits[np.fromiter(ids, dtype=np.int64) if not isinstance(ids, np.ndarray) else ids] = True
    return np.packbits(bits, bitorder="little").view("<i4")


def set_bits_(bits_RW: Tensor, rows_B: Tensor, ids_BS: Tensor) -> Tensor:
    """Makes each of these rows the set of its S ids; -1: none. Capturable; for a few ids a row."""
    # Integer sums do not depend on their order, and a repeated id counts once.
    repeated = (ids_BS[:, :, None] == ids_BS[:, None, :]).tril(-1).any(-1)
    values = torch.where((ids_BS >= 0) & ~repeated, 1 << (ids_BS % 32), 0).to(bits_RW.dtype)
    new = torch.zeros((len(rows_B), bits_RW.shape[1]), dtype=bits_RW.dtype, device=bits_RW.device)
    return bits_RW.index_copy_(0, rows_B, new.scatter_add_(1, ids_BS.clamp(min=0) // 32, values))


def has_bit(bits_BW: Tensor, ids_BN: Tensor) -> Tensor:
    """Which ids are in their row's set, bool [B, N]."""
    return (bits_BW.gather(1, ids_BN // 32) >> (ids_BN % 32)) & 1 != 0


def unpack_bits(bits_BW: Tensor, vocab_size: int) -> Tensor:
    """Membership of every id, bool [B, V]."""
    shifts = torch.arange(32, dtype=bits_BW.dtype, device=bits_BW.device)
    return ((bits_BW[..., None] >> shifts) & 1 != 0).flatten(-2)[..., :vocab_size]
