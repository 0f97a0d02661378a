"""Whole runs on a toy target: they learn, resume exactly and stop at their limits."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config, save_decoder
from fledge.errors import UserError
from fledge.training.arm import TrainingStopped
from fledge.training.context import build_contexts, resolve
from fledge.training.data.vocabulary import DraftVocabulary
from fledge.training.distributed import DistributedContext
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, build_recipe, load_recipe
from fledge.training.targets import toy
from fledge.training.trainer import Trainer, train
from tests.tiny import tiny_decoder


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return toy.make(tmp_path_factory.mktemp("toy"), num_answers=240, steps=25)


@pytest.fixture
def recipe(toy_folder, tmp_path) -> Recipe:
    content = {
        "output": str(tmp_path / "run"),
        "target": {"model": str(toy_folder / "target")},
        "data": {
            "train": [str(toy_folder / "answers.jsonl")],
            "held_out_samples": 4,
            "sequence_length": 128,
            "micro_batch_size": 2,
        },
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 12, "log_every": 1, "save_every": 5, "evaluate_every": 6, "device": "cpu"},
        "evaluation": {"max_new_tokens": 16, "depths": [2, 4], "select_depth": 4},
    }
    return build_recipe(content)


@pytest.mark.parametrize(
    "drafter",
    [
        {"attention": "mla", "mla": {"kv_lora_rank": 40, "v_head_dim": 12}},
        {"attention": "mla", "mla": {"q_lora_rank": 0, "kv_lora_rank": 40}, "version": "3"},
        {"qk_norm": True},
    ],
    ids=["mla 3.1", "mla 3", "qk_norm"],
)
def test_other_attention_is_trained_by_recipe(recipe, drafter):
    """A few steps; the strict reader accepts the saved files."""
    settings = {**recipe.to_dict(), "drafter": {**recipe.to_dict()["drafter"], **drafter}}
    result = train(build_recipe(settings))
    loaded = load_drafter(result.best_folder, load_config(recipe.target.model))
    config = loaded.config
    assert config.version == drafter.get("version", "3.1")
    assert config.qk_norm == ("qk_norm" in drafter)
    if "mla" in drafter:
        assert (config.mla.q_lora_rank is None) == (config.version == "3")
        assert (config.mla.kv_lora_rank, config.mla.qk_rope_head_dim) == (40, 64)
    history = losses(recipe)
    assert sum(history[step] for step in (10, 11, 12)) < sum(history[step] for step in (1, 2, 3))


def losses(recipe: Recipe) -> dict[int, float]:
    lines = read_journal(Path(recipe.output) / "log.jsonl")
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "train"}


def final_weights(recipe: Recipe) -> dict[str, torch.Tensor]:
    return torch.load(Path(recipe.output) / "checkpoints" / "step-00000012.pt", weights_only=True)["drafter"]


def interrupt_at(monkeypatch, step: int, how) -> None:
    original = Trainer._train_step

    def train_step(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        if self.step == step - 1:
            how()
        return result

    monkeypatch.setattr(Trainer, "_train_step", train_step)


def test_the_tiny_recipe_learns(tmp_path):
    """Acceptance length rises from 1.0 to about 3 in a third of the recipe's steps."""
    path = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
    result = train(load_recipe(path, [f"output={tmp_path / 'tiny'}", "run.steps=130", "run.evaluate_every=65"]))
    first, *_, last = (e["acceptance_length"][5] for e in result.evaluations)
    assert first < 1.2
    assert last > 2.7  # measured: 2.97, standard error about 0.3
    assert result.best_acceptance_length == pytest.approx(max(first, last, result.best_acceptance_length))
    drafter = load_drafter(result.best_folder, load_config(tmp_path / "tiny" / "toy" / "target"))
    assert drafter.config.version == "3.1"
    provenance = json.loads((result.best_folder / "provenance.json").read_text())
    assert provenance["evaluation"]["acceptance_length"]["5"] == result.best_acceptance_length
    assert provenance["data"]["data_hash"]
    assert (tmp_path / "tiny" / "curves.png").stat().st_size > 10_000
    assert list((tmp_path / "tiny" / "tensorboard").iterdir())


