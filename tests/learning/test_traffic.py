"""Which traffic is learnt first, and how one client's traffic affects the others."""

from __future__ import annotations

import random

from fledge.learning.collector import SHORTENED_PRIORITY, Admission
from fledge.learning.gate import Decision
from fledge.training.targets import toy
from tests.learning.conftest import GREEDY, acceptance, serve, toy_prompts


def strange_prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of a kind that the drafter was not trained on."""
    return [[*prompt[:-1], *prompt[1:]] * 2 for prompt in toy_prompts(count, seed, kind="spell")]


def test_shortened_requests_are_learnt_first_and_a_swap_resets_the_guard(learning_engine, drafter, monkeypatch):
    monkeypatch.setattr("fledge.learning.collector.NOVEL_PRIORITY", 0.0)  # then only shortened requests have a higher priority
    engine = learning_engine(drafter, budget=1e-6, drift_guard=True)
    hook, guard = engine.hook, engine.controller.guard
    # Without confidences: this drafter has low confidence on such texts, and the guard would treat them as hard.
    monkeypatch.setattr(
        guard, "record", lambda *args, **options: type(guard).record(guard, *args, **options | {"confidences": ()})
    )
    serve(engine, toy_prompts(64, seed=41))  # calibrates the guard
    assert not guard.usual[False].steps_left
    hook.ring.forget_all()
    before = guard.counts.requests
    serve(engine, toy_prompts(12, seed=43))
    serve(engine, strange_prompts(12, seed=42))
    shortened = guard.counts.requests - before
    assert shortened >= 2
    samples = hook.ring.kept
    shortened_samples = [one for one in samples if one.priority > SHORTENED_PRIORITY]
    assert shortened / 2 <= len(shortened_samples) <= shortened  # some texts are repeated
    assert not hook.collector.shortened  # none of these requests is running
    drawn = hook.ring.draw(200)
    assert sum(one in shortened_samples for one in drawn) / len(drawn) > 1.5 * len(shortened_samples) / len(samples)

    for prompt in strange_prompts(6, seed=44):
        engine.add_request(prompt, GREEDY)
    while not guard.counts.shortened:
        assert engine.has_unfinished()
        engine.step()
    assert hook.collector.shortened
    list(hook.served.swap(hook.served.weights, Decision(True, "a test")))
    assert not guard.counts.shortened
    assert all(guard.depth(request) == guard.limit for request in engine.requests.values())
    serve(engine, [])


def loops(count: int, seed: int) -> list[list[int]]:
    """Different prompts that loop, so that none is dropped as a repetition."""
    draw, words = random.Random(seed), range(3, len(toy.WORDS))
    return [[1, *draw.sample(words, 3) * 8, *draw.sample(words, 4)] for _ in range(count)]


def test_flood_of_loops_does_not_affect_other_clients(learning_engine, drafter):
    engine = learning_engine(drafter, held_out_texts=32, min_held_out=12)
    hook = engine.hook
    judged = toy_prompts(32, seed=71)
    before = acceptance(serve(engine, judged, learn=False))
    others = toy_prompts(96, seed=72)
    looked_at, now = 0, 0.0
    hook.collector.admission = Admission(20.0, lambda: now)
    for number, prompt in enumerate(others):
        now += 0.125  # 40 requests per second, 32 of them from the flood
        serve(engine, loops(4, seed=number), client="flood")
        skipped = hook.collector.skipped
        serve(engine, [prompt], client=f"other {number % 3}")
        looked_at += hook.collector.skipped == skipped
        engine.idle()
    for _ in range(200):
        engine.idle()
    after = acceptance(serve(engine, judged, learn=False))
    assert looked_at == 96  # no request of the other clients was skipped
    assert hook.collector.skipped
    assert hook.learner.counts.candidates
    assert after >= 0.95 * before  # the resolution of the gate with 32 texts
