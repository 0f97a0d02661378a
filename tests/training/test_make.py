"""`fledge make`: a drafter for a toy target in one command, also when it is killed and resumed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_config, save_decoder
from fledge.config import RopeConfig
from fledge.engine import build, offline
from fledge.errors import UserError
from fledge.training import journal
from fledge.training import make as making
from fledge.training.arm import OutOfMemory
from fledge.training.datagen import answers as make_answers
from fledge.training.datagen.answers import Progress, sizes, split
from fledge.training.datagen.regenerate import RegenerateReport
from fledge.training.distributed import DistributedContext
from fledge.training.make import _train, make
from fledge.training.make_plan import MakePlan
from fledge.training.recipe import build_recipe
from fledge.training.targets import toy
from tests.checkpoints.packers import write_quantised
from tests.tiny import FAMILY_SETTINGS, tiny_decoder
from tests.training.chat import chat_tokenizer, prompts_of_toy
from tests.training.test_make_plan import plan_for

COMMAND = [sys.executable, "-m", "fledge", "make", "toy", "--device", "cpu", "--hours", "0.03", "--out"]
STATED_LENGTH = 3.0  # acceptance length at depth 5 that the toy's drafter must reach; the full training gives about 4.7


def kill_when(out: Path, reached: Callable[[], bool]) -> None:
    """Starts the command and kills it with SIGKILL as soon as `reached()`."""
    process = subprocess.Popen(
        [*COMMAND, str(out)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 240
        while not reached():
            assert process.poll() is None, "the command ended before it was killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.timeout(1200)
def test_make_resumes_after_two_kills(tmp_path):
    out = tmp_path / "made"
    answers, checkpoints = out / "answers.jsonl", out / "run" / "checkpoints"
    kill_when(out, lambda: answers.is_file() and answers.stat().st_size > 0)
    assert "answers" not in json.loads((out / "make.json").read_text())["done"]
    before = answers.read_text().splitlines()[:-1]
    kill_when(out, lambda: checkpoints.is_dir() and any(checkpoints.glob("step-*.pt")))
    step = max(int(path.stem.removeprefix("step-")) for path in checkpoints.glob("step-*.pt"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # More time than the steps need, so that a busy machine does not make fewer of them.
    command = [*COMMAND, str(out), "--hours", "0.3"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert f"resuming at step {step:,}" in done.stderr
    assert done.stdout.startswith("the plan, for 0.3 hours:\n  target ")
    for command in ("fledge serve", "vllm serve", "sglang.launch_server"):
        assert command in done.stdout
    lines = answers.read_text().splitlines()
    assert lines[: len(before)] == before  # no prompt is answered twice, no answer is lost
    assert len({json.loads(line)["id"] for line in lines}) == len(lines)
    drafter = load_drafter(out / "drafter", load_config(out / "toy" / "target"))
    assert drafter.config.version == "3.1"
    record = json.loads((out / "drafter" / "provenance.json").read_text())
    assert record["evaluation"]["acceptance_length"]["5"] > STATED_LENGTH
    assert {"README.md", "curves.png"} <= {path.name for path in (out / "drafter").iterdir()}
    assert json.loads((out / "make.json").read_text())["done"] == ["answers", "training", "drafter"]
    with pytest.raises(UserError, match="was started with model 'toy', now it is 'other'"):
        make("other", out, device="cpu")


@pytest.mark.parametrize("kind", ["Qwen3MoeForCausalLM", "fp8-tensor"])
def test_targets_with_experts_and_in_fp8(kind, tmp_path, monkeypatch):
    """The states come from the target as it is served. The drafter's quality is not checked: it trains for seconds."""
    settings = {"architecture": kind, **FAMILY_SETTINGS[kind]} if kind in FAMILY_SETTINGS else {}
    monkeypatch.setattr(toy, "TARGET", replace(toy.TARGET, **settings))
    decoder = toy.learned_target(60)
    target = save_decoder(decoder, tmp_path / "target") if settings else write_quantised(decoder, tmp_path, kind)[0]
    toy.save_tokenizer(target)
    prompts = prompts_of_toy(tmp_path / "prompts.jsonl", 400)
    began = time.monotonic()
    made = make(str(target), tmp_path / "out", hours=0.003, prompts=prompts, device="cpu", log=lambda _: None)
    assert time.monotonic() - began < 180
    assert load_drafter(made.folder, load_config(target)).config.version == "3.1"
    assert made.acceptance_length["5"] >= 1.0
    # The first step may be the best one: a few seconds of training may not raise acceptance.
    assert max(record["step"] for record in journal.read_journal(tmp_path / "out" / "run" / "log.jsonl")) > 0