def test_resuming_is_exact(recipe, tmp_path, monkeypatch):
    """A run interrupted by Ctrl-C and then by an error gives bit-identical losses and weights."""
    train(recipe)
    broken = replace(recipe, output=str(tmp_path / "broken"))
    with monkeypatch.context() as patch:
        interrupt_at(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        result = train(broken)
    assert (result.step, result.finished) == (3, False)

    class KilledError(Exception):
        pass

    def die():
        raise KilledError

    with monkeypatch.context() as patch:
        interrupt_at(patch, 9, die)
        with pytest.raises(KilledError):
            train(broken)
    assert max(losses(broken)) == 8
    assert sorted(p.name for p in (tmp_path / "broken" / "checkpoints").iterdir()) == ["step-00000003.pt", "step-00000005.pt"]
    assert train(broken).finished
    assert losses(broken) == losses(recipe)
    assert len(losses(recipe)) == 12
    for name, value in final_weights(recipe).items():
        assert torch.equal(value, final_weights(broken)[name]), name


def test_a_finished_run_is_left_as_it_is(recipe):
    train(recipe)
    before = losses(recipe)
    assert train(recipe).finished
    assert losses(recipe) == before


def test_accumulating_equals_a_larger_batch(recipe, tmp_path):
    run = replace(recipe.run, steps=4)
    large = replace(recipe, output=str(tmp_path / "large"), run=run, data=replace(recipe.data, micro_batch_size=4))
    small = replace(recipe, output=str(tmp_path / "small"), run=run, data=replace(recipe.data, global_batch_size=4))
    train(large)
    train(small)
    for step, loss in losses(large).items():
        assert losses(small)[step] == pytest.approx(loss, rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"optimizer": {"kind": "muon", "schedule": "wsd"}},
        {"objective": {"loss": "mix", "outside_vocabulary": "renormalise", "recompute": True}},
        {"drafter": {"version": "3", "init": "random", "own_embedding": True, "window": 16}},
        {"drafter": {"draft_vocab_size": None, "own_head": False, "num_layers": 2}},
        {"run": {"compute_dtype": "bfloat16", "epochs": 0.5}},
        {"data": {"position_offset_max": 50, "long": "drop"}},
    ],
    ids=str,
)
def test_options_train(recipe, change):
    content = recipe.to_dict()
    content["run"]["steps"] = 8
    for section, settings in change.items():
        content[section] |= settings
    recipe = build_recipe(content)
    result = train(recipe)
    assert result.finished
    values = list(losses(recipe).values())
    assert sum(values[-2:]) < sum(values[:2])


def test_a_time_budget_ends_the_run_and_its_schedule(recipe):
    recipe = replace(recipe, run=replace(recipe.run, steps=None, max_seconds=1.0))
    result = train(recipe)
    assert result.finished
    rates = [x["learning_rate"] for x in read_journal(Path(recipe.output) / "log.jsonl") if x["kind"] == "train"]
    assert rates[-1] < 0.5 * max(rates)


def test_slow_start_keeps_the_learning_rate_warm_up(recipe, monkeypatch):
    """When loading and compiling take most of the time, the schedule must still start with the warm-up."""
    original, slow = Trainer._train_step, iter([2.5])

    def compiles(self, *args, **kwargs):
        time.sleep(next(slow, 0.0))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "_train_step", compiles)
    optimizer = replace(recipe.optimizer, warmup=0.5)
    recipe = replace(recipe, optimizer=optimizer, run=replace(recipe.run, steps=None, max_seconds=15.0, log_every=1))
    began = time.perf_counter()
    assert train(recipe, began=began - 9.0).finished
    assert time.perf_counter() - began < 30
    rates = [x["learning_rate"] for x in read_journal(Path(recipe.output) / "log.jsonl") if x["kind"] == "train"]
    assert rates[1] < 0.2 * recipe.optimizer.learning_rate
    assert rates[-1] < 0.5 * max(rates)


def test_run_without_time_left_makes_one_step(recipe):
    recipe = replace(recipe, run=replace(recipe.run, steps=None, max_seconds=1.0))
    assert train(recipe, began=time.perf_counter() - 100.0).step == 1


def test_patience_ends_a_run_that_does_not_improve(recipe):
    recipe = replace(
        recipe,
        optimizer=replace(recipe.optimizer, learning_rate=1e-12),
        run=replace(recipe.run, steps=40, patience=2, evaluate_every=3),
    )
    assert train(recipe).step == 6


