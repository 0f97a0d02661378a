"""How many cycles are launched together."""

from __future__ import annotations

from fledge.engine.executors.output_reader import CALM_LAUNCHES, MAX_CYCLES, TOO_OFTEN, LaunchAhead


def test_one_at_a_time_while_the_host_keeps_up():
    pace = LaunchAhead()
    for _ in range(1000):
        pace.record(device_was_idle=False)
    assert pace.cycles == 1


def test_more_while_the_device_runs_out_of_work_and_fewer_again_afterwards():
    pace, seen = LaunchAhead(), []
    for _ in range(MAX_CYCLES * TOO_OFTEN):
        pace.record(device_was_idle=True)
        seen.append(pace.cycles)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, MAX_CYCLES)
    for _ in range(MAX_CYCLES * CALM_LAUNCHES):
        pace.record(device_was_idle=False)
    assert pace.cycles == 1


def test_a_rare_pause_changes_nothing():
    pace = LaunchAhead()
    for _ in range(10):
        pace.record(device_was_idle=True)
        for _ in range(CALM_LAUNCHES):
            pace.record(device_was_idle=False)
    assert pace.cycles == 1


def test_it_settles_where_the_host_just_keeps_up():
    """A host that needs two cycles' time for what it does besides launching."""
    pace, launches = LaunchAhead(), []
    for _ in range(1000):
        launches.append(pace.cycles)
        pace.record(device_was_idle=pace.cycles < 3)
    assert sum(launches[50:]) / len(launches[50:]) > 2.9


def test_other_work_on_the_device_is_not_taken_for_a_slow_host():
    """Learning runs between two launches: the device has finished everything at the second one, however fast the host is."""
    pace = LaunchAhead()
    for launch in range(20 * CALM_LAUNCHES):
        pace.skips_next = learns = launch % 16 == 0
        pace.record(device_was_idle=learns)
    assert pace.cycles == 1
