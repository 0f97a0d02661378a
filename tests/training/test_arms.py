"""`fledge train --arms`: several drafters are trained on the same batches, with the same results as training each alone."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from fledge.checkpoints.eagle3 import load_drafter
from fledge.cli.train import train as command
from fledge.errors import UserError
from fledge.training.arm import Arm
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, RecipeError, arm_recipes, build_recipe, with_overrides
from fledge.training.targets import toy
from fledge.training.targets.target import DecoderTarget
from fledge.training.trainer import Trainer, train, train_arms

ARMS = {
    "eagle3": "drafter.version=3",
    "eagle3.1": "drafter.version=3.1 optimizer.learning_rate=2e-3 objective.decay=0.9",
    "bounded": "drafter.window=8 drafter.num_layers=2 optimizer.kind=muon",
}
TEXTS = [f"{name}={keys}" for name, keys in ARMS.items()]


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    return toy.make(tmp_path_factory.mktemp("toy"), num_answers=120, steps=25)


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
            "global_batch_size": 4,
        },
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 6, "log_every": 2, "save_every": 2, "evaluate_every": 3, "device": "cpu"},
        "evaluation": {"max_new_tokens": 16, "depths": [2, 4], "select_depth": 4},
    }
    return build_recipe(content)


def weights(output: str | Path, step: int = 6) -> dict[str, torch.Tensor]:
    return torch.load(Path(output) / "checkpoints" / f"step-{step:08}.pt", weights_only=True)["drafter"]


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def figures(output: str | Path) -> list[dict]:
    timed = ("time", "tokens_per_second")
    return [
        {key: value for key, value in line.items() if key not in timed} for line in read_journal(Path(output) / "log.jsonl")
    ]


def test_arms_equal_the_same_recipes_trained_alone(recipe, tmp_path, monkeypatch):
    """Weights, logs and evaluations are bit-identical; the target runs once per batch for all arms."""
    passes = []
    original = DecoderTarget.states
    monkeypatch.setattr(DecoderTarget, "states", lambda self, *a, **k: (passes.append(1), original(self, *a, **k))[1])
    results = train_arms(recipe, TEXTS)
    shared = len(passes)
    assert list(results) == list(ARMS)
    for name, keys in ARMS.items():
        passes.clear()
        alone = replace(with_overrides(recipe, keys.split()), output=str(tmp_path / "alone" / name))
        result = train(alone)
        together = Path(recipe.output) / name
        assert_equal(weights(together), weights(alone.output))
        assert figures(together) == figures(alone.output)
        assert results[name].best_acceptance_length == result.best_acceptance_length
        assert results[name].best_folder == together / "best"
        # The same number of passes, except the few that measure each arm's start.
        assert shared - len(passes) == len(ARMS) - 1
    configs = {name: load_drafter(Path(recipe.output) / name / "best").config for name in ARMS}
    assert [(config.version, config.window, config.num_layers) for config in configs.values()] == [
        ("3", None, 1),
        ("3.1", None, 1),
        ("3.1", 8, 2),
    ]


def test_run_killed_between_arms_resumes_from_last_common_step(recipe, tmp_path, monkeypatch):
    whole = replace(recipe, output=str(tmp_path / "whole"))
    train_arms(whole, TEXTS[:2])

    class Killed(BaseException):
        pass

    original = Arm.save

    def save(self, step, *args):
        if step == 4 and self.folder.name == "eagle3.1":
            raise Killed
        original(self, step, *args)

    monkeypatch.setattr(Arm, "save", save)
    with pytest.raises(Killed):
        train_arms(recipe, TEXTS[:2])
    monkeypatch.undo()
    kept = {
        name: sorted(p.name for p in (Path(recipe.output) / name / "checkpoints").iterdir()) for name in ("eagle3", "eagle3.1")
    }
    assert kept["eagle3"][-1] == "step-00000004.pt"
    assert kept["eagle3.1"][-1] == "step-00000002.pt"
    assert train_arms(recipe, TEXTS[:2])["eagle3"].finished
    for name in ("eagle3", "eagle3.1"):
        assert_equal(weights(Path(recipe.output) / name), weights(tmp_path / "whole" / name))
        assert figures(Path(recipe.output) / name) == figures(tmp_path / "whole" / name)


def test_resumed_run_refuses_a_new_arm(recipe):
    train_arms(replace(recipe, run=replace(recipe.run, steps=2)), TEXTS[:1])
    with pytest.raises(UserError, match="no checkpoint of the same step"):
        train_arms(recipe, TEXTS[:2])


def test_an_arm_can_be_resumed_alone(recipe):
    train_arms(recipe, TEXTS[:2])
    alone = replace(with_overrides(recipe, ARMS["eagle3"].split()), output=f"{recipe.output}/eagle3")
    assert train(replace(alone, run=replace(alone.run, steps=8))).step == 8


@pytest.mark.parametrize(
    ("arm", "said"),
    [
        ("plain=data.augmentation.system_probability=0.5", r"data\.augmentation\.system_probability must be the same"),
        ("other=drafter.aux_layers=[1,2]", r"drafter\.aux_layers must be the same"),
        ("other=objective.ttt_steps=4", r"objective\.ttt_steps must be the same"),
        ("other=seed=3", "seed must be the same"),
        ("other=drafter.windw=3", "did you mean drafter.window"),
        ("no-name", "write NAME=KEY=VALUE"),
        ("../up=seed=3", "write NAME=KEY=VALUE"),
    ],
)
def test_settings_that_arms_must_share_are_refused_by_name(recipe, arm, said):
    with pytest.raises(RecipeError, match=said):
        arm_recipes(recipe, [TEXTS[0], arm])
    assert not Path(recipe.output).exists()


def test_duplicate_names_and_patience_are_refused(recipe):
    with pytest.raises(RecipeError, match="eagle3 is given twice"):
        arm_recipes(recipe, [TEXTS[0], TEXTS[0]])
    with pytest.raises(RecipeError, match=r"run\.patience"):
        arm_recipes(replace(recipe, run=replace(recipe.run, patience=2)), TEXTS)


def test_command_trains_and_names_arms(recipe, tmp_path, monkeypatch):
    app = typer.Typer()
    app.command()(command)
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    arms = [word for text in TEXTS[:2] for word in ("--arms", text)]
    run = CliRunner().invoke(app, [str(path), "run.steps=2", *arms, "--json"])
    assert run.exit_code == 0, run.output
    found = json.loads(run.stdout)
    assert {name: one["step"] for name, one in found.items()} == {"eagle3": 2, "eagle3.1": 2}
    assert "eagle3.1: step 2: acceptance length" in run.stderr
    original = Trainer._train_step
    monkeypatch.setattr(
        Trainer, "_train_step", lambda self, *a, **k: (signal.raise_signal(signal.SIGINT), original(self, *a, **k))
    )
    assert CliRunner().invoke(app, [str(path), *arms]).exit_code == 130
