"""`fledge make`: a toy's drafter in one command, killed twice on the way; and the plan it prints."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config, save_decoder
from fledge.errors import UserError
from fledge.training import make as making
from fledge.training import toy
from fledge.training.make import Progress, _split, _train, make
from fledge.training.make_plan import MakePlan, expected_acceptance
from fledge.training.recipe import build_recipe
from fledge.training.trainer import TrainingStopped
from tests.checkpoints.packers import write_quantised
from tests.tiny import FAMILY_SETTINGS, tiny_model_config
from tests.training.chat import TOOLS, chat_tokenizer

COMMAND = [sys.executable, "-m", "fledge", "make", "toy", "--hours", "0.03", "--device", "cpu", "--out"]


def kill_when(out: Path, reached: Callable[[], bool]) -> None:
    """kill -9, as soon as something is there."""
    process = subprocess.Popen(
        [*COMMAND, str(out)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 240
        while not reached():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_toy_killed_twice_on_the_way(tmp_path):
    out = tmp_path / "made"
    answers, checkpoints = out / "answers.jsonl", out / "run" / "checkpoints"
    kill_when(out, lambda: answers.is_file() and answers.stat().st_size > 0)
    assert "answers" not in json.loads((out / "make.json").read_text())["done"]
    before = answers.read_text().splitlines()[:-1]
    kill_when(out, lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*.pt")))
    step = max(int(path.stem.removeprefix("step-")) for path in checkpoints.glob("step-*.pt"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*COMMAND, str(out)], env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {step:,}" in done.stderr
    assert done.stdout.startswith("the plan, for 0.03 hours:\n  target ")
    for command in ("fledge serve", "vllm serve", "sglang.launch_server"):
        assert command in done.stdout
    lines = answers.read_text().splitlines()
    assert lines[: len(before)] == before  # nothing was answered twice, nothing lost
    assert len({json.loads(line)["id"] for line in lines}) == len(lines)
    drafter = load_drafter(out / "drafter", load_config(out / "toy" / "target"))
    assert drafter.config.version == "3.1"
    record = json.loads((out / "drafter" / "provenance.json").read_text())
    # About 4.7 after the 300 steps that two idle cores make in the time given. A busy machine makes too few to learn.
    assert record["evaluation"]["acceptance_length"]["5"] > (2.0 if record["step"] >= 150 else 0.99)
    assert {"README.md", "curves.png"} <= {path.name for path in (out / "drafter").iterdir()}
    assert json.loads((out / "make.json").read_text())["done"] == ["answers", "drafter"]
    with pytest.raises(UserError, match="was begun with model 'toy', now it is 'other'"):
        make("other", out, device="cpu")


@pytest.mark.parametrize("kind", ["Qwen3MoeForCausalLM", "fp8-tensor"])
def test_targets_with_experts_and_in_fp8(kind, tmp_path, monkeypatch):
    """States come from the target as it is served; how much is learnt in seconds does not matter."""
    settings = {"architecture": kind, **FAMILY_SETTINGS[kind]} if kind in FAMILY_SETTINGS else {}
    monkeypatch.setattr(toy, "TARGET", replace(toy.TARGET, **settings))
    decoder = toy.learned_target(60)
    target = save_decoder(decoder, tmp_path / "target") if settings else write_quantised(decoder, tmp_path, kind)[0]
    toy.save_tokenizer(target)
    draw, prompts = random.Random(0), tmp_path / "prompts.jsonl"
    texts = [" ".join(toy.WORDS[token] for token in toy.conversation(draw)[0][1:-1]) for _ in range(400)]
    prompts.write_text("".join(json.dumps({"id": str(i), "turns": [text]}) + "\n" for i, text in enumerate(texts)))
    began = time.monotonic()
    made = make(str(target), tmp_path / "out", hours=0.003, prompts=prompts, device="cpu", say=lambda _: None)
    assert time.monotonic() - began < 180
    assert load_drafter(made.folder, load_config(target)).config.version == "3.1"
    assert made.acceptance_length["5"] >= 1.0
    record = json.loads((made.folder / "provenance.json").read_text())
    assert record["step"] > 0


def plan_for(tokenizer=None, **sizes) -> MakePlan:
    shape = SimpleNamespace(**vars(tiny_model_config(**sizes)))
    return MakePlan.of("some/model", shape, tokenizer or chat_tokenizer(), torch.device("cpu"), hours=2.0)


def test_the_plan_says_what_will_be_done():
    text = plan_for(chat_tokenizer(TOOLS), num_layers=28, vocab_size=151_936, hidden_size=1536, max_positions=32_768).describe()
    for words in ("with and without thinking", "draft vocabulary 32,000 tokens", "window 2048", "target layers 2, 14, 25"):
        assert words in text
    assert "no thinking mode" in plan_for().describe()
    with pytest.raises(UserError, match="no chat template"):
        plan_for(chat_tokenizer(None))


def test_the_plan_becomes_a_recipe():
    plan = plan_for(num_layers=8)
    content = plan.recipe(Path("out"), Path("train.jsonl"), Path("held.jsonl"), [100] * 500, plan.train_seconds(600.0))
    recipe = build_recipe(content)
    assert recipe.run.max_seconds == pytest.approx(0.85 * (7200 - 600))
    assert recipe.data.sequence_length == 128
    steps = sum([100] * 500) * recipe.run.epochs / (recipe.data.global_batch_size * recipe.data.sequence_length)
    assert steps > 250
    assert recipe.data.augmentation.active


def test_expectations_grow_with_the_data():
    lengths = [expected_acceptance(tokens) for tokens in (1e5, 1e7, 2e7, 1e8, 1e10)]
    assert lengths == sorted(lengths)
    assert expected_acceptance(39e6) == pytest.approx(2.9)


def test_conversations_are_held_out_by_their_ids(tmp_path):
    lines = [json.dumps({"id": f"n{number}"}) + "\n" for number in range(50)]
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    _split(tmp_path / "answers.jsonl", tmp_path / "data")
    train, held_out = ((tmp_path / "data" / f"{name}.jsonl").read_text().splitlines(True) for name in ("train", "held-out"))
    assert (len(train), len(held_out)) == (45, 5)
    assert sorted(train + held_out) == sorted(lines)


def test_memory_that_runs_out_makes_smaller_micro_batches(monkeypatch):
    tried = []

    def fails_twice(recipe):
        tried.append((recipe.data.micro_batch_size, recipe.objective.recompute))
        if len(tried) < 3:
            raise TrainingStopped("no memory") from torch.OutOfMemoryError("CUDA out of memory")
        return SimpleNamespace(finished=True)

    monkeypatch.setattr(making, "train", fails_twice)
    data = {"train": ["x"], "micro_batch_size": 8, "global_batch_size": 8}
    recipe = build_recipe({"output": "o", "target": {"model": "m"}, "data": data, "run": {"steps": 1}})
    told: list[str] = []
    assert _train(recipe, told.append).data.micro_batch_size == 2
    assert tried == [(8, False), (4, True), (2, True)]
    assert len(told) == 2


def test_progress_is_kept(tmp_path):
    progress = Progress.load(tmp_path / "make.json", {"model": "a"})
    progress.answer_seconds = 3.0
    progress.finish("answers")
    again = Progress.load(tmp_path / "make.json", {"model": "a"})
    assert (again.answer_seconds, again.done) == (3.0, ("answers",))
