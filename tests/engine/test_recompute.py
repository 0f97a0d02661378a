"""Reading texts again for the sake of speculation, only where that pays."""

from __future__ import annotations

from fledge.engine.recompute import STEPS, RecomputePolicy
from fledge.speculation.acceptance import AcceptanceModel

OVER = RecomputePolicy(AcceptanceModel(3))  # 2.5 tokens a cycle are expected


def cheap(depth: int) -> float:
    return 1.0 + 0.1 * depth


def pays(seconds, remaining, pass_seconds, share=1.0, allowed=()) -> bool:
    return OVER.pays(seconds, share, allowed, remaining, pass_seconds)


def test_it_pays_if_enough_is_left_to_say():
    assert pays(cheap, [40], pass_seconds=1.0)
    assert not pays(cheap, [3], pass_seconds=1.0)
    assert pays(cheap, [3, 40], pass_seconds=1.0)  # the rest comes along
    assert not pays(cheap, [40], pass_seconds=50.0)
    assert not pays(cheap, [], pass_seconds=0.0)


def test_it_does_not_where_speculation_gains_little_or_nothing():
    assert not pays(lambda depth: 1.0 + 0.68 * depth, [1000], pass_seconds=0.0)
    assert not pays(lambda depth: 1.0 + 2.0 * depth, [1000], pass_seconds=0.0)


def test_company_that_is_not_drafted_for_and_shortened_requests_count():
    costs = {"seconds": lambda depth: 1.0 + 0.2 * depth, "remaining": [1000], "pass_seconds": 0.0}
    assert pays(**costs)
    assert not pays(**costs, share=0.1)
    assert pays(**costs, allowed=[3, 3])
    assert not pays(lambda depth: 1.0 + 0.6 * depth, [1000], 0.0, allowed=[1, 1])


def test_nothing_is_done_where_nothing_is_known_or_asked_for():
    assert not pays(lambda depth: None, [1000], pass_seconds=0.0)
    assert not pays(lambda depth: None if depth else 1.0, [1000], pass_seconds=0.0)  # of plain steps alone
    assert not RecomputePolicy(AcceptanceModel(0)).pays(cheap, 1.0, (), [1000], 0.0)
    assert not pays(cheap, [1000], pass_seconds=None)


def test_the_load_must_have_been_low_for_a_while():
    over = RecomputePolicy(AcceptanceModel(3))
    assert [over.is_due(True) for _ in range(STEPS)] == [False] * (STEPS - 1) + [True]
    assert not over.is_due(False)
    assert not over.is_due(True)
