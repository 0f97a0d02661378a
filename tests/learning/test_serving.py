"""`--learn` end to end on a CPU: acceptance rises, texts do not change, bad candidates are refused or rolled back."""

from __future__ import annotations

import copy
import os
import random
import shutil
from dataclasses import replace

import pytest
import torch

from fledge.checkpoints.eagle3 import save_drafter
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.errors import UserError
from fledge.learning.candidate import pack
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import FixedSet
from fledge.learning.gate import LEAST_REQUESTS, Decision
from fledge.learning.generations import Generations
from fledge.learning.hook import Learning
from fledge.learning.learner import Learner
from fledge.learning.micro_steps import FREE_SECONDS
from fledge.learning.samples import LEAST_ANSWER, is_held_out
from fledge.learning.served import weights_of
from fledge.learning.setup import NEW_RATE, TRAINED_RATE, build_learning_engine, initial_drafter_config
from fledge.learning.target import MOST_READ_TOKENS
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.training.targets import toy
from tests.learning.conftest import (
    DEPTH,
    ENGINE,
    LEARN,
    acceptance,
    finished,
    same,
    serve,
    served_weights,
    toy_prompts,
)

ACCEPTED = Decision(True, "a test")


def test_acceptance_rises_from_chance(learnt):
    engine, requests, last = learnt
    assert acceptance(requests[:32]) < 1.15
    assert acceptance(last) > 2.0
    stats = engine.hook.stats()
    assert stats["generation"] == stats["swaps"] >= 2
    assert stats["stopped"] == ""
    engine.check_integrity()