def test_an_architecture_that_fledge_does_not_run_is_refused_before_the_plan(tmp_path):
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = {"architectures": ["OlmoForCausalLM"], "model_type": "olmo", "vocab_size": len(toy.WORDS), **shape}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    toy.save_tokenizer(tmp_path / "target")
    logged: list[str] = []
    with pytest.raises(UserError, match=r"does not support its architecture \(OlmoForCausalLM\).*--endpoint"):
        make(str(tmp_path / "target"), tmp_path / "out", device="cpu", log=logged.append)
    assert not logged
    assert not (tmp_path / "out").exists()


def test_prompts_are_held_out_of_all_files(tmp_path):
    lines = [json.dumps({"id": f'n"{number}', "messages": [{"id": "other"}]}) + "\n" for number in range(50)]
    (tmp_path / "answers.jsonl").write_text("".join(lines))
    (tmp_path / "again.jsonl").write_text("".join(lines[::2]))
    split([[tmp_path / "answers.jsonl"], [tmp_path / "again.jsonl"]], tmp_path / "data")
    train, held_out = ((tmp_path / "data" / f"{name}.jsonl").read_text().splitlines(True) for name in ("train", "held-out"))
    assert len(held_out) == 5
    assert len(set(train)) == 45
    assert sorted(train) == sorted(line for line in [*lines, *lines[::2]] if line not in held_out)


def test_prompts_are_held_out_when_the_first_file_has_no_answers(tmp_path):
    """All prompts of a file may be too long or contaminated; then only the target's own prompts remain."""
    (tmp_path / "answers.jsonl").touch()
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"id": f"self-{number}"}) + "\n" for number in range(30)))
    split([[tmp_path / "answers.jsonl"], [tmp_path / "own.jsonl"]], tmp_path / "data")
    train, held_out = ((tmp_path / "data" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "held-out"))
    assert (len(train), len(held_out)) == (27, 3)


def test_sizes_are_estimated_from_first_conversations(tmp_path, monkeypatch):
    monkeypatch.setattr(make_answers, "SIZED_LINES", 10)
    turn = {"prompt_ids": [1] * 30, "answer_ids": [2] * 20}
    (tmp_path / "train.jsonl").write_text((json.dumps({"id": "a", "turns_ids": [turn, turn]}) + "\n") * 40)
    assert sizes(tmp_path / "train.jsonl") == (pytest.approx(40 * 50), 50)


def test_make_without_plotting_packages(tmp_path, monkeypatch):
    """Works without matplotlib and tensorboard. Few prompts are answered greedily, then sampled; the target writes more."""
    for package in ("matplotlib", "tensorboard", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, package, None)
    told: list[str] = []
    monkeypatch.setattr(journal.progress, "say", told.append)
    prompts = prompts_of_toy(tmp_path / "prompts.jsonl", 40)
    began = time.monotonic()
    made = make("toy", tmp_path / "out", hours=0.008, prompts=prompts, device="cpu", twin=True, log=told.append)
    assert time.monotonic() - began < 120
    assert any("matplotlib is not installed" in text for text in told)
    assert "curves.png" not in (made.folder / "README.md").read_text()
    assert load_drafter(made.folder).config.version == "3.1"
    assert load_drafter(tmp_path / "out" / "twin").config.version == "3"
    ids = [[json.loads(line)["id"] for line in (tmp_path / "out" / f"answers{kind}.jsonl").open()] for kind in ("", "-sampled")]
    assert sorted(ids[0]) == sorted(ids[1]) == sorted(map(str, range(40)))
    log = (tmp_path / "out" / "run" / "eagle3.1" / "log.jsonl").read_text()
    again = make("toy", tmp_path / "out", hours=0.02, prompts=prompts, device="cpu", twin=True, log=told.append)
    assert "the training is already complete, with a time limit of 0.008 hours" in "".join(told)
    with pytest.raises(UserError, match="was started with decontaminate None"):
        make("toy", tmp_path / "out", prompts=prompts, device="cpu", twin=True, decontaminate=[prompts], log=told.append)
    assert again.acceptance_length == made.acceptance_length  # the second call does not train again
    assert log == (tmp_path / "out" / "run" / "eagle3.1" / "log.jsonl").read_text()
    trained = {json.loads(line)["id"] for line in (tmp_path / "out" / "data" / "train.jsonl").open()}
    held_out = {json.loads(line)["id"] for line in (tmp_path / "out" / "data" / "held-out.jsonl").open()}
    assert len(held_out) == 4
    assert not trained & held_out


