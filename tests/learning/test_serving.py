"""What `--learn` promises, end to end on a CPU: acceptance rises, texts stay, bad candidates are refused or taken back."""

from __future__ import annotations

import copy
import os
import random
import shutil

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.errors import UserError
from fledge.learning.budget import FREE_SECONDS
from fledge.learning.gate import LEAST_REQUESTS, Decision
from fledge.learning.generations import Generations
from fledge.learning.hook import MAX_PAUSE, Learning
from fledge.learning.learner import FixedSet, Learner
from fledge.learning.samples import is_held_out
from fledge.learning.setup import NEW_RATE, TRAINED_RATE
from fledge.learning.weights import weights_of
from fledge.sampling import SamplingParams
from fledge.training.targets import toy
from tests.learning.conftest import ENGINE, acceptance, same, serve, served_weights, toy_prompts

ACCEPTED = Decision(True, "a test")


def test_acceptance_rises_from_chance(learnt):
    engine, first, last = learnt
    assert acceptance(first) < 1.15
    assert acceptance(last) > 2.0
    stats = engine.hook.stats()
    assert stats["generation"] == stats["swaps"] >= 2
    assert stats["stopped"] == ""
    engine.check_integrity()


def test_texts_are_those_of_an_engine_that_does_not_learn(target, learnt):
    _, first, last = learnt
    plain = build_engine(copy.deepcopy(target), Speculation(None), EngineConfig(**ENGINE))
    for requests in (first, last):
        expected = serve(plain, [request.prompt for request in requests])
        assert [request.tokens for request in requests] == [request.tokens for request in expected]


def test_nothing_is_learnt_from_requests_that_opt_out(learning_engine):
    engine = learning_engine()
    serve(engine, toy_prompts(16, seed=3), learn=False)
    hook = engine.hook
    assert len(hook.ring) == 0
    assert not hook.ring.held_out
    assert not engine.executor.states.kept
    assert hook.stats()["opted_out"] == 16
    serve(engine, toy_prompts(16, seed=3))
    assert len(hook.ring) > 0


@pytest.mark.parametrize("kind", ["noise", "nan"])
def test_the_gate_refuses_a_sabotaged_candidate(learning_engine, drafter, kind):
    engine = learning_engine(drafter)
    hook: Learning = engine.hook
    hook._has_work = False  # nothing is trained while these are served
    prompts = toy_prompts(64, seed=1)
    for prompt in prompts:
        serve(engine, [prompt])
        hook._has_work = False
    before = [tuple(request.tokens) for request in serve(engine, prompts[:4], learn=False)]
    served = served_weights(hook.network)
    for _ in hook.learner._read_fixed():
        pass
    with torch.no_grad():
        for weight in hook.learner.average:
            weight.add_(torch.randn_like(weight) * weight.std() if kind == "noise" else torch.nan)
    assert len(hook.ring.held_out) >= 4
    list(hook.learner._gate())
    assert hook.learner.counts.refused == 1
    assert hook.learner.generation == 0
    assert hook.journal.events[-1]["event"] == "refused"
    assert hook.journal.events[-1]["is_worse"]
    assert same(served_weights(hook.network), served)
    assert [tuple(request.tokens) for request in serve(engine, prompts[:4], learn=False)] == before


def test_a_candidate_is_the_mean_of_steps_and_a_worse_one_halves_the_rate(learning_engine, drafter):
    engine = learning_engine(drafter, budget=1e-6)
    learner = engine.hook.learner
    serve(engine, toy_prompts(24, seed=6))
    expected, rate = [value.detach().clone() for value in learner.parameters], learner.learning_rate
    for number in range(2, 5):
        batch = learner._draw()
        list(learner._read_missing(batch))
        assert learner._train(batch)
        expected = [mean + (new - mean) / number for mean, new in zip(expected, learner.parameters, strict=True)]
    for mean, wanted in zip(learner.average, expected, strict=True):
        torch.testing.assert_close(mean, wanted.detach())
    learner._refuse(Decision(False, "a test"))
    assert learner.learning_rate == rate
    assert learner.steps_since_start == 3
    learner._refuse(Decision(False, "a test", is_worse=True))
    assert learner.learning_rate == rate / 2
    assert learner.steps_since_start == 0
    served = dict(learner.serving)
    for (name, value), mean in zip(learner.master.named_parameters(), learner.average, strict=True):
        assert torch.equal(value, served[name])
        assert torch.equal(mean, served[name])