def test_texts_are_those_of_an_engine_that_does_not_learn(target, learnt):
    """For all requests, including those that ran during a swap."""
    _, requests, last = learnt
    plain = build_engine(copy.deepcopy(target), Speculation(None), EngineConfig(**ENGINE))
    assert len(requests) == 240
    for some in (requests, last):
        expected = serve(plain, [request.prompt for request in some])
        assert [request.tokens for request in some] == [request.tokens for request in expected]


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured"])
def test_sampled_texts_do_not_change_in_a_swap(learning_engine, drafter, target, capture):
    """Requests continue through swaps from good weights to bad ones and back."""
    prompts = toy_prompts(24, seed=51)
    params = [SamplingParams(max_tokens=48, temperature=0.9, seed=n, top_p=0.9 if n % 2 else 1.0) for n in range(len(prompts))]

    def answers(engine: Engine, every: int = 0) -> list[list[int]]:
        requests, left, steps = [], list(zip(prompts, params, strict=True)), 0
        while left or engine.has_unfinished():
            while left and len(engine.requests) < 8:
                requests.append(engine.add_request(*left.pop(0)))
            engine.step()
            steps += 1
            if every and steps % every == 0:
                list(engine.hook.served.swap(weights[steps // every % 2], ACCEPTED))
        return [request.tokens for request in requests]

    engine = learning_engine(drafter, budget=1e-6, capture=capture)
    good = engine.hook.served.weights
    weights = [good, {name: torch.randn_like(value) * value.std() for name, value in good.items()}]
    plain = build_engine(copy.deepcopy(target), Speculation(None), EngineConfig(**ENGINE), capture=capture)
    assert answers(engine, every=5) == answers(plain)
    assert engine.hook.served.num_swaps >= 8


def test_opted_out_requests_are_not_learnt_from(learning_engine):
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
    hook._has_work = False  # no training while these are served
    prompts = toy_prompts(64, seed=1)
    for prompt in prompts:
        serve(engine, [prompt])
        hook._has_work = False
    before = [tuple(request.tokens) for request in serve(engine, prompts[:4], learn=False)]
    served = served_weights(hook.served.network)
    for _ in hook.learner._measure_fixed():
        pass
    with torch.no_grad():
        for weight in hook.learner.candidate.average:
            weight.add_(torch.randn_like(weight) * weight.std() if kind == "noise" else torch.nan)
    assert len(hook.ring.held_out) >= 4
    list(hook.learner._gate())
    assert hook.learner.counts.refused == 1
    assert hook.served.generation == 0
    assert hook.journal.events[-1]["event"] == "refused"
    assert hook.journal.events[-1]["is_worse"]
    assert same(served_weights(hook.served.network), served)
    assert [tuple(request.tokens) for request in serve(engine, prompts[:4], learn=False)] == before


def test_candidate_averages_steps_and_a_worse_one_halves_learning_rate(learning_engine, drafter):
    engine = learning_engine(drafter, budget=1e-6)
    learner = engine.hook.learner
    serve(engine, toy_prompts(24, seed=6))
    expected, rate = [value.detach().clone() for value in learner.candidate.parameters], learner.candidate.learning_rate
    for number in range(2, 5):
        batch = learner._draw()
        list(learner._read_missing(batch))
        assert finished(learner._train(batch))
        expected = [mean + (new - mean) / number for mean, new in zip(expected, learner.candidate.parameters, strict=True)]
    for mean, wanted in zip(learner.candidate.average, expected, strict=True):
        torch.testing.assert_close(mean, wanted.detach())
    learner.refuse(Decision(False, "a test"))
    assert learner.candidate.learning_rate == rate
    assert learner.candidate.steps_since_start == 3
    learner.refuse(Decision(False, "a test", is_worse=True))
    assert learner.candidate.learning_rate == rate / 2
    assert learner.candidate.steps_since_start == 0
    served = dict(learner.served.weights)
    for (name, value), mean in zip(learner.candidate.master.named_parameters(), learner.candidate.average, strict=True):
        assert torch.equal(value, served[name])
        assert torch.equal(mean, served[name])


def test_fall_of_live_acceptance_is_rolled_back(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    hook: Learning = engine.hook
    good, served = hook.served.weights, served_weights(hook.served.network)
    serve(engine, toy_prompts(40, seed=4))
    bad = {name: torch.randn_like(value) * value.std() for name, value in good.items()}
    with torch.no_grad():
        list(hook.served.swap(bad, ACCEPTED))  # as if the gate had been wrong
    assert hook.served.generation == 1
    assert acceptance(serve(engine, toy_prompts(8, seed=5), learn=False)) < 1.5
    serve(engine, toy_prompts(80, seed=5))
    assert hook.stats()["rollbacks"] == 1
    assert hook.served.generation == 0
    assert same(served_weights(hook.served.network), served)
    assert acceptance(serve(engine, toy_prompts(16, seed=5), learn=False)) > 2.0
    hook.close()
    assert hook.journal.generations.current == 0
    assert [event["event"] for event in hook.journal.events] == ["swap", "rollback"]


def test_harder_traffic_long_after_a_swap_causes_no_roll_back(learning_engine, drafter, monkeypatch):
    monkeypatch.setattr("fledge.learning.served.COMPARED_REQUESTS", 48)
    engine = learning_engine(drafter, budget=1e-6)
    hook: Learning = engine.hook
    serve(engine, toy_prompts(40, seed=4))
    list(hook.served.swap(hook.served.weights, ACCEPTED))
    serve(engine, toy_prompts(47, seed=5))
    assert hook.served.before is not None
    serve(engine, toy_prompts(1, seed=6))
    assert hook.served.before is None  # the earlier weights are freed, too
    monkeypatch.setattr("fledge.learning.served.has_fallen", lambda *_: True)
    serve(engine, toy_prompts(8, seed=7))
    assert not hook.served.num_rollbacks


def test_the_recorded_coverage_of_the_draft_vocabulary_is_kept(target, tmp_path):
    first = EagleDrafter(replace(initial_drafter_config(toy.TARGET), draft_vocab_size=64, own_head=True))
    folder = save_drafter(first, tmp_path / "drafter", texts={"provenance.json": '{"draft_vocabulary": {"coverage": 0.9}}'})
    for learn in (LearnConfig(**LEARN), LearnConfig(**LEARN, folder=tmp_path / "learnt")):
        engine = build_learning_engine(
            copy.deepcopy(target), Speculation(str(folder), DEPTH), EngineConfig(**ENGINE), learn, fixed_prompts=[]
        )
        assert engine.drafter.coverage.covered == pytest.approx(0.9)
        engine.hook.close()


def test_samples_of_discarded_training_can_be_used_again(learning_engine, drafter):
    engine = learning_engine(drafter, budget=1e-6)
    learner = engine.hook.learner
    serve(engine, toy_prompts(24, seed=6))
    for _ in range(3):
        learner._draw()
    used = [one for one in engine.hook.ring.kept if one.uses]
    assert used
    learner.refuse(Decision(False, "a test", is_worse=True))
    assert not any(one.uses for one in used)
    learner._draw()
    list(learner.accept(learner.candidate.weights(), ACCEPTED))
    kept = sum(one.uses for one in used)
    assert kept
    learner.refuse(Decision(False, "a test", is_worse=True))
    assert sum(one.uses for one in used) == kept  # uses that are part of the served weights stay counted


def test_restart_has_no_figures_from_before_learning(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    serve(engine, toy_prompts(8, seed=6))
    assert all(one["before"] for one in engine.hook.stats()["domains"].values())
    list(engine.hook.served.swap(engine.hook.served.weights, ACCEPTED))
    engine.hook.close()
    again = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    serve(again, toy_prompts(8, seed=6))
    domains = again.hook.stats()["domains"].values()
    assert domains
    assert not any(one["before"] for one in domains)
    assert all(one["after"] for one in domains)
    again.hook.close()


def test_roll_back_time_is_not_charged_to_collecting(learning_engine, drafter, monkeypatch):
    engine = learning_engine(drafter, budget=1e-6)
    hook: Learning = engine.hook
    list(hook.served.swap(hook.served.weights, ACCEPTED))
    monkeypatch.setattr("fledge.learning.served.has_fallen", lambda *_: True)
    monkeypatch.setattr(hook, "roll_back", lambda reason: [hook.clock() for _ in range(2000)])  # two seconds
    serve(engine, toy_prompts(1, seed=5))
    assert hook.budget.spent.learning > 2
    assert hook.budget.spent.collecting < FREE_SECONDS


@pytest.mark.parametrize("is_known", [True, False], ids=["", "first token unknown"])
def test_prompts_longer_than_a_sample_are_learnt_from(learning_engine, drafter, monkeypatch, is_known):
    """The last tokens of such prompts are kept at their own positions, with the states of the serving passes."""
    monkeypatch.setitem(MOST_READ_TOKENS, "cpu", 64)
    engine = learning_engine(drafter, budget=1e-6, micro_batch_tokens=64, engine={"prefix_caching": False})
    hook: Learning = engine.hook
    assert hook.states_limit == 64
    prompts = [(one * 20)[:100] for one in toy_prompts(24, seed=1)]
    if is_known:
        hook.target.unknown[prompts[0][0],] = hook.target.clock()
        hook.target.read([(prompts[0][:1], 1)])
    requests = serve(engine, prompts)
    assert min(request.num_answer for request in requests) >= LEAST_ANSWER
    if not is_known:  # its states are computed before the next step
        assert not any(one.text is not None for one in hook.ring.kept)
        for _ in range(100):
            engine.idle()
        assert not hook.target.unknown_first_tokens
        assert hook.stats()["dropped"]["long"]
        hook.ring.forget_all()
        serve(engine, prompts)
    kept = [one for one in hook.ring.kept if one.text is not None]
    assert len(kept) > 0.8 * len({tuple(request.tokens) for request in requests})
    for sample in kept[:4]:
        whole = next(one.tokens for one in requests if one.tokens[-63:] == sample.tokens[1:])
        assert sample.tokens == [whole[0], *whole[-63:]]
        assert sample.num_skipped == len(whole) - 64
        expected = hook.target.read([(whole, 100)])[0]
        for mine, all_states in zip(
            [*sample.text.taps, sample.text.hidden_TD], [*expected.taps, expected.hidden_TD], strict=True
        ):
            wanted = torch.cat([all_states[:1], all_states[-63:]])[:-1]
            torch.testing.assert_close(mine[:-1].float(), wanted.float(), rtol=0.02, atol=0.05)
    batch = [one for one in kept if not is_held_out(one.tokens)][:3]
    assert finished(hook.learner._train(batch))


def test_the_next_turn_of_a_long_conversation_is_learnt_from(learning_engine, drafter, monkeypatch):
    """Only the tokens in the prefix cache are left out of the sample."""
    monkeypatch.setitem(MOST_READ_TOKENS, "cpu", 64)
    engine = learning_engine(drafter, budget=1e-6, micro_batch_tokens=64)
    target = engine.hook.target
    first = serve(engine, [(toy_prompts(1, seed=1)[0] * 20)[:100]])[0]
    target.read([([first.tokens[0]], 1)])
    longer = SamplingParams(max_tokens=24, temperature=1, seed=0, ignore_eos=True)
    for word in range(8):
        engine.add_request([*first.tokens, *toy_prompts(1, seed=word)[0]], longer)
        serve(engine, [])
    kept = [one for one in engine.hook.ring.kept if one.text is not None]
    assert kept
    for sample in kept:
        assert 16 < len(sample.tokens) < 64
        assert sample.num_skipped >= 95  # pages of 16 tokens
        assert len(sample.text.tokens_T) == len(sample.text.hidden_TD) == len(sample.tokens)
    packed, _ = pack(kept[:1], 64)
    assert packed.positions[0, 1] == kept[0].num_skipped + 1


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


def test_restart_continues_with_the_saved_generation(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path)
    hook: Learning = engine.hook
    better = {name: value + 0.01 for name, value in hook.served.weights.items()}
    list(hook.served.swap(better, ACCEPTED))
    hook.close()
    (tmp_path / ".generation-0002.killed").mkdir()  # left by a process killed during a save
    (tmp_path / ".current.json.killed").touch()
    again = learning_engine(None, folder=tmp_path)
    assert again.hook.served.generation == 1
    assert [path.name for path in tmp_path.glob(".*")] == [".lock"]
    assert same(served_weights(again.hook.served.network), better)
    assert again.drafter.fallback is None
    learner = again.hook.learner
    for _ in learner._measure_fixed():
        pass
    assert learner.served.first_weights is None  # freed after the fixed set is measured with them
    for number, weights in {0: hook.served.before.weights, 1: better}.items():
        assert learner.fixed.counts[number] == finished(learner._counted(learner.fixed.judged, weights))
    again.hook.close()


def test_roll_back_generation_is_not_deleted(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6, keep_generations=2)
    hook: Learning = engine.hook
    for _ in range(7):  # too few requests between swaps: generation 1 stays the baseline
        list(hook.served.swap(hook.served.weights, ACCEPTED))
        if hook.served.generation == 1:
            serve(engine, toy_prompts(32, seed=4))
    assert hook.served.before.generation == 1
    hook.roll_back("a test")
    hook.close()
    assert hook.journal.generations.current == 1
    assert sorted(path.name[-1] for path in tmp_path.glob("generation-*")) == ["0", "1", "5", "6", "7"]


def test_roll_back_to_unsaved_generation_uses_an_earlier_one(learning_engine, drafter, tmp_path, caplog):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    hook: Learning = engine.hook
    generations, save = hook.journal.generations, hook.journal.generations.save

    def full_disk(copy, number, *others):
        if number == 2:
            raise OSError("no space left")
        save(copy, number, *others)

    generations.save = full_disk
    for _ in range(3):
        hook.served.live.requests = LEAST_REQUESTS
        list(hook.served.swap(hook.served.weights, ACCEPTED))
    hook.roll_back("a test")
    hook.close()
    assert hook.served.generation == 2
    assert generations.current == 1  # not 3, whose acceptance fell
    assert "generation 2 was not saved; a restart continues with generation 1" in caplog.text
    shutil.rmtree(tmp_path / "generation-0000")
    with pytest.raises(FileNotFoundError, match="generation-0000"):
        generations.choose(0)


def test_failure_after_a_swap_names_served_generation(learning_engine, drafter, monkeypatch, caplog):
    engine = learning_engine(drafter, budget=1e-6)
    hook: Learning = engine.hook
    monkeypatch.setattr(engine, "forget_drafts", lambda: 1 / 0)
    hook._guarded(lambda: list(hook.served.swap(hook.served.weights, ACCEPTED)))
    assert "serving goes on with generation 1" in caplog.text
    assert hook.stats()["generation"] == 1


def test_weights_are_synced_before_they_are_chosen(learning_engine, drafter, tmp_path, monkeypatch):
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


def test_a_folder_of_another_target_or_drafter_is_refused(learning_engine, drafter, target, tmp_path, caplog):
    caplog.set_level("INFO", "fledge.learning")
    for given, folder in ((None, tmp_path / "new"), (drafter, tmp_path / "given")):
        engine = learning_engine(given, folder=folder, budget=1e-6)
        list(engine.hook.served.swap(engine.hook.served.weights, ACCEPTED))
        with pytest.raises(UserError, match="in use by another server"):
            learning_engine(given, folder=folder, budget=1e-6)
        engine.hook.close()
    with pytest.raises(UserError, match="was started without a drafter, and one is given now"):
        learning_engine(drafter, folder=tmp_path / "new", budget=1e-6)
    other = copy.deepcopy(drafter)
    with torch.no_grad():
        other.fc.weight.mul_(1.01)
    with pytest.raises(UserError, match="was started with another drafter"):
        learning_engine(other, folder=tmp_path / "given", budget=1e-6)
    with torch.no_grad():
        changed = copy.deepcopy(target)
        changed.layers[0].mlp.down_proj.weight.mul_(1.01)
    with pytest.raises(UserError, match="belongs to another target model"):
        learning_engine(drafter, folder=tmp_path / "given", budget=1e-6, model=changed)
    caplog.clear()
    for given in (drafter, None):  # the same drafter, or none given
        engine = learning_engine(given, folder=tmp_path / "given", budget=1e-6)
        assert engine.hook.served.generation == 1
        assert f"continues with generation 1 of {tmp_path / 'given'}" in caplog.text
        engine.hook.close()


def test_generation_numbers_are_not_reused(learning_engine, drafter, tmp_path):
    engine = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    list(engine.hook.served.swap(engine.hook.served.weights, ACCEPTED))
    engine.hook.close()
    (tmp_path / "current.json").unlink()  # restarts from generation 0
    again = learning_engine(drafter, folder=tmp_path, budget=1e-6)
    assert again.hook.served.generation == 0
    list(again.hook.served.swap(again.hook.served.weights, ACCEPTED))
    again.hook.close()
    assert again.hook.served.generation == 2


def test_warm_start_state_survives_a_restart(learning_engine, tmp_path):
    engine = learning_engine(folder=tmp_path, learning_rate=0.0)
    engine.hook.close()
    again = learning_engine(folder=tmp_path, learning_rate=0.0)
    assert same(served_weights(again.hook.served.network), served_weights(engine.hook.served.network))
    for one in (engine, again):
        assert one.hook.config.learning_rate == NEW_RATE
        assert one.drafter.fallback is not None
    serve(again, toy_prompts(8, seed=8))
    accepted = Decision(True, "a test", recent_after=5.0)  # better than n-grams
    again.hook.served.choose_drafts(accepted)
    list(again.hook.served.swap(again.hook.served.weights, accepted))
    again.hook.close()
    last = learning_engine(folder=tmp_path, learning_rate=0.0)
    assert last.hook.served.generation == 1
    assert last.hook.config.learning_rate == NEW_RATE
    assert last.drafter.fallback is None


def test_given_drafter_is_not_treated_as_warm_start(learning_engine, drafter, tmp_path):
    for given in (drafter, None):
        engine = learning_engine(given, folder=tmp_path, learning_rate=0.0)
        assert engine.hook.config.learning_rate == TRAINED_RATE
        assert engine.drafter.fallback is None
        engine.hook.close()


def test_out_of_memory_ends_only_learning(learning_engine, drafter, monkeypatch, caplog):
    engine = learning_engine(drafter)

    def no_memory(*_):
        raise torch.OutOfMemoryError("a test")

    monkeypatch.setattr(engine.hook.learner.candidate, "_accumulate", no_memory)
    requests = serve(engine, toy_prompts(24, seed=6))
    assert all(request.finish_reason in ("stop", "length") for request in requests)
    assert engine.hook.stats()["stopped"] == "out of memory"
    assert "learning stops: out of memory" in caplog.text
    assert len(engine.hook.ring) == 0
    serve(engine, toy_prompts(8, seed=6))
    assert not engine.idle()


@pytest.mark.parametrize("where", ["Learner.warm_up", "Learner.__init__", "FixedSet.of", "Engine._step"])
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("a test"), RuntimeError("can't allocate memory")])
def test_out_of_memory_at_the_start_ends_only_learning(learning_engine, drafter, monkeypatch, caplog, where, error):
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


def test_step_is_compiled_in_the_warm_up(learning_engine, drafter, monkeypatch, caplog):
    """As on a GPU, where all batches have one shape. A compiler failure falls back to eager."""
    learner = learning_engine(drafter, budget=1e-6).hook.learner
    monkeypatch.setattr(learner.candidate, "is_cpu", False)
    compiled = []

    def compile_nothing(what, **_):
        compiled.append(what)
        return what

    before = weights_of(learner.candidate.master)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "compile", compile_nothing)
        learner.candidate.objective = learner.candidate.build_objective(compiled=True)
    list(learner.warm_up())
    assert len(compiled) == 3  # unrolled drafter, loss, target's distribution
    assert learner.candidate.objective.is_compiled
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner.candidate.master).items())

    def fail(*_):
        raise torch._dynamo.exc.Unsupported("a test", "a test")

    monkeypatch.setattr(learner.candidate.objective, "unroll", fail)
    list(learner.warm_up())
    assert not learner.candidate.objective.is_compiled
    assert "torch.compile failed (a test" in caplog.text
    assert learner.counts.steps == 0  # the warm-up is not counted


