"""Number formats of a KV cache. The tensor's dtype selects the format: floats are stored as such, uint8 holds Q8_0 blocks as in
GGUF files (32 numbers: an fp16 scale and 32 signed bytes)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, BLOCK_BYTES = 32, 34
KV_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "q8_0": torch.uint8}


def width(head_dim: int, dtype: torch.dtype) -> int:
    """The number of cache elements that hold one head of one token."""
    if dtype != torch.uint8:
        return head_dim
    assert head_dim % BLOCK == 0, "refused before"
    return head_dim // BLOCK * BLOCK_BYTES


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts [..., head size] to [..., width]. Each head of each token is encoded independently of the batch."""
    if dtype != torch.uint8:
        return x.to(dtype)
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    most = blocks.abs().amax(-1, keepdim=True)
    codes = (blocks * torch.where(most > 0, 127 / most, 0)).round().to(torch.int8)
    return torch.cat([(most / 127).half().view(torch.uint8), codes.view(torch.uint8)], -1).flatten(-2)


def decode(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts [..., width] to [..., head size] in `dtype`."""
    if stored.dtype != torch.uint8:
        return stored.to(dtype)
    blocks = stored.unflatten(-1, (-1, BLOCK_BYTES))
    scales = blocks[..., :2].contiguous().view(torch.float16).float()
    return (scales * blocks[..., 2:].view(torch.int8)).flatten(-2).to(dtype)