def test_a_long_piece_of_work_waits_until_nothing_runs(learning_engine, drafter):
    engine = learning_engine(drafter, budget=100)
    hook: Learning = engine.hook
    hook._piece_seconds, hook._worked_at = MAX_PAUSE + 0.1, hook.clock()
    serve(engine, toy_prompts(16, seed=7))
    assert hook.ring.num_admitted
    assert not hook.budget.spent.learning - hook.budget.spent.collecting
    while hook._piece_seconds > MAX_PAUSE:  # pieces of a toy are short
        assert engine.idle()
    assert hook.budget.spent.idle
    serve(engine, toy_prompts(16, seed=8))
    assert hook.budget.spent.learning > hook.budget.spent.collecting


def test_live_acceptance_that_falls_is_rolled_back(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    hook: Learning = engine.hook
    good, served = hook.learner.serving, served_weights(hook.network)
    serve(engine, toy_prompts(40, seed=4))
    bad = {name: torch.randn_like(value) * value.std() for name, value in good.items()}
    with torch.no_grad():
        list(hook._swap(bad, ACCEPTED))  # as if the gate had been wrong
    assert hook.learner.generation == 1
    assert acceptance(serve(engine, toy_prompts(8, seed=5), learn=False)) < 1.5
    serve(engine, toy_prompts(80, seed=5))
    assert hook.stats()["rollbacks"] == 1
    assert hook.learner.generation == 0
    assert same(served_weights(hook.network), served)
    assert acceptance(serve(engine, toy_prompts(16, seed=5), learn=False)) > 2.0
    hook.close()
    assert hook.journal.generations.current == 0
    assert [event["event"] for event in hook.journal.events] == ["swap", "rollback"]


def test_a_roll_back_does_not_use_up_the_time_for_collecting(learning_engine, drafter, monkeypatch):
    engine = learning_engine(drafter, budget=1e-6)
    hook: Learning = engine.hook
    list(hook._swap(hook.learner.serving, ACCEPTED))
    monkeypatch.setattr("fledge.learning.hook.has_fallen", lambda *_: True)
    monkeypatch.setattr(hook, "roll_back", lambda reason: [hook.clock() for _ in range(2000)])  # two seconds
    serve(engine, toy_prompts(1, seed=5))
    assert hook.budget.spent.learning > 2
    assert hook.budget.spent.collecting < FREE_SECONDS


def test_the_gate_runs_when_all_prompts_are_long(learning_engine, drafter):
    engine = learning_engine(drafter, memory_mb=1, min_held_out=8, steps_per_candidate=1, budget=1e-6)
    hook: Learning = engine.hook
    draw, sampled = random.Random(0), SamplingParams(max_tokens=48, temperature=1, seed=0, ignore_eos=True)
    prompts = [[1, *(draw.randrange(3, len(toy.WORDS)) for _ in range(2 * hook.ring.max_held_out_states))] for _ in range(128)]
    prompts.sort(key=is_held_out)
    for prompt in [*prompts[:2], *prompts[-10:]]:
        engine.add_request(prompt, sampled)
    serve(engine, [])
    assert len(hook.ring.held_out) >= 8
    assert all(len(one.text.tokens_T) == hook.ring.max_held_out_states for one in hook.ring.held_out if one.text is not None)
    assert sum(one.num_states for one in hook.ring.held_out) <= hook.ring.max_held_out_tokens
    for _ in range(100):
        engine.idle()
    assert hook.learner.counts.candidates
    assert hook.journal.events[-1]["num_texts"] >= 8
    assert hook.stats()["stopped"] == ""


def test_too_little_memory_for_the_gate_is_refused(learning_engine, drafter):
    with pytest.raises(UserError, match=r"--learn-memory 1 .* give 4 MiB"):
        learning_engine(drafter, memory_mb=1, min_held_out=120)


def test_a_restart_goes_on_where_it_was(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path)
    hook: Learning = engine.hook
    better = {name: value + 0.01 for name, value in hook.learner.serving.items()}
    list(hook._swap(better, ACCEPTED))
    hook.close()
    (tmp_path / ".generation-0002.killed").mkdir()  # what one that was killed in a save leaves
    (tmp_path / ".current.json.killed").touch()
    again = learning_engine(None, folder=tmp_path)
    assert again.hook.learner.generation == 1
    assert not list(tmp_path.glob(".*"))
    assert same(served_weights(again.hook.network), better)
    assert again.drafter.fallback is None
    learner = again.hook.learner
    for _ in learner._read_fixed():
        pass
    first = learner.fixed.first_counts
    assert first == {one: count for counts in learner._counted(list(first), hook.before[0]) for one, count in counts.items()}


def test_the_generation_that_a_roll_back_goes_to_is_not_deleted(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6, keep_generations=2)
    hook: Learning = engine.hook
    for _ in range(7):  # so fast that too few requests see each: generation 1 stays the measure
        list(hook._swap(hook.learner.serving, ACCEPTED))
        if hook.learner.generation == 1:
            serve(engine, toy_prompts(32, seed=4))
    assert hook.before[1] == 1
    hook.roll_back("a test")
    hook.close()
    assert hook.journal.generations.current == 1
    assert sorted(path.name[-1] for path in tmp_path.glob("generation-*")) == ["0", "1", "5", "6", "7"]


def test_a_roll_back_to_a_generation_that_was_not_saved_chooses_the_one_before(learning_engine, drafter, tmp_path, caplog):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    hook: Learning = engine.hook
    generations, save = hook.journal.generations, hook.journal.generations.save

    def full_disk(copy, number, *others):
        if number == 2:
            raise OSError("no space left")
        save(copy, number, *others)

    generations.save = full_disk
    for _ in range(3):
        hook.live.requests = LEAST_REQUESTS
        list(hook._swap(hook.learner.serving, ACCEPTED))
    hook.roll_back("a test")
    hook.close()
    assert hook.learner.generation == 2
    assert generations.current == 1  # not 3, which fell
    assert "generation 2 was not saved; a restart goes on with generation 1" in caplog.text
    shutil.rmtree(tmp_path / "generation-0000")
    with pytest.raises(FileNotFoundError, match="generation-0000"):
        generations.choose(0)


def test_a_failure_after_a_swap_names_the_generation_that_is_served(learning_engine, drafter, monkeypatch, caplog):
    engine = learning_engine(drafter, budget=1e-6)
    hook: Learning = engine.hook
    monkeypatch.setattr(engine, "forget_drafts", lambda: 1 / 0)
    hook._guarded(lambda: list(hook._swap(hook.learner.serving, ACCEPTED)))
    assert "serving goes on with generation 1" in caplog.text
    assert hook.stats()["generation"] == 1


def test_weights_are_on_the_disk_before_they_are_chosen(learning_engine, drafter, tmp_path, monkeypatch):
    synced, fsync, choose = set(), os.fsync, Generations.choose

    def noted(descriptor):
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked(generations, number):
        assert {path.stat().st_ino for path in generations.path(number).iterdir()} <= synced
        return choose(generations, number)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Generations, "choose", checked)
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    engine.hook.close()
    assert engine.hook.journal.generations.current == 0