def test_non_finite_loss_stops_the_run_and_names_the_step(recipe, monkeypatch):
    def poison(self, *args, **kwargs):
        if self.step == 4:
            with torch.no_grad():
                self.arms[0].drafter.fc.weight.fill_(float("nan"))
        return original(self, *args, **kwargs)

    original = Trainer._train_step
    monkeypatch.setattr(Trainer, "_train_step", poison)
    with pytest.raises(TrainingStopped, match=r"step 5: the loss is not a finite number.*documents are fine.*learning_rate"):
        train(recipe)
    assert (Path(recipe.output) / "not-finite.pt").exists()
    assert (Path(recipe.output) / "curves.png").stat().st_size > 10_000
    assert not (Path(recipe.output) / "checkpoints" / "step-00000005.pt").exists()


def test_compiler_failures_fall_back_to_eager(recipe, monkeypatch, capfd):
    from torch._dynamo.exc import BackendCompilerFailed

    def failing(function=None, **kwargs):
        def run(*args, **kwargs):
            raise BackendCompilerFailed(lambda: None, RuntimeError("no compiler here"), None)

        return run

    monkeypatch.setattr("fledge.training.objective.torch.compile", failing)
    recipe = replace(recipe, run=replace(recipe.run, compile="yes", steps=2))
    result = train(recipe)
    assert result.finished
    assert "torch.compile failed" in capfd.readouterr().err


def test_states_on_disk_train_alike(recipe, tmp_path):
    """The target runs once; the second epoch, packed differently, finds the states of every document."""
    run = replace(recipe.run, steps=None, epochs=1.5)
    online = replace(recipe, run=run, data=replace(recipe.data, limit=80))
    offline = replace(online, output=str(tmp_path / "offline"), run=replace(run, hidden_states="offline"))
    train(online)
    train(offline)
    assert losses(offline).keys() == losses(online).keys()
    for step, loss in losses(online).items():
        assert losses(offline)[step] == pytest.approx(loss, rel=1e-3)
    index = tmp_path / "offline" / "states" / "index-0.jsonl"
    before = index.read_text()
    train(replace(offline, run=replace(offline.run, epochs=1.6)))
    assert index.read_text() == before
    other = replace(
        offline,
        output=str(tmp_path / "other"),
        drafter=replace(recipe.drafter, aux_layers=(0, 1, 2)),
        run=replace(offline.run, hidden_states_folder=str(index.parent)),
    )
    with pytest.raises(UserError, match="another target"):
        train(other)


def test_another_draft_vocabulary_is_not_resumed(recipe, tmp_path):
    train(replace(recipe, run=replace(recipe.run, steps=2)))
    given = tmp_path / "run" / "vocabulary"
    with pytest.raises(UserError, match="draft_vocab_size was 64, now 32"):
        train(replace(recipe, drafter=replace(recipe.drafter, draft_vocab_size=32)))
    smaller = replace(recipe, output=str(tmp_path / "smaller"), drafter=replace(recipe.drafter, draft_vocab_size=32))
    with pytest.raises(UserError, match="draft vocabulary has 64 tokens"):
        train(replace(smaller, data=replace(recipe.data, vocabulary=str(given))))
    counted = DraftVocabulary.load(given)
    others = np.setdiff1d(np.arange(counted.provenance["vocab_size"]), counted.token_ids)
    token_ids = np.sort([*counted.token_ids[:-1], others[0]])
    replace(counted, token_ids=token_ids).save(tmp_path / "other")
    with pytest.raises(UserError, match="trained with another draft vocabulary"):
        train(replace(recipe, data=replace(recipe.data, vocabulary=str(tmp_path / "other"))))


def test_draft_vocabulary_can_be_reused_for_other_data(recipe, tmp_path, capfd):
    train(replace(recipe, run=replace(recipe.run, steps=1)))
    lines = Path(recipe.data.train[0]).read_text().splitlines()
    (tmp_path / "other.jsonl").write_text("\n".join(lines[:60]))
    data = replace(recipe.data, train=(str(tmp_path / "other.jsonl"),), vocabulary=str(Path(recipe.output) / "vocabulary"))
    other = replace(recipe, output=str(tmp_path / "other"), data=data, run=replace(recipe.run, steps=1))
    assert train(other).finished
    first, second = (load_drafter(Path(r.output) / "best").d2t for r in (recipe, other))
    assert torch.equal(first, second)


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_training_for_other_families(recipe, tmp_path, family):
    decoder = tiny_decoder(architecture=family, vocab_size=len(toy.WORDS), eos_token_ids=(toy.END,))
    folder = save_decoder(decoder, tmp_path / "target")
    toy.save_tokenizer(folder)
    recipe = replace(recipe, target=replace(recipe.target, model=str(folder)))
    result = train(recipe)
    assert result.finished
    history = losses(recipe)
    assert sum(history[step] for step in (10, 11, 12)) < sum(history[step] for step in (1, 2, 3))
    provenance = json.loads((result.best_folder / "provenance.json").read_text())
    assert provenance["recipe"]["target"]["backend"] == "fledge"


