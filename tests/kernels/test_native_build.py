"""A C source that no longer compiles must not pass unseen: everything would still run, slowly, and its tests be left out."""

from __future__ import annotations

import os
import platform

import pytest

from fledge.engine.config import EngineConfig
from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.native_build import _processor, built, compiler
from tests.tiny import tiny_decoder


def is_wanted() -> bool:
    """There is a compiler, and a processor that the kernels are meant for (`cpu/lanes.h` refuses others)."""
    if compiler() is None or os.environ.get("FLEDGE_NATIVE") == "0":
        return False
    return platform.machine() != "x86_64" or {"avx2", "f16c"} <= set(_processor().split())


def test_the_kernels_compile_where_they_are_wanted():
    assert (native.library() is not None) == is_wanted()
    if is_wanted():
        assert built(compiler()).is_file()  # a compiler's complaint is shown here


def test_without_the_kernels_quantised_weights_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("FLEDGE_NATIVE", "0")
    native.library.cache_clear()
    try:
        with pytest.raises(UserError, match="--quantization int4 on CPU needs a C compiler"):
            EngineConfig(device="cpu", quantization="int4").resolve(tiny_decoder().config)
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
