"""Kept request data is deleted at its maximum age, when learning stops, and at once if it is not learnt from."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable

import pytest

from fledge.learning.hook import Learning
from fledge.learning.samples import Sample, is_held_out
from tests.learning.conftest import GREEDY, serve, toy_prompts

AGE = 600.0


def serve_with_cached_prefixes(engine) -> Learning:
    """Serves requests until training has begun a batch; the target has one known and one unknown cached prefix."""
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
        now = time.monotonic() + seconds
        monkeypatch.setattr(hook.ring, "clock", lambda: now)

    return pass_seconds


@pytest.mark.parametrize("is_idle", [True, False], ids=["idle", "one long request"])
def test_nothing_is_kept_past_maximum_age(learning_engine, drafter, later, is_idle):
    engine = learning_engine(drafter, max_age=AGE, steps_per_candidate=1000)
    hook = serve_with_cached_prefixes(engine)
    samples = [weakref.ref(one) for one in hook.ring.kept]
    assert 0 < hook.due_in() <= AGE
    later(hook, AGE / 2)
    engine.idle()
    assert len(hook.ring.kept) == len(samples)
    later(hook, AGE)
    assert hook.due_in() == 0
    if is_idle:
        engine.idle()
    else:
        engine.add_request(toy_prompts(1, seed=22)[0], GREEDY)
        engine.step()
    assert not hook.ring.kept
    assert not hook.target.prefixes
    assert not hook.target.unknown
    assert hook.due_in() is None
    gc.collect()
    assert not any(one() for one in samples)  # training has no references to them either


def admitted(hook: Learning, prompt: list[int], *, held_out: bool = False) -> weakref.ref[Sample]:
    """Admits a sample with an answer of 20 tokens. The last prompt token is chosen so that it is held out, or not."""
    last = next(token for token in range(3, 100) if is_held_out([*prompt, token]) == held_out)
    sample = Sample([*prompt, last, *range(3, 23)], len(prompt) + 1)
    assert hook.ring.admit(sample)
    return weakref.ref(sample)


def test_training_holds_only_samples_in_use(learning_engine, drafter):
    engine = learning_engine(drafter, max_age=AGE, steps_per_candidate=3, min_held_out=1, budget=1e-6)
    hook, learner = engine.hook, engine.hook.learner

    def work_until(is_done: Callable[[], bool]) -> None:
        while not is_done():
            hook._has_work = True
            engine.idle()

    first = admitted(hook, [5] * 12)  # without states: they are computed later
    work_until(lambda: learner.counts.steps == 1)
    hook.ring.forget_all()  # as when newer samples displace it
    second = admitted(hook, [6] * 12)
    list(learner._read_missing([second()]))
    work_until(lambda: learner.at_work == [second()])  # the first sample was drawn again before
    assert learner.counts.steps == 2
    assert first() is None
    work_until(lambda: learner.counts.steps == 3)
    assert not learner.at_work  # the gate has no held-out texts yet
    hook.ring.forget_all()
    assert second() is None
    third = admitted(hook, [7] * 12, held_out=True)
    work_until(lambda: bool(learner.counts.candidates))
    work_until(lambda: learner.at_work == [third()])
    hook.ring.forget_all()
    work_until(lambda: learner.counts.refused + learner.counts.accepted == 1)
    hook._has_work = True
    assert not engine.idle()  # no sample to draw
    assert not learner.at_work
    assert third() is None
    assert hook.due_in() is None


def test_sample_outside_the_ring_expires_too(learning_engine, drafter, later):
    engine = learning_engine(drafter, max_age=AGE, budget=1e-6)
    hook, learner = engine.hook, engine.hook.learner
    sample = admitted(hook, [5] * 12)
    while not learner.at_work:
        engine.idle()
    hook.ring.forget_all()
    arrival = sample().arrival
    assert AGE - 60 < hook.due_in() <= AGE
    later(hook, AGE)
    assert hook.ring.clock() >= arrival + AGE
    assert hook.due_in() == 0
    hook._has_work = False
    engine.idle()
    assert not learner.at_work
    assert sample() is None
    assert hook.due_in() is None


def test_requested_prefix_gets_the_requests_age(learning_engine):
    target = learning_engine(budget=1e-6).hook.target
    now = [0.0]
    target.clock = lambda: now[0]
    tokens = [3, *range(4, 30)]
    text = target.read([(tokens, 20)])[0]
    states = [layer[16:] for layer in (*text.taps, text.hidden_TD)]
    assert target.collected(tokens, 20, 16, states, 256) is None
    now[0] = 5.0
    target.read([(tokens, 20)])  # reading an old sample with this prefix does not renew it
    assert target.oldest == 0.0
    assert target.collected(tokens, 20, 16, states, 256) is not None
    target.forget_until(4.0)
    assert target.oldest == 5.0
    target.forget_until(5.0)
    assert not target.prefixes


def test_stopping_learning_deletes_everything(learning_engine, drafter):
    engine = learning_engine(drafter, steps_per_candidate=1000)
    hook = serve_with_cached_prefixes(engine)
    samples = [weakref.ref(one) for one in hook.ring.kept]
    hook._stop("a test")
    gc.collect()
    assert not any(one() for one in samples)
    assert not hook.target.prefixes
    assert not hook.target.unknown
    assert hook.due_in() is None
    serve(engine, toy_prompts(4, seed=23))
    assert not hook.ring.kept


@pytest.mark.parametrize("rate", [1000.0, 1e-9], ids=["taken", "skipped"])
@pytest.mark.parametrize("stops", [False, True])
def test_a_captured_executor_keeps_no_states_of_finished_requests(learning_engine, drafter, stops, rate):
    engine = learning_engine(drafter, capture=False, samples_per_second=rate)
    states = engine.executor.batch.states
    serve(engine, toy_prompts(2, seed=26), learn=False)
    assert not any(layer.any() for layer in states.layers)
    engine.add_request(toy_prompts(1, seed=25)[0], GREEDY)
    engine.step()
    assert any(layer[:-1].any() for layer in states.layers)
    serve(engine, toy_prompts(2, seed=24))
    assert engine.hook.collector.skipped == (3 if rate < 1 else 0)
    assert not states.slot_of
    if stops:
        engine.add_request(toy_prompts(1, seed=25)[0], GREEDY)
        engine.step()
        assert states.slot_of
        engine.hook._stop("a test")
        serve(engine, [])
        assert not states.slot_of
    assert not any(layer.any() for layer in states.layers)
