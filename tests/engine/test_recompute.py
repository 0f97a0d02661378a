"""The recompute policy: texts are prefilled again for speculation only where that pays."""

from __future__ import annotations

from fledge.engine.recompute import STEPS, RecomputePolicy
from fledge.speculation.acceptance import AcceptanceModel

POLICY = RecomputePolicy(AcceptanceModel(3))  # expects 2.5 tokens per cycle


def cheap(depth: int) -> float:
    return 1.0 + 0.1 * depth


def pays(seconds, remaining, pass_seconds, share=1.0, allowed=()) -> bool:
    return POLICY.pays(seconds, share, allowed, remaining, pass_seconds)


def test_it_pays_if_enough_tokens_remain():
    assert pays(cheap, [40], pass_seconds=1.0)
    assert not pays(cheap, [3], pass_seconds=1.0)
    assert pays(cheap, [3, 40], pass_seconds=1.0)  # the short request is recomputed with the long one
    assert not pays(cheap, [40], pass_seconds=50.0)
    assert not pays(cheap, [], pass_seconds=0.0)


def test_it_does_not_pay_if_speculation_gains_little():
    assert not pays(lambda depth: 1.0 + 0.68 * depth, [1000], pass_seconds=0.0)
    assert not pays(lambda depth: 1.0 + 2.0 * depth, [1000], pass_seconds=0.0)


def test_undrafted_and_shortened_requests_reduce_the_gain():
    costs = {"seconds": lambda depth: 1.0 + 0.2 * depth, "remaining": [1000], "pass_seconds": 0.0}
    assert pays(**costs)
    assert not pays(**costs, share=0.1)
    assert pays(**costs, allowed=[3, 3])
    assert not pays(lambda depth: 1.0 + 0.6 * depth, [1000], 0.0, allowed=[1, 1])


def test_it_does_not_pay_if_times_are_unknown_or_speculation_is_off():
    assert not pays(lambda depth: None, [1000], pass_seconds=0.0)
    assert not pays(lambda depth: None if depth else 1.0, [1000], pass_seconds=0.0)  # only plain steps were measured
    assert not RecomputePolicy(AcceptanceModel(0)).pays(cheap, 1.0, (), [1000], 0.0)
    assert not pays(cheap, [1000], pass_seconds=None)


def test_the_load_must_have_been_low_for_a_while():
    policy = RecomputePolicy(AcceptanceModel(3))
    assert [policy.is_due(True) for _ in range(STEPS)] == [False] * (STEPS - 1) + [True]
    assert not policy.is_due(False)
    assert not policy.is_due(True)
