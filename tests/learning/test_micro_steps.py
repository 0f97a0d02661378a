"""When micro-steps of learning run and for how long: requests do not wait long, and the budget is respected."""

from __future__ import annotations

import copy
import itertools
import time

import pytest

from fledge.engine.build import Speculation
from fledge.engine.config import EngineConfig
from fledge.learning.config import LearnConfig
from fledge.learning.gate import Decision
from fledge.learning.hook import MAX_PAUSE, SLICE, START_CREDIT, Learning
from fledge.learning.micro_steps import Kind, MicroSteps
from fledge.learning.setup import build_learning_engine
from tests.learning.conftest import DEPTH, ENGINE, GREEDY, LEARN, Ticks, serve, toy_prompts


def slow_down(hook: Learning, monkeypatch: pytest.MonkeyPatch, kind: Kind, seconds: float) -> list[tuple[bool, Kind]]:
    """Makes micro-steps of `kind` take `seconds`, others 10 ms. Returns a list of (whether requests ran, kind)."""
    ran, clock = [], hook.clock
    assert isinstance(clock, Ticks)

    def run(steps: MicroSteps) -> float:
        this, began = steps.next, clock()
        steps.next = next(steps._work, None)
        clock.readings += round(1000 * (seconds if this == kind else 0.01)) if this is not None else 0
        took = clock() - began
        if this is not None:
            ran.append((bool(hook.engine.requests), this))
            steps._seconds[this].append(took)
        return took

    monkeypatch.setattr(MicroSteps, "run", run)
    return ran


def test_a_long_micro_step_waits_until_nothing_runs(learning_engine, drafter, monkeypatch):
    """Also after many short micro-steps of other kinds."""
    engine = learning_engine(drafter, budget=100)
    hook: Learning = engine.hook
    ran = slow_down(hook, monkeypatch, Kind.BACKWARD, 3.0)
    hook.micro_steps._seconds[Kind.BACKWARD].extend([3.0] * 5)
    for seed in range(8):
        serve(engine, toy_prompts(24, seed=seed))
        assert not engine.idle(is_quiet=False) or hook.micro_steps.next != Kind.BACKWARD  # a request may be about to come
    assert {kind for _, kind in ran} >= {Kind.READ, Kind.FORWARD, Kind.LOSS}
    assert any(is_serving for is_serving, _ in ran)
    assert not any(kind == Kind.BACKWARD for _, kind in ran)
    while hook.micro_steps.next == Kind.BACKWARD:
        assert engine.idle(is_quiet=True)
    assert (False, Kind.BACKWARD) in ran


def test_slow_measurements_do_not_stop_learning_under_load(learning_engine, drafter, monkeypatch):
    engine = learning_engine(drafter, budget=100, samples_per_second=1e9)
    hook: Learning = engine.hook
    ran = slow_down(hook, monkeypatch, Kind.LOSS, 0.01)
    hook.micro_steps._seconds[Kind.LOSS].extend([0.5] * 5)
    began, prompts = hook.clock(), toy_prompts(200, seed=7)
    while sum(kind == Kind.LOSS for _, kind in ran) < 4:
        serve(engine, prompts)
        hook.clock.readings += 20_000
    assert 60 <= hook.clock() - began <= 400
    assert all(is_serving for is_serving, _ in ran)


def test_pauses_under_load_are_bounded(learning_engine, drafter, monkeypatch):
    """A step waits for one micro-step, or several that fit a slice. After idle work the next step waits for none."""
    engine = learning_engine(drafter, budget=100, slice_seconds=SLICE)
    hook: Learning = engine.hook
    slow_down(hook, monkeypatch, Kind.BACKWARD, 0.19)
    waits, work = [], hook._work

    def timed(goes_on):
        began = hook.clock()
        has_more = work(goes_on)
        waits.append(hook.clock() - began)
        return has_more

    monkeypatch.setattr(hook, "_work", timed)
    serve(engine, toy_prompts(96, seed=7))
    while engine.idle(is_quiet=False) and len(waits) < 200:
        pass
    assert len(waits) > 20
    assert max(waits) < MAX_PAUSE + 0.02
    assert sum(waits) / len(waits) > SLICE / 4  # several short micro-steps run per slice
    before = len(waits)
    hook._has_work = True
    engine.add_request(toy_prompts(1, seed=8)[0], GREEDY)
    hook.budget.credit = 0.2
    engine.step()
    assert len(waits) == before  # the request waited for idle work already
    engine.step()
    assert len(waits) == before + 1
    serve(engine, [])


