"""What captured cycles take, as far as is known."""

from __future__ import annotations

import pytest

from fledge.speculation.costs import GraphCosts

RECORDED = {(16, 0, 0): 5.0, (16, 4, 0): 6.0, (16, 5, 0): 6.5, (16, 4, 1): 7.0, (8, 4, 0): 3.0}


def test_before_anything_is_seen_it_is_as_recorded():
    times = GraphCosts(RECORDED)
    assert times.seconds_of((16, 4, 0)) == 6.0
    assert times.seconds_of((99, 4, 0)) is None


def test_what_is_seen_counts_and_stretches_what_is_not():
    times = GraphCosts(RECORDED)
    times.record((16, 4, 0), 9.0)
    assert times.seconds_of((16, 4, 0)) == 9.0
    assert times.seconds_of((16, 5, 0)) == pytest.approx(9.5)
    assert times.seconds_of((16, 0, 0)) == pytest.approx(8.0)
    assert times.seconds_of((16, 4, 1)) == 7.0, "another way of choosing"
    assert times.seconds_of((8, 4, 0)) == 3.0, "another size"
    times.record((16, 5, 0), 12.0)  # more than the others let expect: it was tried, and is known now
    assert times.seconds_of((16, 5, 0)) == 12.0
    assert times.seconds_of((16, 0, 0)) == pytest.approx(8.0, abs=0.01), "the least stretched counts"


def test_what_is_seen_follows_slowly():
    times = GraphCosts(RECORDED)
    times.record((16, 4, 0), 9.0)
    times.record((16, 4, 0), 29.0)
    assert times.seconds_of((16, 4, 0)) == pytest.approx(10.0)
    for _ in range(200):
        times.record((16, 4, 0), 5.0)
    assert times.seconds_of((16, 4, 0)) == pytest.approx(5.0, abs=0.01)
    assert times.seconds_of((16, 0, 0)) == 5.0, "not less than recorded, where it was not seen itself"


def test_what_was_seen_long_ago_becomes_as_stretched_as_what_is_seen_now():
    """Seen with long contexts; short ones came since."""
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
