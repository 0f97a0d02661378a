"""Resuming runs: after a real kill, with unchanged or changed settings; refused runs leave nothing behind."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config
from fledge.errors import UserError
from fledge.training.checkpoint import changed_settings, export_checkpoint
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, build_recipe
from fledge.training.targets import toy
from fledge.training.trainer import train
from tests.cli.test_errors import fledge

# Kills itself with SIGKILL while it writes its second checkpoint.
KILLED = """
import os, signal, sys, torch
torch.set_num_threads(1)
from fledge.training.recipe import load_recipe
from fledge.training.trainer import train

save, saved = torch.save, []

def half(state, file):
    saved.append(state)
    if len(saved) == 2:
        file.write(b"half")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    save(state, file)

torch.save = half
train(load_recipe(sys.argv[1]))
"""


def answers_file(path: Path, seed: int = 0, count: int = 80) -> Path:
    draw = random.Random(seed)
    pairs = (toy.conversation(draw) for _ in range(count))
    path.write_text("".join(json.dumps({"prompt_ids": p, "answer_ids": a}) + "\n" for p, a in pairs))
    return path


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    folder = toy.make(tmp_path_factory.mktemp("toy"), num_answers=1, steps=10)
    answers_file(folder / "answers.jsonl")
    return folder


def make_recipe(toy_folder: Path, output: Path, **sections: dict) -> Recipe:
    content = {
        "output": str(output),
        "target": {"model": str(toy_folder / "target")},
        "data": {
            "train": [str(toy_folder / "answers.jsonl")],
            "held_out_samples": 3,
            "sequence_length": 128,
            "micro_batch_size": 2,
        },
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": None},
        "objective": {"ttt_steps": 2},
        "run": {"steps": 6, "log_every": 1, "save_every": 2, "evaluate_every": 6, "device": "cpu"},
        "evaluation": {"max_new_tokens": 4, "depths": [2], "select_depth": 2},
    }
    for name, settings in sections.items():
        content[name] = content.get(name, {}) | settings if isinstance(settings, dict) else settings
    return build_recipe(content)


@pytest.fixture(scope="module")
def finished(toy_folder, tmp_path_factory) -> Recipe:
    """The recipe of a run that was not interrupted."""
    recipe = make_recipe(toy_folder, tmp_path_factory.mktemp("finished"))
    train(recipe)
    return recipe


def losses(output: str | Path) -> dict[int, float]:
    return {x["step"]: x["loss"] for x in read_journal(Path(output) / "log.jsonl") if x["kind"] == "train"}


def weights(output: str | Path, step: int = 6) -> dict[str, torch.Tensor]:
    return torch.load(Path(output) / "checkpoints" / f"step-{step:08d}.pt", weights_only=True)["drafter"]


def test_killed_run_resumes_exactly(finished, tmp_path):
    killed = replace(finished, output=str(tmp_path / "run"))
    path = tmp_path / "recipe.yaml"
    path.write_text(killed.to_yaml())
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(path)], env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert process.returncode == -9, process.stderr
    folder = tmp_path / "run" / "checkpoints"
    assert [p.name for p in folder.glob("step-*")] == ["step-00000002.pt"]
    assert [p.read_bytes() for p in folder.glob(".step-00000004.pt.*")] == [b"half"]
    assert train(killed).finished
    assert losses(killed.output) == losses(finished.output)
    assert len(losses(finished.output)) == 6
    for name, value in weights(finished.output).items():
        assert torch.equal(value, weights(killed.output)[name]), name
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafter": {"norm_output": False}}, "drafter.norm_output was null, now false"),
        ({"drafter": {"norm_before_residual": True}}, "drafter.norm_before_residual was false, now true"),
        ({"drafter": {"window": 16}}, "drafter.window was null, now 16"),
        ({"drafter": {"aux_layers": [0, 1, 2]}}, r"drafter.aux_layers was \[1, 2, 3\], now \[0, 1, 2\]"),
        ({"drafter": {"num_layers": 2}}, "drafter.num_layers was 1, now 2"),
        ({"objective": {"loss": "mix", "ttt_steps": 3}}, "objective.ttt_steps was 2, now 3; objective.loss was"),
        ({"data": {"augmentation": {"system_probability": 0.5}}}, "data.augmentation.system_probability was 0.0, now 0.5"),
        ({"data": {"held_out_samples": 5}}, "data.held_out_samples was 3, now 5"),
        ({"optimizer": {"kind": "muon"}}, "optimizer.kind"),
        ({"data": {"global_batch_size": 4}}, "data.global_batch_size was 2, now 4"),
        ({"seed": 1}, "seed was 0, now 1"),
    ],
    ids=str,
)
def test_resume_refuses_other_settings(finished, toy_folder, change, message):
    before = (Path(finished.output) / "recipe.yaml").read_text()
    with pytest.raises(UserError, match=message):
        train(make_recipe(toy_folder, finished.output, **change))
    assert (Path(finished.output) / "recipe.yaml").read_text() == before


def test_resume_refuses_another_target(finished, toy_folder, tmp_path):
    other = tmp_path / "target"
    other.symlink_to(toy_folder / "target")
    with pytest.raises(UserError, match=r"target\.model was"):
        train(make_recipe(toy_folder, finished.output, target={"model": str(other)}))


def test_settings_that_may_change():
    recipe = build_recipe({"output": "a", "target": {"model": "a/toy"}, "data": {"train": ["x"]}, "run": {"steps": 1}})
    before = recipe.to_dict()
    del before["drafter"]["qk_norm"]  # a setting that an earlier version did not have
    moved = replace(
        recipe,
        output="b",
        target=replace(recipe.target, model="b/toy"),
        data=replace(recipe.data, train=("y",), cache="c"),
        run=replace(recipe.run, steps=9, log_every=3, keep=5, device="cpu"),
        evaluation=replace(recipe.evaluation, max_new_tokens=5),
        objective=replace(recipe.objective, recompute=True),
    )
    assert changed_settings(before, moved) == ([], [])
    slower = replace(moved, optimizer=replace(moved.optimizer, learning_rate=5e-4))
    assert changed_settings(before, slower) == ([], ["optimizer.learning_rate was 0.001, now 0.0005"])
    normed = replace(moved, drafter=replace(moved.drafter, qk_norm=True))
    assert changed_settings(before, normed) == (["drafter.qk_norm was false, now true"], [])


def copy_of_checkpoint(finished: Recipe, output: Path) -> Path:
    target = output / "checkpoints" / "step-00000006.pt"
    target.parent.mkdir(parents=True)
    target.write_bytes((Path(finished.output) / "checkpoints" / target.name).read_bytes())
    return target


def test_longer_run_logs_changed_settings(finished, toy_folder, tmp_path, capfd):
    copy_of_checkpoint(finished, tmp_path)
    longer = make_recipe(
        toy_folder, tmp_path, run={"steps": 7}, evaluation={"max_new_tokens": 5}, optimizer={"learning_rate": 1e-4}
    )
    assert train(longer).step == 7
    assert "changed setting: optimizer.learning_rate was 0.001, now 0.0001" in capfd.readouterr().err


def test_other_data_of_the_same_size_is_refused(finished, toy_folder, tmp_path):
    """Without a draft vocabulary, which has its own hash of the data."""
    copy_of_checkpoint(finished, tmp_path)
    lines = [json.loads(line) for line in (toy_folder / "answers.jsonl").read_text().splitlines()]
    for line in lines:
        line["answer_ids"][0] = toy.IDS["moth"]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(UserError, match=r"data was .* now it is"):
        train(make_recipe(toy_folder, tmp_path, data={"train": [str(tmp_path / "other.jsonl")]}, run={"steps": 7}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"train": ["empty.jsonl"]}}, "no sample is left"),
        ({"data": {"micro_batch_size": 500}}, "one step takes 500"),
        ({"drafter": {"init_from": "nowhere", "draft_vocab_size": 64}}, "nowhere"),
        ({"drafter": {"init_from": "best", "draft_vocab_size": 64, "aux_layers": [0, 1, 2]}}, "init_from: its aux_layer_ids"),
    ],
    ids=["no data", "too little data", "no drafter", "another drafter"],
)
def test_refused_run_leaves_no_files(finished, toy_folder, tmp_path, monkeypatch, change, message):
    monkeypatch.chdir(finished.output)
    Path("empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match=message):
        train(make_recipe(toy_folder, tmp_path / "run", **change))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("where", ["checkpoints/step-00000006.pt", "checkpoints", "."])
def test_export_of_a_checkpoint(finished, tmp_path, monkeypatch, capsys, where):
    """`fledge export` takes a checkpoint file, checkpoints/ (the newest) or the run (the best, not always the newest)."""
    run = tmp_path / "run"
    shutil.copytree(finished.output, run)
    record = json.loads((run / "best" / "provenance.json").read_text())
    (run / "best" / "provenance.json").write_text(json.dumps(record | {"step": 3}))
    code, out, _ = fledge(monkeypatch, capsys, "export", run / where, tmp_path / "out")
    assert code == 0
    assert "vllm serve" in out
    drafter = load_drafter(tmp_path / "out", load_config(finished.target.model))
    expected = load_drafter(run / "best").state_dict() if where == "." else weights(finished.output)
    for name, value in expected.items():
        assert torch.equal(drafter.state_dict()[name], value), name
    record = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert (record["step"], record["recipe"]["seed"]) == (3 if where == "." else 6, 0)


def test_non_checkpoint_is_refused(tmp_path):
    torch.save({"weights": 1}, tmp_path / "other.pt")
    with pytest.raises(UserError, match="not a checkpoint of fledge train"):
        export_checkpoint(tmp_path / "other.pt", tmp_path / "out")
