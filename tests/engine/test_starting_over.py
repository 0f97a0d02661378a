"""Reading texts again for the sake of speculation, only where that pays."""

from __future__ import annotations

from fledge.engine.load_depth import LoadDepth
from fledge.engine.starting_over import pays

LOAD = LoadDepth(3)  # 2.5 tokens a cycle are expected


def cheap(depth: int) -> float:
    return 1.0 + 0.1 * depth


def test_it_pays_if_enough_is_left_to_say():
    assert pays(LOAD, cheap, [40], pass_seconds=1.0)
    assert not pays(LOAD, cheap, [3], pass_seconds=1.0)
    assert pays(LOAD, cheap, [3, 40], pass_seconds=1.0)  # the rest comes along
    assert not pays(LOAD, cheap, [40], pass_seconds=50.0)
    assert not pays(LOAD, cheap, [], pass_seconds=0.0)


def test_it_does_not_where_speculation_gains_little_or_nothing():
    assert not pays(LOAD, lambda depth: 1.0 + 0.68 * depth, [1000], pass_seconds=0.0)
    assert not pays(LOAD, lambda depth: 1.0 + 2.0 * depth, [1000], pass_seconds=0.0)


def test_nothing_is_done_where_nothing_is_known_or_asked_for():
    assert not pays(LOAD, lambda depth: None, [1000], pass_seconds=0.0)
    assert not pays(LoadDepth(0), cheap, [1000], pass_seconds=0.0)