def test_micro_steps_are_timed_in_the_warm_up(learning_engine, drafter):
    hook = learning_engine(drafter).hook
    assert set(hook.micro_steps._seconds) == set(Kind) - {Kind.SWAP}
    assert hook.learner.counts.steps == 0
    assert hook.learner.candidate.steps_since_start == 0


def test_credit_is_saved_up_so_that_interruptions_are_few(learning_engine, drafter, monkeypatch):
    engine = learning_engine(drafter, budget=20, slice_seconds=SLICE)
    hook: Learning = engine.hook
    ran = slow_down(hook, monkeypatch, Kind.BACKWARD, 0.01)  # the same as all others
    interruptions: list[float] = []
    step = engine._step

    def slow_step():
        hook.clock.readings += 20  # milliseconds
        return step()

    monkeypatch.setattr(engine, "_step", slow_step)
    monkeypatch.setattr(engine.executor, "interrupted", lambda: interruptions.append(hook.clock()))
    for seed in range(40):
        serve(engine, toy_prompts(24, seed=seed))
        if len(interruptions) >= 12:
            break
    micro_steps = sum(is_serving for is_serving, _ in ran)
    assert micro_steps > 3 * len(interruptions)
    gaps = [after - before for before, after in itertools.pairwise(interruptions)]
    assert min(gaps) > 0.8 * START_CREDIT / 0.2  # the time to earn START_CREDIT


def test_budget_is_respected_on_a_real_clock(target, drafter):
    """Measures the time spent in the engine's thread and compares it with the reported time."""
    learn = LearnConfig(**{**LEARN, "budget": 20.0})
    speculation = Speculation(copy.deepcopy(drafter), DEPTH, adaptive=False, drift_guard=False)
    engine = build_learning_engine(copy.deepcopy(target), speculation, EngineConfig(**ENGINE), learn, fixed_prompts=[])
    engine.warm_up()
    hook: Learning = engine.hook
    working, work = [0.0], hook._work

    def timed(goes_on):
        began = time.perf_counter()
        has_more = work(goes_on)
        working[0] += time.perf_counter() - began
        return has_more

    hook._work = timed
    prompts, began = toy_prompts(400, seed=61), time.perf_counter()
    while time.perf_counter() - began < 4.0:
        for prompt in prompts[:8]:
            engine.add_request(prompt, GREEDY)
        prompts = prompts[8:] or toy_prompts(400, seed=62)
        while len(engine.requests) > 2:  # never idle
            engine.step()
    passed = time.perf_counter() - began
    serve(engine, [])
    spent = hook.budget.spent
    assert spent.serving == pytest.approx(passed, rel=0.15)
    assert 0.05 < working[0] / passed < 0.26
    assert spent.learning - spent.collecting == pytest.approx(working[0], rel=0.1, abs=0.02)
    assert hook.learner.counts.steps


@pytest.mark.parametrize("in_parts", [True, False], ids=["cpu", "gpu"])
def test_weights_are_staged_in_parts_only_on_a_cpu(learning_engine, drafter, in_parts):
    served = learning_engine(drafter, budget=1e-6).hook.served
    assert served.stages_in_parts
    served.stages_in_parts = in_parts
    kinds = list(served.swap(served.weights, Decision(True, "a test")))
    assert (kinds.count(Kind.STAGE) > 1) == in_parts
    assert kinds[-1] == Kind.SWAP
    assert served.generation == 1
