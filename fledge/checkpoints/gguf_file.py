"""Reads GGUF files: key-value pairs and memory-mapped tensors. The file is untrusted: inconsistent values are refused."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from fledge.errors import ModelError
from fledge.kernels.formats.gguf_blocks import FORMATS, NAMES, Blocks

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# Number of a value's type -> numpy type of its bytes in the file
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<?", 10: "<u8", 11: "<i8", 12: "<f8"}
# Tensor types that are not supported; their names are for the error message.
OTHER_TYPES = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip
# Far more than any model has. The file's size also bounds lists, but a list in a file of many gigabytes could take minutes to
# read.
MOST_ENTRIES, MOST_ITEMS, LONGEST_STRING = 1 << 16, 1 << 22, 1 << 24


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # outermost first, as in torch; the file has the reverse order
    blocks: Blocks


def open_gguf(path: Path) -> GgufFile:
    """Opens a file; the last one is cached: commands check it before they import torch, then the engine opens it again."""
    about = path.stat()
    return _opened(path, about.st_size, about.st_mtime_ns)


@lru_cache(maxsize=1)
def _opened(path: Path, num_bytes: int, modified: int) -> GgufFile:
    return GgufFile(path)


class GgufFile:
    """An open GGUF file. Tensors are views of the mapped file and keep it mapped as long as they exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():  # reading a pipe would block forever
            raise ModelError(f"{path}: not a plain file")
        with self.path.open("rb") as opened:
            magic = opened.read(4)
            if magic != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
            self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            header = _Header(self._map)
            self.metadata: dict[str, Any] = header.read_pairs()
            self.tensors: dict[str, GgufTensor] = header.read_tensors(self.metadata.get("general.alignment", 32))
        except _Damage as damage:
            raise ModelError(f"{path}: damaged or truncated GGUF ({damage}); fetch it again") from None
        except _UnknownType as error:
            raise ModelError(f"{path}: {error} is not supported; supported: {', '.join(FORMATS)}") from None

    def forget_lists(self) -> None:
        """Frees the vocabulary's lists once the tokenizer is built: 25 MB for 150,000 tokens."""
        _opened.cache_clear()
        self.metadata = {key: value for key, value in self.metadata.items() if not isinstance(value, list)}

    def release(self) -> None:
        """Returns all mapped pages to the system, so that pages read only once, such as the vocabulary, are freed."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


class _Damage(Exception):
    pass


class _UnknownType(Exception):
    pass


class _Header:
    """Parses the header: key-value pairs and the list of tensors. `at`: the current byte."""

    def __init__(self, mapped: mmap.mmap) -> None:
        self.map, self.size, self.at = mapped, len(mapped), 4
        self.items_left = MOST_ITEMS
        version = self.number("<I")
        if version not in VERSIONS:
            raise _Damage(f"version {version}; versions {' and '.join(map(str, VERSIONS))} are read, in little-endian")
        self.num_tensors = self.count("tensors", 8 + 4 + 8 + 4 + 8, MOST_ENTRIES)
        self.num_pairs = self.count("key-value pairs", 8 + 4 + 1, MOST_ENTRIES)

    def take(self, size: int) -> int:
        """Advances by `size` bytes and returns where they begin."""
        at = self.at
        if size > self.size - at:
            raise _Damage(f"it ends at byte {self.size}, within its header")
        self.at = at + size
        return at

    def number(self, kind: str) -> Any:
        return struct.unpack_from(kind, self.map, self.take(struct.calcsize(kind)))[0]

    def count(self, what: str, least_bytes: int, most: int) -> int:
        count = self.number("<Q")
        if count > min(most, (self.size - self.at) // least_bytes):
            raise _Damage(f"it says that it has {count} {what}")
        return count

    def string(self) -> str:
        size = self.number("<Q")
        if size > LONGEST_STRING:
            raise _Damage(f"a string of {size} bytes")
        at = self.take(size)
        return str(self.map[at : at + size], "utf-8", "replace")

    def strings(self, count: int) -> list[str]:
        """Reads `count` strings in one loop: 0.1 s for a vocabulary of 150,000."""
        mapped, at, found, length = self.map, self.at, [], struct.Struct("<Q").unpack_from
        for _ in range(count):
            end = at + 8
            if end <= self.size:
                end += length(mapped, at)[0]
            if end > self.size:
                raise _Damage("it ends within a list of strings")
            found.append(str(mapped[at + 8 : end], "utf-8", "replace"))
            at = end
        self.at = at
        return found

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind in SCALARS:
            scalar = np.dtype(SCALARS[kind])
            return np.frombuffer(self.map, scalar, 1, self.take(scalar.itemsize))[0].item()
        if kind != ARRAY:
            raise _Damage(f"a value of the unknown type {kind}")
        inner = self.number("<I")
        if inner != STRING and inner not in SCALARS:
            raise _Damage(f"a list of values of the unknown type {inner}")
        size = 8 if inner == STRING else np.dtype(SCALARS[inner]).itemsize
        count = self.count("values in a list", size, self.items_left)
        self.items_left -= count
        if inner == STRING:
            return self.strings(count)
        return np.frombuffer(self.map, SCALARS[inner], count, self.take(count * size)).tolist()

    def read_pairs(self) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for _ in range(self.num_pairs):
            key = self.string()
            if key in pairs:
                raise _Damage(f"the key {key[:60]!r} twice")
            pairs[key] = self.value(self.number("<I"))
        return pairs

    def read_tensors(self, alignment: Any) -> dict[str, GgufTensor]:
        if not isinstance(alignment, int) or alignment <= 0:
            raise _Damage(f"alignment {alignment!r}")
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self.num_tensors):
            name = self.string()
            if name in entries:
                raise _Damage(f"the tensor {name[:60]!r} twice")
            num_dimensions = self.number("<I")
            if not 1 <= num_dimensions <= 4:
                raise _Damage(f"{name[:60]} has {num_dimensions} dimensions")
            sizes = struct.unpack_from(f"<{num_dimensions}Q", self.map, self.take(8 * num_dimensions))
            entries[name] = (sizes[::-1], self.number("<I"), self.number("<Q"))
        data = -(-self.at // alignment) * alignment
        tensors, spans = {}, []
        for name, (shape, number, offset) in entries.items():
            if number not in NAMES:
                raise _UnknownType(f"quantisation {OTHER_TYPES.get(number, f'number {number}')} (of {name[:60]})")
            entry, rows = FORMATS[NAMES[number]], math.prod(shape[:-1])
            if 0 in shape or shape[-1] % entry.inputs:
                raise _Damage(f"{name[:60]} of {NAMES[number]} has the shape {list(shape)}")
            row_bytes = shape[-1] // entry.inputs * entry.num_bytes
            if offset % alignment or data + offset + rows * row_bytes > self.size:
                raise _Damage(f"{name[:60]} reaches to byte {data + offset + rows * row_bytes} of {self.size}")
            raw = np.frombuffer(self.map, np.uint8, rows * row_bytes, data + offset).reshape(rows, row_bytes)
            tensors[name] = GgufTensor(shape, Blocks(NAMES[number], shape[-1], raw))
            spans.append((offset, offset + raw.nbytes, name))
        spans.sort()
        for (_, end, name), (start, _, following) in pairwise(spans):
            if start < end:
                raise _Damage(f"{following[:60]} begins within {name[:60]}")
        return tensors
