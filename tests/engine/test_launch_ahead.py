"""Launch-ahead: how many cycles are launched together."""

from __future__ import annotations

from fledge.engine.executors.output_reader import CALM_LAUNCHES, MAX_CYCLES, TOO_OFTEN, LaunchAhead


def test_one_cycle_at_a_time_while_the_host_keeps_up():
    ahead = LaunchAhead()
    for _ in range(1000):
        ahead.record(device_was_idle=False)
    assert ahead.cycles == 1


def test_more_cycles_while_the_device_runs_idle_and_fewer_afterwards():
    ahead, seen = LaunchAhead(), []
    for _ in range(MAX_CYCLES * TOO_OFTEN):
        ahead.record(device_was_idle=True)
        seen.append(ahead.cycles)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, MAX_CYCLES)
    for _ in range(MAX_CYCLES * CALM_LAUNCHES):
        ahead.record(device_was_idle=False)
    assert ahead.cycles == 1


def test_a_rare_idle_device_changes_nothing():
    ahead = LaunchAhead()
    for _ in range(10):
        ahead.record(device_was_idle=True)
        for _ in range(CALM_LAUNCHES):
            ahead.record(device_was_idle=False)
    assert ahead.cycles == 1


def test_the_number_settles_where_the_host_keeps_up():
    """A simulated host whose other work takes the time of two cycles."""
    ahead, launches = LaunchAhead(), []
    for _ in range(1000):
        launches.append(ahead.cycles)
        ahead.record(device_was_idle=ahead.cycles < 3)
    assert sum(launches[50:]) / len(launches[50:]) > 2.9


def test_other_work_on_the_device_does_not_count_as_a_slow_host():
    """Learning runs between two launches, so the device is always idle at the second one, however fast the host is."""
    ahead = LaunchAhead()
    for launch in range(20 * CALM_LAUNCHES):
        ahead.skips_next = learning = launch % 16 == 0
        ahead.record(device_was_idle=learning)
    assert ahead.cycles == 1
