"""When a shape is tried on cuBLAS and whether the host waits for the result. `test_linear` compares the bits."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.linear import cublas
from fledge.kernels.linear.summation import Summation

WEIGHT, ORDER = torch.zeros(64, 64), Summation(1, False, 64)


class Event:
    """A CUDA event that completes when it is waited for, or when a test sets `has_passed`."""

    def __init__(self) -> None:
        self.has_passed, self.waits = False, 0

    def query(self) -> bool:
        return self.has_passed

    def synchronize(self) -> None:
        self.waits += not self.has_passed
        self.has_passed = True


@pytest.fixture
def started(monkeypatch) -> list[Event]:
    """The events of the trials that were started; all trials find the same bits."""
    events: list[Event] = []

    def start(*_: object) -> cublas._Trial:
        events.append(Event())
        return cublas._Trial(torch.tensor([True]), events[-1])

    monkeypatch.setattr(cublas, "_trials", {})
    monkeypatch.setattr(cublas, "_start_trial", start)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return events


def is_exact(rows: int) -> bool:
    return cublas.cublas_is_exact(rows, WEIGHT, ORDER, None)


def test_a_shape_is_tried_once_and_waited_for(started):
    assert is_exact(128)
    assert is_exact(128)
    assert [event.waits for event in started] == [1]


def test_in_the_background_nothing_waits(started):
    with cublas.background_trials():
        assert not is_exact(128)
        assert not is_exact(128)
        started[0].has_passed = True
        assert is_exact(128)
    assert [event.waits for event in started] == [0]


def test_a_call_outside_the_background_waits_for_a_running_trial(started):
    with cublas.background_trials():
        assert not is_exact(128)
    assert is_exact(128)
    assert [event.waits for event in started] == [1]


def test_nothing_is_tried_while_a_graph_is_captured(started, monkeypatch):
    assert is_exact(128)
    with cublas.background_trials():
        assert not is_exact(256)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert is_exact(128)
    assert not is_exact(256)
    assert not is_exact(512)
    assert [event.waits for event in started] == [1, 0]
