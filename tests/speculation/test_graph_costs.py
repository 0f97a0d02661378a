"""The cost model of captured cycles: recorded replay times, corrected by measured launches."""

from __future__ import annotations

import pytest

from fledge.speculation.costs import GraphCosts

RECORDED = {(16, 0, 0): 5.0, (16, 4, 0): 6.0, (16, 5, 0): 6.5, (16, 4, 1): 7.0, (8, 4, 0): 3.0}


def test_before_any_launch_the_recorded_time_is_used():
    times = GraphCosts(RECORDED)
    assert times.seconds_of((16, 4, 0)) == 6.0
    assert times.seconds_of((99, 4, 0)) is None


def test_measured_times_also_correct_unmeasured_depths():
    times = GraphCosts(RECORDED)
    times.record((16, 4, 0), 9.0)
    assert times.seconds_of((16, 4, 0)) == 9.0
    assert times.seconds_of((16, 5, 0)) == pytest.approx(9.5)
    assert times.seconds_of((16, 0, 0)) == pytest.approx(8.0)
    assert times.seconds_of((16, 4, 1)) == 7.0, "another sampling mode is not corrected"
    assert times.seconds_of((8, 4, 0)) == 3.0, "another batch size is not corrected"
    times.record((16, 5, 0), 12.0)  # more than the estimate: a measured depth uses its own time
    assert times.seconds_of((16, 5, 0)) == 12.0
    assert times.seconds_of((16, 0, 0)) == pytest.approx(8.0, abs=0.01), "the smallest correction is used"


def test_corrections_change_slowly():
    times = GraphCosts(RECORDED)
    times.record((16, 4, 0), 9.0)
    times.record((16, 4, 0), 29.0)
    assert times.seconds_of((16, 4, 0)) == pytest.approx(10.0)
    for _ in range(200):
        times.record((16, 4, 0), 5.0)
    assert times.seconds_of((16, 4, 0)) == pytest.approx(5.0, abs=0.01)
    assert times.seconds_of((16, 0, 0)) == 5.0, "an unmeasured depth is never cheaper than recorded"


def test_old_corrections_approach_the_current_one():
    """A depth was measured with long contexts, and only short ones ran afterwards."""
    times = GraphCosts(RECORDED)
    times.record((16, 5, 0), 26.5)
    times.record((16, 4, 0), 7.0)
    assert times.seconds_of((16, 5, 0)) == pytest.approx(26.5, abs=0.1)
    for _ in range(5000):
        times.record((16, 4, 0), 7.0)
    assert times.seconds_of((16, 5, 0)) == pytest.approx(7.5, abs=0.2)


def test_a_shape_that_was_never_recorded_stays_unknown():
    times = GraphCosts({})
    times.record((4, 2, 0), 1.0)
    assert times.seconds_of((4, 2, 0)) is None
