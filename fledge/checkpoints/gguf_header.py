"""A GGUF file's header, walked before the package's reader is let at it.

The reader believes every length: an array that says it has 2^60 entries is read until the memory is full. Here each length is
held against what is left of the file.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path

from fledge.errors import ModelError

# Bytes of the scalar kinds, by their number in the file; 8 is text, 9 an array.
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
TEXT, ARRAY = 8, 9
MAX_DIMENSIONS = 4
# The package's reader makes Python objects for each: a vocabulary has a few hundred thousand.
MAX_ARRAY_ITEMS = 1 << 22
MAX_TEXT_BYTES = 16 << 20


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0
        self.order = "<"

    def skip(self, size: int, what: str) -> None:
        if size < 0 or size > len(self.data) - self.at:
            raise ModelError(f"{what} says it has {size} bytes, and {len(self.data) - self.at} are left in the file")
        self.at += size

    def number(self, kind: str, what: str) -> int:
        start = self.at
        self.skip(struct.calcsize(kind), what)
        return struct.unpack_from(self.order + kind, self.data, start)[0]

    def text(self, what: str) -> None:
        size = self.number("Q", what)
        if size > MAX_TEXT_BYTES:
            raise ModelError(f"{what} says it has {size} bytes")
        self.skip(size, what)

    def value(self, kind: int, what: str) -> None:
        if kind in SCALAR_BYTES:
            self.skip(SCALAR_BYTES[kind], what)
        elif kind == TEXT:
            self.text(what)
        elif kind == ARRAY:
            self.array(what)
        else:
            raise ModelError(f"{what} is of an unknown kind ({kind})")

    def array(self, what: str) -> None:
        kind, count = self.number("I", what), self.number("Q", what)
        if kind == ARRAY:
            raise ModelError(f"{what} is an array of arrays, which is not supported")
        if count > MAX_ARRAY_ITEMS:
            raise ModelError(f"{what} says it has {count} entries")
        if kind in SCALAR_BYTES:
            self.skip(count * SCALAR_BYTES[kind], what)
            return
        for _ in range(count):
            self.value(kind, what)


def check_header(file: Path) -> None:
    """Raises ModelError if a length in the header cannot be true."""
    if not file.is_file():
        raise ModelError(f"{file}: not a plain file")
    with file.open("rb") as opened:
        size = os.fstat(opened.fileno()).st_size
        if size < 24:
            raise ModelError(f"{file}: damaged or truncated GGUF ({size} bytes); fetch it again")
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                _walk(_Header(data), size)
            except ModelError as error:
                raise ModelError(f"{file}: damaged or truncated GGUF ({error}); fetch it again") from None


def _walk(header: _Header, size: int) -> None:
    header.skip(4, "the magic number")
    version = header.number("I", "the version")
    if version & 0xFFFF == 0:
        header.order = ">"
    num_tensors, num_values = header.number("Q", "the number of tensors"), header.number("Q", "the number of values")
    # A value takes 13 bytes at least, a tensor 24.
    if num_values > size // 13 or num_tensors > size // 24:
        raise ModelError(f"it says it has {num_values} values and {num_tensors} tensors")
    for number in range(num_values):
        header.text(f"the name of value {number}")
        header.value(header.number("I", f"value {number}"), f"value {number}")
    for number in range(num_tensors):
        what = f"tensor {number}"
        header.text(f"the name of {what}")
        dimensions = header.number("I", what)
        if dimensions > MAX_DIMENSIONS:
            raise ModelError(f"{what} has {dimensions} dimensions")
        header.skip(8 * dimensions + 12, what)
