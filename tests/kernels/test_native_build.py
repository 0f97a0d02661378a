"""The compiled library is executed, so it is only loaded from files that no other user could have written."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.kernels import native, native_build
from tests.tiny import tiny_decoder

FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && { echo fake; exit; }
while [ "$1" != -o ]; do shift; done
echo built > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    program = tmp_path / "cc"
    program.write_text(FAKE_COMPILER)
    program.chmod(0o755)
    return [str(program)]


def test_a_library_is_reused(compiler: list[str]) -> None:
    library = native_build.built(compiler)
    assert library.read_text() == "built\n"
    library.write_text("as it was")
    assert native_build.built(compiler).read_text() == "as it was"
    assert not library.stat().st_mode & 0o022


@pytest.mark.parametrize("writable", ["library", "folder", "link"])
def test_a_library_that_others_could_write_is_rebuilt(compiler: list[str], writable: str, tmp_path: Path) -> None:
    library = native_build.built(compiler)
    library.write_text("planted")
    if writable == "link":
        library.rename(tmp_path / "planted.so")
        library.symlink_to(tmp_path / "planted.so")
    else:
        (library if writable == "library" else library.parent).chmod(0o777)
    assert native_build.built(compiler).read_text() == "built\n"
    assert not library.is_symlink()
    assert not library.parent.stat().st_mode & 0o022


def test_another_users_cache_folder_is_refused(compiler: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    native_build.built(compiler).parent.chmod(0o755)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    lstat = Path.lstat
    other_owner = lambda path: os.stat_result((*lstat(path)[:4], 999, *lstat(path)[5:]))  # noqa: E731
    monkeypatch.setattr(Path, "lstat", other_owner)
    with pytest.raises(UserError, match="FLEDGE_CACHE"):
        native_build.built(compiler)


# A C source that does not compile must fail a test: otherwise everything would still run, slowly, and its tests be skipped.


def is_wanted() -> bool:
    """Whether there is a compiler and a processor that the kernels support (`cpu/lanes.h` refuses others)."""
    if native_build.compiler() is None or os.environ.get("FLEDGE_NATIVE") == "0":
        return False
    return platform.machine() != "x86_64" or {"avx2", "f16c"} <= set(native_build._processor().split())


def test_the_kernels_compile_on_supported_machines():
    assert (native.library() is not None) == is_wanted()
    if is_wanted():
        assert native_build.built(native_build.compiler()).is_file()  # shows the compiler's error message


def test_without_the_kernels_quantised_weights_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("FLEDGE_NATIVE", "0")
    native.library.cache_clear()
    try:
        with pytest.raises(UserError, match="--quantization int4 on CPU needs a C compiler"):
            EngineConfig(device="cpu", quantization="int4").resolve(tiny_decoder().config)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()


def test_a_missing_compiler_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("FLEDGE_NATIVE", raising=False)
    monkeypatch.setattr(native, "compiler", lambda: None)
    native.library.cache_clear()
    try:
        assert native.library() is native.library() is None
    finally:
        native.library.cache_clear()
    (record,) = [record for record in caplog.records if "no C compiler" in record.message]
    assert "pip install ziglang" in record.message
