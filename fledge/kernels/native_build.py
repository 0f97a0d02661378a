"""Compiles the C sources in `cpu/` for this machine on first use, with any C compiler that is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from fledge.errors import UserError
from fledge.sources import cache_folder

SOURCES = Path(__file__).with_name("cpu")
# Compiling and linking are separate: linking with -ffast-math would turn off denormals for the whole process.
# The option for this machine's processor differs on ARM with Clang; GCC accepts both there.
PROCESSOR = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
COMPILE = ("-std=gnu11", "-O3", PROCESSOR, "-ffast-math", "-fPIC", "-c")
LIBRARIES = ("-lm", "-lpthread")
FLAGS_VARIABLE = "FLEDGE_NATIVE_FLAGS"  # additional flags for both steps, used by `make test-sanitize`


def compiler() -> list[str] | None:
    """The command of the C compiler: $CC, the system's, or the one in a Python package (`pip install ziglang`)."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return name.split()
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return None


def built(command: list[str]) -> Path:
    """Returns the shared library's path, compiling it if it is not cached for these sources, compiler and processor."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    texts = [path.read_text() for path in sorted(SOURCES.iterdir()) if path.suffix in (".c", ".h")]
    more = os.environ.get(FLAGS_VARIABLE, "").split()
    key = hashlib.sha256("\0".join([*texts, version, _processor(), *COMPILE, *LIBRARIES, *more]).encode()).hexdigest()[:16]
    target = cache_folder() / "native" / f"fledge-{key}.so"
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(target.parent):
        if target.parent.lstat().st_uid != os.getuid():
            raise UserError(
                f"{target.parent}: belongs to another user, so libraries in it are not loaded; set FLEDGE_CACHE to a folder of "
                "your own"
            )
        # Other users could write to this folder until now, so its library is built again.
        target.parent.chmod(0o700)
        target.unlink(missing_ok=True)
    if not target.exists() or not _is_ours(target):
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            compiled, linked = Path(folder) / "library.o", Path(folder) / "library.so"
            for arguments in (
                [*COMPILE, *more, SOURCES / "library.c", "-o", compiled],
                ["-shared", *more, compiled, "-o", linked, *LIBRARIES],
            ):
                subprocess.run([*command, *map(str, arguments)], capture_output=True, timeout=300, check=True)
            linked.chmod(0o755)
            os.replace(linked, target)
    return target


def _is_ours(path: Path) -> bool:
    """Whether no other user can change the file or folder: a library's code runs in this process."""
    status = path.lstat()
    return status.st_uid in (os.getuid(), 0) and not status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode)


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else [platform.machine(), platform.processor()]
    return next((line for line in lines if line.startswith(("flags", "Features"))), "".join(lines[:2]))
