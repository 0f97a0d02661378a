"""How many cycles are launched together."""

from __future__ import annotations

from fledge.engine.pace import MOST_TOGETHER, QUIET_LAUNCHES, TOO_OFTEN, Pace


def test_one_at_a_time_while_the_host_keeps_up():
    pace = Pace()
    for _ in range(1000):
        pace.saw(False)
    assert pace.cycles == 1


def test_more_while_the_device_runs_out_of_work_and_fewer_again_afterwards():
    pace, seen = Pace(), []
    for _ in range(MOST_TOGETHER * TOO_OFTEN):
        pace.saw(True)
        seen.append(pace.cycles)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, MOST_TOGETHER)
    for _ in range(MOST_TOGETHER * QUIET_LAUNCHES):
        pace.saw(False)
    assert pace.cycles == 1


def test_a_rare_pause_changes_nothing():
    pace = Pace()
    for _ in range(10):
        pace.saw(True)
        for _ in range(QUIET_LAUNCHES):
            pace.saw(False)
    assert pace.cycles == 1


def test_it_settles_where_the_host_just_keeps_up():
    """A host that needs two cycles' time for what it does besides launching."""
    pace, launches = Pace(), []
    for _ in range(1000):
        launches.append(pace.cycles)
        pace.saw(pace.cycles < 3)
    assert sum(launches[50:]) / len(launches[50:]) > 2.9