def test_answering_engine_is_freed_before_training(tmp_path, monkeypatch):
    """Its KV cache would leave a seventh of the GPU for training. The executor has reference cycles: it needs gc.collect()."""
    built: list[weakref.ref[object]] = []

    def build_captured(*args, **options):
        engine = build.build_engine(*args, **options, capture=False)
        built.extend((weakref.ref(engine), weakref.ref(engine.executor.batch.cache)))
        return engine

    monkeypatch.setattr(offline, "build_engine", build_captured)
    target = toy.make(tmp_path / "toy", num_answers=1) / "target"
    plan = MakePlan.of(
        str(target), load_config(target), making.Tokenizer(target), torch.device("cpu"), 1.0, prompts_of_toy(tmp_path / "p", 9)
    )
    plan = replace(plan, hours=10 / 3600 / 0.35)
    progress = Progress.load(tmp_path / "make.json", {})
    make_answers.answer(plan, load_config(target), making.Tokenizer(target), tmp_path, progress, (), lambda _: None)
    assert [reference() for reference in built] == [None, None]


def test_first_answers_are_made_when_loading_uses_the_budget(tmp_path):
    """On a busy machine, loading took 0.9 s of a 3.6 s budget, and there were no answers and no drafter."""
    target = toy.make(tmp_path / "toy", num_answers=1, steps=10) / "target"
    tokenizer, shape = making.Tokenizer(target), load_config(target)
    file = prompts_of_toy(tmp_path / "p", 20)
    repeated = tmp_path / "r"  # the first prompt ten times, then the others
    repeated.write_text(file.read_text().splitlines(True)[0] * 9 + file.read_text())
    for prompts, name in ((file, "file"), (repeated, "repeated"), (None, "self-written")):
        plan = MakePlan.of(str(target), shape, tokenizer, torch.device("cpu"), 1.0, prompts)
        out = tmp_path / name
        out.mkdir()
        make_answers.answer(
            replace(plan, hours=1e-9), shape, tokenizer, out, Progress(out / "make.json", {}), (), lambda _: None
        )
        lines = [len((out / "data" / file).read_text().splitlines()) for file in ("held-out.jsonl", "train.jsonl")]
        assert lines[0] == 2
        # Rounds have 8, 16 and 32 prompts. With repeats, the 19 other prompts are in the third round.
        assert sum(lines) == (20 if name == "repeated" else make_answers.MIN_ANSWERS)


def test_first_answers_have_their_own_time_limit(tmp_path, monkeypatch):
    limits: list[float] = []

    def answers_nothing(*_, max_seconds, **__) -> RegenerateReport:
        limits.append(max_seconds)
        return RegenerateReport()

    monkeypatch.setattr(make_answers, "_generator", lambda *_: None)
    monkeypatch.setattr(make_answers, "regenerate", answers_nothing)
    plan = plan_for(prompts=prompts_of_toy(tmp_path / "p", 20))
    with pytest.raises(UserError, match="0 answers are too few"):
        make_answers.answer(plan, None, chat_tokenizer(), tmp_path, Progress(tmp_path / "make.json", {}), (), lambda _: None)
    in_budget, first = limits[: len(plan.answer_parts)], limits[len(plan.answer_parts) :]
    assert min(in_budget) > 1000
    assert len(first) == 3  # rounds of 8, 16 and 32, with 20 prompts
    assert max(first) <= make_answers.MIN_SECONDS


