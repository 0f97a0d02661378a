"""Newcomers wait for each other where that gives the rows more than it takes."""

from __future__ import annotations

import pytest

from fledge.engine.admission import LONGEST_WAIT, ArrivalBatching, OfflineRefill


def sizes_of_groups(rows: int, gap: float, pass_seconds: float, cycle: float = 0.001, seconds: float = 2.0) -> list[int]:
    """One comes every `gap`; the engine asks every `cycle`."""
    gathering, groups, entered = ArrivalBatching(), [], 0
    for step in range(1, int(seconds / cycle)):
        now = 1.0 + step * cycle
        waiting = int(step * cycle / gap) - entered
        if waiting and not gathering.holds_back(waiting=waiting, running=rows, prefill_seconds=pass_seconds, now=now):
            groups.append(waiting)
            entered += waiting
            gathering.admitted(0, now)
    return groups[len(groups) // 2 :]


def test_few_rows_are_not_worth_waiting_for():
    assert set(sizes_of_groups(rows=1, gap=0.05, pass_seconds=0.0015)) == {1}
    assert set(sizes_of_groups(rows=4, gap=0.013, pass_seconds=0.0015)) == {1}


def test_with_many_rows_as_many_enter_together_as_lose_least():
    found = sizes_of_groups(rows=64, gap=0.002, pass_seconds=0.0015)
    assert sum(found) / len(found) == pytest.approx(9.3, abs=2)  # n (n + 1) = 2 * 64 * 1.5 / 2
    found = sizes_of_groups(rows=16, gap=0.005, pass_seconds=0.0015)
    assert sum(found) / len(found) == pytest.approx(2.6, abs=1)


def test_nobody_waits_for_long_nor_where_a_pass_costs_nothing():
    gathering = ArrivalBatching()
    asked = {"waiting": 1, "running": 500, "prefill_seconds": 1.0}
    assert gathering.holds_back(**asked, now=1.0)
    assert gathering.holds_back(**asked, now=1.0 + LONGEST_WAIT / 2)
    assert not gathering.holds_back(**asked, now=1.001 + LONGEST_WAIT)
    for nothing in ("prefill_seconds", "running", "waiting"):
        gathering = ArrivalBatching()
        gathering.holds_back(**asked, now=1.0)
        assert not gathering.holds_back(**(asked | {nothing: 0}), now=1.001)


def test_after_a_burst_the_rest_is_not_waited_for():
    """Sixty at once make the mean gap tiny; that none has come since counts more."""
    gathering = ArrivalBatching()
    gathering.holds_back(waiting=1, running=0, prefill_seconds=0.0015, now=1.0)
    gathering.admitted(0, 1.0)
    for number in range(60):
        gathering.holds_back(waiting=number + 1, running=1, prefill_seconds=0.0015, now=1.0 + number * 1e-5)
    assert not gathering.holds_back(waiting=60, running=64, prefill_seconds=0.0015, now=1.002)


def test_who_waited_and_went_away_is_not_counted_as_waiting():
    """The next one to come begins to wait when it comes."""
    gathering = ArrivalBatching()
    asked = {"running": 500, "prefill_seconds": 1.0}
    assert gathering.holds_back(waiting=1, **asked, now=1.0)
    assert not gathering.holds_back(waiting=0, **asked, now=1.0 + LONGEST_WAIT / 2)
    assert gathering.holds_back(waiting=1, **asked, now=1.0 + 2 * LONGEST_WAIT)


def test_the_last_prompts_of_a_set_do_not_wait_for_more():
    asked = {"waiting": 1, "running": 2048, "prefill_seconds": 0.0, "now": 1.0}
    assert OfflineRefill().holds_back(**asked)
    assert not OfflineRefill().holds_back(**asked, are_last=True)
