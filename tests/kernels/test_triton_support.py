"""Kernels of this package, and no others, are asked for one split of a multiprocessor's memory."""

from __future__ import annotations

from fledge.kernels import triton_support
from fledge.kernels.linear import register_mma


def test_only_kernels_of_this_package_are_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(triton_support, "_loaded", [])
    monkeypatch.setattr(triton_support, "SHARED_MEMORY", None)
    monkeypatch.setattr(triton_support, "_ask_for", lambda handle, percent: asked.append((handle, percent)))
    mine = register_mma._register_mma
    name = getattr(mine, "__name__", None) or mine.fn.__name__
    triton_support._was_loaded(None, 1, name, (), "hash")
    triton_support._was_loaded(None, 2, "somebody_else's", (), "hash")
    assert asked == [], "nobody asked for anything yet"
    triton_support.share_memory(50)
    triton_support._was_loaded(None, 3, name, (), "hash")
    assert asked == [(1, 50), (3, 50)]