def test_resume_with_more_time_spreads_evaluations(tmp_path):
    plan = replace(plan_for(), hours=0.1)
    turn = {"prompt_ids": [1] * 30, "answer_ids": [2] * 20}
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text((json.dumps({"id": "a", "turns_ids": [turn]}) + "\n") * 40)
    recipes = [
        making._recipe(replace(plan, hours=hours), tmp_path, Progress(tmp_path / "make.json", {}), lambda _: None)
        for hours in (0.1, 3.0)
    ]
    short, long = (recipe.run for recipe in recipes)
    assert short.evaluate_seconds == pytest.approx(short.max_seconds / 18)
    assert short.save_seconds == pytest.approx(short.max_seconds / 8)
    assert long.max_seconds == pytest.approx(3 * 3600 - 120, abs=5)
    assert long.evaluate_seconds == pytest.approx(long.max_seconds / 18)
    assert long.save_seconds == 120
    assert replace(recipes[1], run=short) == recipes[0]  # all other settings are equal


@pytest.mark.parametrize("on_all", [True, False])
def test_out_of_memory_makes_smaller_micro_batches(monkeypatch, on_all):
    """Only if all processes ran out of memory (`on_all`); otherwise the error ends this process and with it the others."""
    tried = []

    def fails_twice(recipe, **_):
        tried.append((recipe.data.micro_batch_size, recipe.objective.recompute))
        if len(tried) < 3:
            raise OutOfMemory("no memory", on_all=on_all)
        return SimpleNamespace(finished=True)

    monkeypatch.setattr(making, "train", fails_twice)
    data = {"train": ["x"], "micro_batch_size": 8, "global_batch_size": 8}
    recipe = build_recipe({"output": "o", "target": {"model": "m"}, "data": data, "run": {"steps": 1}})
    told: list[str] = []
    if not on_all:
        with pytest.raises(OutOfMemory, match="no memory"):
            _train(recipe, False, told.append, DistributedContext())
        assert tried == [(8, False)]
        return
    assert _train(recipe, False, told.append, DistributedContext()).data.micro_batch_size == 2
    assert tried == [(8, False), (4, True), (2, True)]
    assert len(told) == 2


def test_progress_is_kept(tmp_path):
    progress = Progress.load(tmp_path / "make.json", {"model": "a"})
    progress.seconds = 3.0
    progress.finish("answers")
    again = Progress.load(tmp_path / "make.json", {"model": "a"})
    assert (again.seconds, again.done) == (pytest.approx(3.0, abs=0.5), ("answers",))
    with pytest.raises(UserError, match="was started with model 'a', now it is 'b'"):
        Progress.load(tmp_path / "make.json", {"model": "b"})


def test_the_time_of_a_killed_process_counts_up_to_its_last_answer(tmp_path):
    progress = Progress.load(tmp_path / "make.json", {"model": "a"})
    progress.save()
    (tmp_path / "answers-sampled.jsonl").touch()
    now = (tmp_path / "make.json").stat().st_mtime
    os.utime(tmp_path / "answers-sampled.jsonl", (now, now + 100))
    assert Progress.load(tmp_path / "make.json", {"model": "a"}).spent == pytest.approx(100, abs=1)
    progress.finish("answers")
    os.utime(tmp_path / "make.json", (now, now))
    assert Progress.load(tmp_path / "make.json", {"model": "a"}).spent < 1


def test_longrope_answers_use_the_same_factors_as_states():
    """An engine for short texts would use the short factors; states, and a server by default, use the long ones."""
    rope = RopeConfig(1e4, "longrope", 8.0, 64, attention_factor=1.5, short_factor=(1.0, 2.0, 3.0), long_factor=(2.0, 4.0, 6.0))
    decoder = tiny_decoder(architecture="Phi3ForCausalLM", rope=rope)
    plan = SimpleNamespace(endpoint=None, model=decoder, sequence_length=32)
    trained = decoder.rotary.inverse_frequencies.clone()
    generator = make_answers._generator(plan, decoder.config, "cpu")
    assert torch.equal(generator.engine.decoder.rotary.inverse_frequencies, trained)
    assert generator.max_model_len == 32
