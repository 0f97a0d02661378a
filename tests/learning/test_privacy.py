"""What is kept of requests goes when it reaches the longest age, when learning stops, and at once if it is not learnt from."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from fledge.learning.hook import Learning
from fledge.learning.samples import Sample
from tests.learning.conftest import GREEDY, serve, toy_prompts

AGE = 600.0


def kept(hook: Learning) -> list[Sample]:
    return [one for samples in hook.ring.by_client.values() for one in samples] + hook.ring.held_out


def served_with_beginnings(engine) -> Learning:
    """Requests with a cached beginning, one known, one not; and a batch that training has begun with."""
    prompts = toy_prompts(12, seed=21)
    serve(engine, prompts)
    hook = engine.hook
    while not hook.learner.at_work:
        assert engine.idle()
    now = hook.target.clock()
    hook.target.unknown |= {(3,) * 16: now, (4,) * 16: now}
    hook.target.read([([3] * 20, 18)])
    assert len(hook.target.prefixes) == len(hook.target.unknown) == 1
    return hook


@pytest.fixture
def later(monkeypatch):
    def pass_seconds(hook: Learning, seconds: float) -> None:
        monkeypatch.setattr(hook.ring, "clock", lambda: time.monotonic() + seconds)

    return pass_seconds


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "one long request"])
def test_nothing_stays_past_the_longest_age(learning_engine, drafter, later, is_idle):
    engine = learning_engine(drafter, max_age=AGE, min_held_out=1000)
    hook = served_with_beginnings(engine)
    samples = [weakref.ref(one) for one in kept(hook)]
    assert 0 < hook.due_in() <= AGE
    later(hook, AGE / 2)
    engine.idle()
    assert len(kept(hook)) == len(samples)
    later(hook, AGE)
    assert hook.due_in() == 0
    if is_idle:
        engine.idle()
    else:
        engine.add_request(toy_prompts(1, seed=22)[0], GREEDY)
        engine.step()
    assert not kept(hook)
    assert not hook.target.prefixes
    assert not hook.target.unknown
    assert hook.due_in() is None
    gc.collect()
    assert not any(one() for one in samples)  # training holds none of them either


def test_a_beginning_that_is_asked_for_again_is_as_young_as_that_request(learning_engine):
    target = learning_engine(budget=1e-6).hook.target
    now = [0.0]
    target.clock = lambda: now[0]
    tokens = [3, *range(4, 30)]
    text = target.read([(tokens, 20)])[0]
    states = [layer[16:] for layer in (*text.taps, text.hidden_TD)]
    assert target.collected(tokens, 20, 16, states) is None
    now[0] = 5.0
    target.read([(tokens, 20)])  # an old sample that has it makes it no younger
    assert target.oldest == 0.0
    assert target.collected(tokens, 20, 16, states) is not None
    target.forget_until(4.0)
    assert target.oldest == 5.0
    target.forget_until(5.0)
    assert not target.prefixes


def test_when_learning_stops_nothing_is_left(learning_engine, drafter):
    engine = learning_engine(drafter)
    hook = served_with_beginnings(engine)
    samples = [weakref.ref(one) for one in kept(hook)]
    hook._stop("a test")
    gc.collect()
    assert not any(one() for one in samples)
    assert not hook.target.prefixes
    assert not hook.target.unknown
    assert hook.due_in() is None
    serve(engine, toy_prompts(4, seed=23))
    assert not kept(hook)


@pytest.mark.parametrize("stops", [False, True])
def test_a_captured_executor_keeps_no_states_that_are_not_taken(learning_engine, drafter, stops):
    engine = learning_engine(drafter, capture=False, samples_per_second=1e-9)
    serve(engine, toy_prompts(3, seed=24))
    states = engine.executor.batch.states
    assert engine.hook.counts["skipped"] == 3
    assert not states.slot_of
    if stops:
        engine.add_request(toy_prompts(1, seed=25)[0], GREEDY)
        engine.step()
        assert states.slot_of
        engine.hook._stop("a test")
        serve(engine, [])
        assert not states.slot_of
        assert not any(layer[:-1].any() for layer in states.layers)  # the last place is of rows that are not kept
