"""GGUF's tensor formats: their sizes, and tensors in a memory-mapped file.

The bit layout of each format is in `cpu/blocks.h`. The kernels multiply blocks by activations in 8 bits, with one scale per 32
inputs of a row; F32, F16 and BF16 are multiplied by fp32 activations.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # A file is checked, and its tokenizer read, without torch: importing torch takes longer than both.
    from torch import Tensor


class Format(NamedTuple):
    number: int  # GGUF's number of the format
    inputs: int  # weights per block
    num_bytes: int  # bytes per block


FORMATS = {
    "F32": Format(0, 1, 4),
    "F16": Format(1, 1, 2),
    "BF16": Format(30, 1, 2),
    "Q4_0": Format(2, 32, 18),
    "Q4_1": Format(3, 32, 20),
    "Q5_0": Format(6, 32, 22),
    "Q5_1": Format(7, 32, 24),
    "Q8_0": Format(8, 32, 34),
    "Q2_K": Format(10, 256, 84),
    "Q3_K": Format(11, 256, 110),
    "Q4_K": Format(12, 256, 144),
    "Q5_K": Format(13, 256, 176),
    "Q6_K": Format(14, 256, 210),
    "IQ4_NL": Format(20, 32, 18),
}
NAMES = {entry.number: name for name, entry in FORMATS.items()}
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # torch's names


@dataclass(frozen=True)
class Blocks:
    """A tensor [outputs, inputs] (a vector: one output) in its file's format."""

    format: str
    inputs: int
    data: np.ndarray  # uint8 [outputs, row_bytes], contiguous; keeps the mapped file open

    @property
    def outputs(self) -> int:
        return self.data.shape[0]

    @property
    def row_bytes(self) -> int:
        return self.data.shape[1]

    @cached_property
    def address(self) -> int:
        return self.data.ctypes.data

    def rows(self, which: slice | np.ndarray) -> Blocks:
        """Selects rows: a view for a slice, a copy for indices."""
        return Blocks(self.format, self.inputs, self.data[which])

    def plain(self) -> Tensor:
        """A tensor of F32, F16 or BF16 as [outputs, inputs] in that type. A copy: the file is mapped read-only."""
        import torch

        return torch.from_numpy(self.data.copy()).view(getattr(torch, PLAIN[self.format]))

    def dequantised(self) -> Tensor:
        """The tensor as fp32 [outputs, inputs], converted by the `gguf` package; the reference for the kernels."""
        if self.format in PLAIN:
            return self.plain().float()
        import gguf
        import torch

        values = gguf.dequantize(self.data, gguf.GGMLQuantizationType(FORMATS[self.format].number))
        return torch.from_numpy(np.asarray(values, dtype=np.float32)).view(self.outputs, self.inputs)

    def release(self) -> None:
        """Returns the mapped pages to the system; they are read from the file again on access."""
        owner = self.data
        while isinstance(owner, np.ndarray) and owner.base is not None:
            owner = owner.base
        owner = owner.obj if isinstance(owner, memoryview) else owner
        if not isinstance(owner, mmap.mmap) or not hasattr(mmap, "MADV_DONTNEED"):
            return
        start = self.address - np.frombuffer(owner, np.uint8).ctypes.data
        page = mmap.PAGESIZE
        first, end = start // page * page, -(-(start + self.data.nbytes) // page) * page
        owner.madvise(mmap.MADV_DONTNEED, first, end - first)
