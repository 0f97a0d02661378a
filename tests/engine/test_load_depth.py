"""Depth by load."""

from __future__ import annotations

from fledge.engine.load_depth import LoadDepth


def costs(step: float, each: float):
    return lambda depth: step + each * depth


def test_cheap_verification_drafts_deep_and_dear_verification_not_at_all():
    depths = LoadDepth(5)
    assert depths.choose(1.0, costs(1.0, 0.05)) == 5
    assert depths.choose(1.0, costs(1.0, 0.4)) == 2
    assert depths.choose(1.0, costs(1.0, 0.6)) == 1
    assert depths.choose(1.0, costs(1.0, 0.9)) == 0


def test_acceptance_moves_the_choice():
    good, bad = LoadDepth(5), LoadDepth(5)
    for _ in range(2000):
        good.saw(5, 5)
        bad.saw(5, 0)
    cost = costs(1.0, 0.3)
    assert good.choose(1.0, cost) == 5
    assert bad.choose(1.0, cost) == 0
    assert good.tokens(5) > 5
    assert bad.tokens(5) < 1.2
    for _ in range(5000):
        bad.saw(3, 3)
    assert bad.choose(1.0, cost) == 3


def test_requests_that_cannot_be_drafted_for_count_against_it():
    depths = LoadDepth(3)
    assert depths.choose(1.0, costs(1.0, 0.3)) > 0
    assert depths.choose(0.1, costs(1.0, 0.3)) == 0
    assert depths.choose(0.0, costs(1.0, 0.0)) == 0


def test_without_a_table_the_limit_holds_and_without_a_drafter_there_is_none():
    assert LoadDepth(4).choose(1.0, lambda depth: None) == 4
    assert LoadDepth(0).choose(1.0, lambda depth: 1.0) == 0


def test_what_many_rows_saw_counts_as_often():
    one, many = LoadDepth(3), LoadDepth(3)
    for _ in range(5):
        one.saw(3, 1)
    many.saw(3, 1, times=5)
    assert abs(one.tokens(3) - many.tokens(3)) < 0.01
