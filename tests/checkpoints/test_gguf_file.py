"""Invalid GGUF files are refused quickly, with a one-line error."""

from __future__ import annotations

import struct
import time
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest

from fledge.checkpoints.gguf import load_decoder, read_config
from fledge.checkpoints.gguf_file import GgufFile
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.errors import ModelError
from tests.checkpoints.gguf_files import write_gguf
from tests.tiny import tiny_decoder

VOCAB = 288
TOO_MANY = 1 << 60


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama")


def open_all(file: Path) -> None:
    """Reads everything that is read from a file before the first token."""
    opened = GgufFile(file)
    GgufTokenizer(opened)
    load_decoder(opened)


def assert_refused(file: Path, message: str) -> None:
    start = time.process_time()
    with pytest.raises(ModelError, match=message) as error:
        open_all(file)
    assert "\n" not in str(error.value)
    assert time.process_time() - start < 1


def overwrite(file: Path, at: int, kind: str, *values: int) -> None:
    raw = bytearray(file.read_bytes())
    struct.pack_into(kind, raw, at, *values)
    file.write_bytes(raw)


def after(file: Path, name: str) -> int:
    raw = file.read_bytes()
    return raw.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)


def test_reads_what_the_package_reads(file: Path) -> None:
    ours, theirs = GgufFile(file), gguf.GGUFReader(file)
    assert {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")} == ours.metadata
    assert len(theirs.tensors) == len(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(map(int, reversed(tensor.shape)))
        assert mine.blocks.format == tensor.tensor_type.name
        assert np.array_equal(mine.blocks.data.reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    open_all(file)  # the file is valid before the following tests damage it


@pytest.mark.parametrize(("at", "what"), [(8, "tensors"), (16, "key-value pairs")])
def test_counts_beyond_the_file(file: Path, at: int, what: str) -> None:
    for count in (TOO_MANY, (1 << 64) - 1, 1 << 20):
        overwrite(file, at, "<Q", count)
        assert_refused(file, rf"damaged or truncated GGUF \(it says that it has {count} {what}\)")


def test_arrays_and_strings_beyond_the_file(file: Path) -> None:
    sound = file.read_bytes()
    overwrite(file, after(file, "tokenizer.ggml.tokens") + 8, "<Q", TOO_MANY)
    assert_refused(file, f"{TOO_MANY} values in a list")
    file.write_bytes(sound)
    overwrite(file, after(file, "tokenizer.ggml.tokens") + 16, "<Q", TOO_MANY)  # the first token's length
    assert_refused(file, "ends within a list of strings")
    file.write_bytes(sound)
    overwrite(file, after(file, "tokenizer.chat_template") + 4, "<Q", TOO_MANY)
    assert_refused(file, f"a string of {TOO_MANY} bytes")
    file.write_bytes(sound)
    overwrite(file, after(file, "tokenizer.chat_template"), "<I", 99)
    assert_refused(file, "a value of the unknown type 99")


def test_a_sparse_file_of_many_gigabytes(tmp_path: Path) -> None:
    """Counts within the file's size, with only zero bytes in the file."""
    file = tmp_path / "sparse.gguf"
    with file.open("wb") as opened:
        opened.write(b"GGUF" + struct.pack("<IQQ", 3, 1000, 60_000))
        opened.truncate(1 << 36)
    assert_refused(file, "the key '' twice")
    with file.open("r+b") as opened:
        opened.write(b"GGUF" + struct.pack("<IQQ", 3, 1000, 1) + struct.pack("<Q1sIIQ", 1, b"x", 9, 8, 1 << 32))
    assert_refused(file, f"{1 << 32} values in a list")


def test_tensors_that_do_not_fit(file: Path) -> None:
    sound, name = file.read_bytes(), "blk.0.ffn_up.weight"
    place = after(file, name)  # number of dimensions, two sizes, type, offset
    for kind, at, values, message in [
        ("<Q", 24, (1 << 40,), f"{name} reaches to byte"),
        ("<QQ", 4, (1 << 40, 1 << 40), f"{name} reaches to byte"),
        ("<I", 0, (9,), f"{name} has 9 dimensions"),
        ("<Q", 4, (0,), f"{name} of F32 has the shape"),
        ("<Q", 24, (0,), "begins within"),
        ("<I", 20, (12,), f"{name} of Q4_K has the shape"),  # 32 inputs are less than a block of 256
    ]:
        file.write_bytes(sound)
        overwrite(file, place + at, kind, *values)
        assert_refused(file, message)


def test_truncated_anywhere(file: Path) -> None:
    raw = file.read_bytes()
    for size in np.linspace(4, len(raw) - 1, 150).astype(int):
        file.write_bytes(raw[:size])
        assert_refused(file, "damaged or truncated GGUF")


def test_old_versions_are_named(file: Path) -> None:
    for version in (1, 3 << 24):  # the latter: 3 in big-endian
        overwrite(file, 4, "<I", version)
        assert_refused(file, f"version {version}; versions 2 and 3 are read, in little-endian")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.block_count", (1 << 31) - 1, "block_count is 2147483647"),
        ("llama.embedding_length", 0, "embedding_length is 0"),
        ("llama.attention.head_count", 0, "head_count is 0"),
        ("llama.attention.head_count", "many", "head_count must be a number, not 'many'"),
        ("llama.rope.freq_base", "high", "freq_base must be a number, not 'high'"),
        ("tokenizer.ggml.tokens", [1, 2, 3], "tokens holds values of the wrong kind"),
        ("tokenizer.ggml.token_type", [1, 2, 3], f"token_type has 3 values for {VOCAB} tokens"),
        ("tokenizer.ggml.merges", ["nothing"], "a merge that is not two pieces"),
    ],
)
def test_invalid_values_are_refused(key: str, value: object, message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama", metadata={key: value})
    assert_refused(file, message)


def test_any_damaged_byte(file: Path) -> None:
    """A damaged header gives a ModelError, or a model if the byte does not matter; no other exception."""
    raw, rng = file.read_bytes(), np.random.default_rng(np.random.randint(1 << 31))
    for _ in range(150):
        damaged = bytearray(raw)
        damaged[rng.integers(4, 12_000)] = rng.integers(0, 256)
        file.write_bytes(damaged)
        with suppress(ModelError):
            opened = GgufFile(file)
            GgufTokenizer(opened)
            read_config(opened)
