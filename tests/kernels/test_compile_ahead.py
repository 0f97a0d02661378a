"""Compiling kernels in forked processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from fledge.kernels import compile_ahead
from fledge.kernels.gate import apply_gate


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_every_task_runs_in_another_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    here = os.getpid()
    tasks = [lambda number=number: (tmp_path / f"{number}-{os.getpid() != here}").touch() for number in range(10)]
    compile_ahead.in_processes(tasks)
    assert written(tmp_path) == sorted(f"{number}-True" for number in range(10))


def test_a_task_that_fails_or_hangs_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(3))
    tasks = [lambda: 1 / 0, (tmp_path / "done").touch, lambda: time.sleep(60)]
    began = time.monotonic()
    compile_ahead.in_processes(tasks, max_seconds=3)  # enough for a fork to start even on a busy machine
    assert time.monotonic() - began < 45
    assert written(tmp_path) == ["done"]


def test_without_triton_nothing_is_traced(monkeypatch):
    monkeypatch.setattr(compile_ahead, "JITFunction", None)
    with compile_ahead.side_by_side():
        assert not compile_ahead.is_tracing()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_traced_kernels_are_compiled_and_not_launched():
    x = torch.randn(3, 2 * 1000, device="cuda", dtype=torch.bfloat16)
    wanted = apply_gate(x)
    free = torch.empty_like(wanted).fill_(7.0)
    del free  # the next tensor of this size gets its memory
    with compile_ahead.side_by_side():
        assert compile_ahead.is_tracing()
        found = apply_gate(x)
    assert torch.equal(found, torch.full_like(wanted, 7.0))
    assert torch.equal(apply_gate(x), wanted)