def test_training_for_a_transformers_target(recipe, tmp_path):
    """An architecture with no weight names in common with ours, learned positions and other norms."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path / "gpt2"
    sizes = {"vocab_size": len(toy.WORDS), "n_positions": 128, "n_embd": 32, "n_layer": 4, "n_head": 2}
    config = GPT2Config(**sizes, bos_token_id=toy.END, eos_token_id=toy.END, initializer_range=0.3)
    GPT2LMHeadModel(config).save_pretrained(folder)
    toy.save_tokenizer(folder)
    recipe = replace(recipe, target=replace(recipe.target, model=str(folder)))
    result = train(recipe)
    assert result.finished
    history = losses(recipe)
    assert sum(history[step] for step in (10, 11, 12)) < sum(history[step] for step in (1, 2, 3))
    provenance = json.loads((result.best_folder / "provenance.json").read_text())
    assert provenance["recipe"]["target"]["backend"] == "transformers"
    assert load_drafter(result.best_folder).config.hidden_size == 32
    sharded = replace(recipe, output=str(tmp_path / "sharded"), run=replace(recipe.run, shard_target=True))
    with pytest.raises(UserError, match="this target runs through transformers"):
        train(sharded)


def test_held_out_data_is_logged(recipe):
    """The log counts conversations of held-out prompts and too long prompts, and states draft-vocabulary coverage."""
    recipe = replace(
        recipe,
        data=replace(recipe.data, held_out_samples=30),
        evaluation=replace(recipe.evaluation, max_prompt_tokens=7),
    )
    told: list[str] = []
    (context,) = build_contexts([resolve(recipe, DistributedContext())], DistributedContext(), told.append)
    asked = {tuple(prompt) for prompt in context.prompts}
    assert asked.isdisjoint(tuple(sample.prompt.tolist()) for sample in context.train)
    data, held_out, left_out, vocabulary = told[:4]
    others = int(re.match(r"data: (\d+) of 240", data)[1]) - len(context.train)
    assert others > 30
    assert held_out == f"held out: 30 prompts, with all {others} conversations that begin with them"
    assert left_out.startswith(f"held out: {30 - len(asked)} of 30 prompts skipped (longer than")
    assert 0 < len(asked) < 30
    assert re.search(r"% of the answers, \d+\.\d\d% of the held-out ones", vocabulary)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("drafter", {"aux_layers": (1, 2, 9)}, "cannot be tapped after"),
        ("drafter", {"aux_layers": (2, 1)}, "must ascend"),
        ("drafter", {"draft_vocab_size": 5000}, "more than the target's"),
        ("drafter", {"own_head": False}, "draft_vocab_size must be null"),
        ("data", {"train": ("nowhere.jsonl",)}, "no such file"),
        ("data", {"micro_batch_size": 5000}, "lower global_batch_size"),
        ("evaluation", {"max_prompt_tokens": 2}, "no held-out prompt"),
        ("run", {"device": "cuda"}, "no CUDA device"),
    ],
)
def test_untrainable_recipes_are_refused(recipe, section, change, message):
    if section == "run" and torch.cuda.is_available():
        change, message = {"device": "cuda:99"}, "CUDA"
    changed = replace(recipe, **{section: replace(getattr(recipe, section), **change)})
    with pytest.raises((UserError, RuntimeError), match=message):
        train(changed)


def test_an_empty_data_set_is_refused(recipe, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(UserError, match="no sample is left"):
        train(replace(recipe, data=replace(recipe.data, train=(str(empty),))))


def test_an_eagle_3_drafter_is_upgraded(recipe, tmp_path):
    old = replace(recipe, output=str(tmp_path / "old"), drafter=replace(recipe.drafter, version="3"))
    train(old)
    new = replace(
        recipe,
        output=str(tmp_path / "new"),
        drafter=replace(recipe.drafter, init_from=str(tmp_path / "old" / "best")),
    )
    train(new)
    assert load_drafter(tmp_path / "new" / "best").config.version == "3.1"
    assert losses(new)[1] < losses(old)[1]


def test_the_command(recipe, tmp_path):
    import typer
    from typer.testing import CliRunner

    from fledge.cli.train import train as command

    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, [str(path), "run.steps=2"])
    assert result.exit_code == 0
    assert "acceptance length" in result.stderr