def test_a_loss_that_is_not_finite_is_dropped(learning_engine, drafter):
    engine = learning_engine(drafter, budget=1e-6)
    serve(engine, toy_prompts(24, seed=7))
    learner = engine.hook.learner
    batch = learner._draw()
    list(learner._read_missing(batch))
    before = weights_of(learner.candidate.master)
    batch[0].text.taps[0][3] = torch.nan
    assert not finished(learner._train(batch))
    assert learner.counts.non_finite == 1
    assert all(torch.equal(value, before[name]) for name, value in weights_of(learner.candidate.master).items())


def test_n_grams_are_measured_over_all_passes_and_compared_at_each_gate(learning_engine):
    """Most passes have no n-gram draft; counting only passes with one would overestimate n-grams."""
    engine = learning_engine(budget=1e-6)
    served = engine.hook.served
    served.choose_drafts(Decision(True, "a test", recent_after=1.01))  # nothing was served: no n-gram measurement yet
    assert engine.drafter.fallback is not None
    requests = serve(engine, toy_prompts(64, seed=1))
    tokens, accepted = (sum(values) for values in zip(*((r.num_answer, r.stats.accepted) for r in requests), strict=True))
    per_pass = tokens / (tokens - accepted)
    assert served.ngram_tokens / served.ngram_passes == pytest.approx(per_pass)
    assert acceptance(requests) > per_pass + 0.05
    served.choose_drafts(Decision(False, "a test", recent_before=per_pass - 0.01, recent_after=9.0))
    assert engine.drafter.fallback is not None
    served.choose_drafts(Decision(False, "a test", recent_before=per_pass + 0.01))  # also after a refusal
    assert engine.drafter.fallback is None


def test_the_first_drafts_come_from_n_grams(learning_engine):
    """On day 0 n-grams draft until the drafter is better; the drafter runs alongside."""
    engine = learning_engine(budget=1e-6)
    repeated = toy_prompts(1, seed=8)[0]
    stats = serve(engine, [repeated * 3])[0].stats
    assert engine.drafter.fallback is not None
    assert stats.steps
