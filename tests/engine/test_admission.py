"""Admission policies: new requests are held back and admitted together where that loses less time than single admissions."""

from __future__ import annotations

import pytest

from fledge.engine.admission import LONGEST_WAIT, ArrivalBatching, OfflineRefill


def group_sizes(rows: int, gap: float, pass_seconds: float, cycle: float = 0.001, seconds: float = 2.0) -> list[int]:
    """Sizes of the groups admitted in the second half of a run. A request arrives every `gap` seconds; the engine asks every
    `cycle` seconds."""
    gathering, groups, entered = ArrivalBatching(), [], 0
    for step in range(1, int(seconds / cycle)):
        now = 1.0 + step * cycle
        waiting = int(step * cycle / gap) - entered
        if waiting and not gathering.holds_back(waiting=waiting, running=rows, prefill_seconds=pass_seconds, now=now):
            groups.append(waiting)
            entered += waiting
            gathering.admitted(0, now)
    return groups[len(groups) // 2 :]


def test_with_few_running_rows_each_request_enters_at_once():
    assert set(group_sizes(rows=1, gap=0.05, pass_seconds=0.0015)) == {1}
    assert set(group_sizes(rows=4, gap=0.013, pass_seconds=0.0015)) == {1}


def test_with_many_running_rows_groups_have_the_best_size():
    found = group_sizes(rows=64, gap=0.002, pass_seconds=0.0015)
    assert sum(found) / len(found) == pytest.approx(9.3, abs=2)  # n (n + 1) = 2 * 64 * 1.5 / 2
    found = group_sizes(rows=16, gap=0.005, pass_seconds=0.0015)
    assert sum(found) / len(found) == pytest.approx(2.6, abs=1)


def test_the_wait_is_bounded_and_zero_if_waiting_gains_nothing():
    gathering = ArrivalBatching()
    asked = {"waiting": 1, "running": 500, "prefill_seconds": 1.0}
    assert gathering.holds_back(**asked, now=1.0)
    assert gathering.holds_back(**asked, now=1.0 + LONGEST_WAIT / 2)
    assert not gathering.holds_back(**asked, now=1.001 + LONGEST_WAIT)
    for nothing in ("prefill_seconds", "running", "waiting"):
        gathering = ArrivalBatching()
        gathering.holds_back(**asked, now=1.0)
        assert not gathering.holds_back(**(asked | {nothing: 0}), now=1.001)


def test_a_burst_is_admitted_once_arrivals_stop():
    """60 requests at once make the mean gap tiny; the longer time without an arrival since then must count instead."""
    gathering = ArrivalBatching()
    gathering.holds_back(waiting=1, running=0, prefill_seconds=0.0015, now=1.0)
    gathering.admitted(0, 1.0)
    for number in range(60):
        gathering.holds_back(waiting=number + 1, running=1, prefill_seconds=0.0015, now=1.0 + number * 1e-5)
    assert not gathering.holds_back(waiting=60, running=64, prefill_seconds=0.0015, now=1.002)


def test_the_wait_starts_anew_after_waiting_requests_were_cancelled():
    """The next request's wait is counted from its own arrival."""
    gathering = ArrivalBatching()
    asked = {"running": 500, "prefill_seconds": 1.0}
    assert gathering.holds_back(waiting=1, **asked, now=1.0)
    assert not gathering.holds_back(waiting=0, **asked, now=1.0 + LONGEST_WAIT / 2)
    assert gathering.holds_back(waiting=1, **asked, now=1.0 + 2 * LONGEST_WAIT)


def test_offline_refill_does_not_hold_back_the_last_prompts():
    asked = {"waiting": 1, "running": 2048, "prefill_seconds": 0.0, "now": 1.0}
    assert OfflineRefill().holds_back(**asked)
    assert not OfflineRefill().holds_back(**asked, are_last=True)