def test_no_number_is_given_twice(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    list(engine.hook._swap(engine.hook.learner.serving, ACCEPTED))
    engine.hook.close()
    (tmp_path / "current.json").unlink()  # to start anew
    again = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    assert again.hook.learner.generation == 0
    list(again.hook._swap(again.hook.learner.serving, ACCEPTED))
    again.hook.close()
    assert again.hook.learner.generation == 2


def test_a_warm_start_is_one_after_a_restart_too(learning_engine, tmp_path):
    engine = learning_engine(folder=tmp_path, learning_rate=0.0)
    engine.hook.close()
    again = learning_engine(folder=tmp_path, learning_rate=0.0)
    assert same(served_weights(again.hook.network), served_weights(engine.hook.network))
    for one in (engine, again):
        assert one.hook.config.learning_rate == NEW_RATE
        assert one.drafter.fallback is not None
    list(again.hook._swap(again.hook.learner.serving, Decision(True, "a test", recent_after=5.0)))  # better than n-grams
    again.hook.close()
    last = learning_engine(folder=tmp_path, learning_rate=0.0)
    assert last.hook.learner.generation == 1
    assert last.hook.config.learning_rate == NEW_RATE
    assert last.drafter.fallback is None


def test_a_drafter_that_was_given_is_not_taken_for_a_warm_start(learning_engine, drafter, tmp_path):
    for given in (drafter, None):
        engine = learning_engine(given, folder=tmp_path, learning_rate=0.0)
        assert engine.hook.config.learning_rate == TRAINED_RATE
        assert engine.drafter.fallback is None
        engine.hook.close()


def test_out_of_memory_ends_learning_alone(learning_engine, drafter, monkeypatch, caplog):
    engine = learning_engine(drafter)

    def no_memory(samples):
        raise torch.OutOfMemoryError("a test")

    monkeypatch.setattr(engine.hook.learner, "_train", no_memory)
    requests = serve(engine, toy_prompts(24, seed=6))
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    assert engine.hook.stats()["stopped"] == "out of memory"
    assert "learning stops: out of memory" in caplog.text
    assert len(engine.hook.ring) == 0
    serve(engine, toy_prompts(8, seed=6))
    assert not engine.idle()


@pytest.mark.parametrize("where", ["Learner.warm_up", "Learner.__init__", "FixedSet.of", "Engine._step"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("a test"), RuntimeError("can't allocate memory")])
def test_out_of_memory_at_the_start_ends_learning_alone(learning_engine, drafter, monkeypatch, caplog, where, error):
    def no_memory(*_, **__):
        raise error

    owner, name = where.split(".")
    with monkeypatch.context() as patched:
        patched.setattr({"Learner": Learner, "FixedSet": FixedSet, "Engine": Engine}[owner], name, no_memory)
        engine = learning_engine(drafter)
    assert "learning stops: out of memory" in caplog.text
    assert not engine.has_unfinished()
    requests = serve(engine, toy_prompts(4, seed=6))
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    assert acceptance(requests) > 1.5
    engine.check_integrity()


def test_a_step_is_compiled_at_the_start_where_that_is_possible(learning_engine, drafter, monkeypatch, caplog):
    """As on a GPU: one shape for all batches. A compiler that fails costs speed alone."""
    learner = learning_engine(drafter, budget=1e-6).hook.learner
    monkeypatch.setattr(learner, "is_cpu", False)
    compiled = []

    def compile_nothing(what, **_):
        compiled.append(what)
        return what

    before = weights_of(learner.master)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", compile_nothing)
        learner.objective = learner._objective(compiled=True)
    learner.warm_up()
    assert len(compiled) == 3  # unrolled drafter, loss, target's distribution
    assert learner.objective.settings.compile
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner.master).items())

    def fail(*_):
        raise torch._dynamo.exc.Unsupported("a test", "a test")

    monkeypatch.setattr(learner.objective, "unroll", fail)
    learner.warm_up()
    assert not learner.objective.settings.compile
    assert "torch.compile failed (a test" in caplog.text
    assert learner.counts.steps == 0  # of the warm-up


def test_a_loss_that_is_not_finite_is_dropped(learning_engine, drafter):
    engine = learning_engine(drafter, budget=1e-6)
    serve(engine, toy_prompts(24, seed=7))
    learner = engine.hook.learner
    batch = learner._draw()
    list(learner._read_missing(batch))
    before = weights_of(learner.master)
    batch[0].text.taps[0][3] = torch.nan
    assert not learner._train(batch)
    assert learner.counts.non_finite == 1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner.master).items())


def test_the_first_drafts_come_from_n_grams(learning_engine):
    """Day 0: until the drafter is better. It follows the target meanwhile."""
    engine = learning_engine(budget=1e-6)
    repeated = toy_prompts(1, seed=8)[0]
    stats = serve(engine, [repeated * 3])[0].stats
    assert engine.drafter.fallback is not None
    assert stats.steps
