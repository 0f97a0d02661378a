"""Writes files completely or not at all, and raises `OSError` when the disk is full."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# No space, no quota, or file too large. `fledge/cli/main.py` prints these errors as one line: they are not bugs.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Calls `write(file)` on a temporary file beside `path`, then renames it to `path`, so `path` is never half written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        # torch.save reports a file that cannot be written as a RuntimeError about positions; the OSError is its context.
        cause = error if isinstance(error, OSError) else error.__context__ if isinstance(error, RuntimeError) else None
        if isinstance(cause, OSError) and cause.errno is not None:
            raise OSError(cause.errno, os.strerror(cause.errno), str(path)) from error
        raise


def hash_files(paths: Iterable[str | Path]) -> str:
    """SHA-256 over the concatenated contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def write_json(path: str | Path, content: object, indent: int = 1) -> None:
    text = json.dumps(content, indent=indent, ensure_ascii=False) + "\n"
    # backslashreplace: a lone surrogate becomes its JSON escape.
    write_atomically(path, lambda file: file.write(text.encode(errors="backslashreplace")))


def save_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Writes a safetensors file. Not atomic: callers write into a temporary folder and rename it when it is complete."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        path.unlink(missing_ok=True)
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error


def copy_folder(source: Path, target: Path) -> None:
    """`shutil.copytree` that raises the first OSError; the original collects errors and loses their errno."""

    def copy(one: str, other: str) -> None:
        try:
            shutil.copy2(one, other)
        except OSError as error:
            raise _CopyFailed(error) from error

    try:
        shutil.copytree(source, target, copy_function=copy)
    except _CopyFailed as failed:
        raise failed.error from None


class _CopyFailed(Exception):
    def __init__(self, error: OSError) -> None:
        self.error = error
