"""A mask that exceeds its limit is abandoned, and the next one runs in a new thread."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from fledge.serving.mask_thread import MaskThread, MaskTimeout


def busy(seconds: float) -> str:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
    return threading.current_thread().name


def wait_until_none(threads: MaskThread) -> None:
    deadline = time.monotonic() + 60
    while threads.num_timed_out():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_results_and_errors_are_returned() -> None:
    threads = MaskThread()
    assert [threads.run(lambda number=number: number * 2, 1.0, "a") for number in range(100)] == [2 * n for n in range(100)]
    assert threads.run(lambda: busy(0.02), 10.0, "a") == "mask"
    with pytest.raises(ZeroDivisionError):
        threads.run(lambda: 1 / 0, 1.0, "a")
    assert threads.run(lambda: "again", 1.0, "a") == "again"
    threads.close()


def test_work_beyond_the_limit_times_out() -> None:
    threads, is_over = MaskThread(), threading.Event()

    def endless() -> None:
        busy(0.05)
        is_over.wait()

    with pytest.raises(MaskTimeout):
        threads.run(endless, 0.02, "a")
    assert (threads.num_timed_out("a"), threads.num_timed_out("b"), threads.num_timed_out()) == (1, 0, 1)
    assert threads.run(lambda: "next", 1.0, "a") == "next"
    is_over.set()
    wait_until_none(threads)
    threads.close()


def test_waiting_does_not_count_towards_the_limit() -> None:
    """The limit is on CPU seconds: a thread that sleeps for ten times the limit does not exceed it."""
    threads = MaskThread()
    assert threads.run(lambda: time.sleep(0.2) or "slept", 0.02, "a") == "slept"
    threads.close()


def test_work_that_ends_at_its_limit_leaves_no_thread() -> None:
    threads = MaskThread()
    for number in range(50):
        with contextlib.suppress(MaskTimeout):
            threads.run(lambda: busy(0.005), 0.0049, f"caller {number}")
    wait_until_none(threads)
    threads.close()
