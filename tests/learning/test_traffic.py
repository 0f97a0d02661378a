"""What kind of traffic is learnt first, and what one client's traffic does to the others."""

from __future__ import annotations

import random

from fledge.learning.collector import SHORTENED_PRIORITY, Admission
from fledge.learning.gate import Decision
from fledge.training.targets import toy
from tests.learning.conftest import GREEDY, acceptance, serve, toy_prompts


def strange_prompts(count: int, seed: int) -> list[list[int]]:
    """Such as the drafter has never seen."""
    return [[*prompt[:-1], *prompt[1:]] * 2 for prompt in toy_prompts(count, seed, kind="spell")]


def test_what_the_guard_shortened_is_learnt_first_and_a_swap_relaxes_the_guard(learning_engine, drafter, monkeypatch):
    monkeypatch.setattr("fledge.learning.collector.NOVEL_PRIORITY", 0.0)  # what needs more than 1 was shortened
    engine = learning_engine(drafter, budget=1e-6, drift_guard=True)
    hook, guard = engine.hook, engine.controller.guard
    # Judged by acceptance alone: this drafter is unsure of strange texts, which the guard then takes for hard ones.
    monkeypatch.setattr(
        guard, "record", lambda *args, **options: type(guard).record(guard, *args, **options | {"confidences": ()})
    )
    serve(engine, toy_prompts(64, seed=41))  # what is usual
    assert not guard.usual[False].steps_left
    hook.ring.forget_all()
    before = guard.counts.requests
    serve(engine, toy_prompts(12, seed=43))
    serve(engine, strange_prompts(12, seed=42))
    shortened = guard.counts.requests - before
    assert shortened >= 2
    samples = hook.ring.kept
    needy = [one for one in samples if one.priority > SHORTENED_PRIORITY]
    assert shortened / 2 <= len(needy) <= shortened  # some were repeated
    assert not hook.collector.shortened  # none of them runs any more
    drawn = hook.ring.draw(200)
    assert sum(one in needy for one in drawn) / len(drawn) > 1.5 * len(needy) / len(samples)

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
    """No two alike, so that none is dropped as repeated."""
    draw, words = random.Random(seed), range(3, len(toy.WORDS))
    return [[1, *draw.sample(words, 3) * 8, *draw.sample(words, 4)] for _ in range(count)]


def test_a_flood_of_loops_costs_others_nothing(learning_engine, drafter):
    engine = learning_engine(drafter, held_out_texts=32, min_held_out=12)
    hook = engine.hook
    judged = toy_prompts(32, seed=71)
    before = acceptance(serve(engine, judged, learn=False))
    others = toy_prompts(96, seed=72)
    looked_at, now = 0, 0.0
    hook.collector.admission = Admission(20.0, lambda: now)
    for number, prompt in enumerate(others):
        now += 0.125  # 40 requests a second, 32 of them of the flood
        serve(engine, loops(4, seed=number), client="flood")
        skipped = hook.collector.skipped
        serve(engine, [prompt], client=f"other {number % 3}")
        looked_at += hook.collector.skipped == skipped
        engine.idle()
    for _ in range(200):
        engine.idle()
    after = acceptance(serve(engine, judged, learn=False))
    assert looked_at == 96  # none of the others' requests gave way
    assert hook.collector.skipped
    assert hook.learner.counts.candidates
    assert after >= 0.95 * before  # the gate tells no less apart with 32 texts
