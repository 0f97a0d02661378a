"""Training with two processes equals training with one process and twice the rows."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.errors import UserError
from fledge.training.context import resolve
from fledge.training.distributed import DistributedContext
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, build_recipe, load_recipe
from fledge.training.targets import toy
from fledge.training.trainer import train
from tests.training.chat import prompts_of_toy

# Checks that a sharded target releases the gathered weights after every pass, so that no process holds all of them. States on
# disk come from an odd number of rows: one process has one row less and must still take part in the last pass.
WATCHED = """
import sys, torch
torch.set_num_threads(1)
from torch.distributed.tensor import DTensor
from fledge.training.targets import offline
from fledge.training.recipe import load_recipe
from fledge.training.targets.target import DecoderTarget
from fledge.training.trainer import train

passes, rows = [], []
states, one_row = DecoderTarget.states, offline.PackedLoader

def watched(self, *args, **kwargs):
    found = states(self, *args, **kwargs)
    for layer in self.decoder.layers:
        for name, weight in layer.named_parameters():
            assert isinstance(weight, DTensor) and weight.to_local().numel() == weight.numel() / 2, name
    passes.append(len(found.hidden_ND))
    return found

def counted(*args):
    loader = one_row(*args)
    rows.append(loader.batches_per_epoch)
    return loader

DecoderTarget.states, offline.PackedLoader = watched, counted
recipe = load_recipe(sys.argv[1])
train(recipe)
if recipe.run.hidden_states == "offline":
    assert rows[0] % 2 == 1 and len(passes) == 2 + (rows[0] + 1) // 2, (rows, len(passes))  # the 2: start and held-out texts
else:
    assert len(passes) == 2 + recipe.run.steps, passes
"""
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_watched(recipe: Path) -> None:
    run_two(recipe, WATCHED)


def run_command(recipe: Path) -> None:
    """Runs training with torchrun, as users do."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fledge", "train"]
    done = subprocess.run([*launch, str(recipe)], env=ONE_THREAD, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def train_lines(recipe: Recipe) -> list[dict]:
    return [line for line in read_journal(Path(recipe.output) / "log.jsonl") if line["kind"] == "train"]


@pytest.fixture(scope="module")
def one_process_run(tmp_path_factory) -> Recipe:
    """The recipe of a finished run in this process."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("toy")
    toy.make(folder, num_answers=1, steps=10)
    draw = random.Random(0)  # not generated: the number of rows must be odd on every machine, however it rounds
    pairs = (toy.conversation(draw) for _ in range(60))
    lines = [json.dumps({"prompt_ids": prompt, "answer_ids": answer}) for prompt, answer in pairs]
    (folder / "answers.jsonl").write_text("\n".join(lines))
    content = {
        "output": str(folder / "one"),
        "target": {"model": str(folder / "target")},
        "data": {
            "train": [str(folder / "answers.jsonl")],
            "held_out_samples": 3,
            "sequence_length": 128,
            "micro_batch_size": 2,
        },
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 5, "log_every": 1, "evaluate_every": 5, "device": "cpu"},
        "evaluation": {"max_new_tokens": 8, "depths": [2], "select_depth": 2},
    }
    recipe = build_recipe(content)
    train(recipe)
    return recipe


@pytest.mark.parametrize(
    ("run", "settings"),
    [
        (run_command, {}),
        (run_watched, {"shard_target": True}),
        (run_watched, {"shard_target": True, "hidden_states": "offline"}),
    ],
    ids=["torchrun", "sharded", "sharded and states on disk"],
)
def test_two_processes_equal_one(one_process_run, tmp_path, run, settings):
    one = one_process_run
    two = replace(
        one,
        output=str(tmp_path / "two"),
        data=replace(one.data, global_batch_size=2),  # two rows per step: one per process
        run=replace(one.run, **settings),
    )
    path = tmp_path / "recipe.yaml"
    path.write_text(two.to_yaml())
    run(path)
    assert len(train_lines(two)) == len(train_lines(one)) == 5
    for ours, theirs in zip(train_lines(two), train_lines(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)


LOCAL_FOLDERS = """
import os, sys, torch
torch.set_num_threads(1)
from dataclasses import replace
from fledge.training import context
from fledge.training.recipe import load_recipe
from fledge.training.trainer import train

rank = os.environ["RANK"]
if rank != "0":
    def forbidden(*args, **kwargs):
        raise AssertionError("one process reads the data for all")
    context.load_samples = forbidden
recipe = load_recipe(sys.argv[1])
train(replace(recipe, output=recipe.output if rank == "0" else recipe.output + "-other-machine"))
"""


def run_two(recipe: Path, program: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**ONE_THREAD, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(recipe)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # otherwise a process may wait forever for the other
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


def test_resumed_with_another_number_of_processes(one_process_run, tmp_path):
    """Three steps with one process, two with two that share no folder, give the same losses as one process."""
    recipe = replace(one_process_run, output=str(tmp_path / "run"))
    train(replace(recipe, run=replace(recipe.run, steps=5, max_seconds=None, save_every=3, keep=9)))
    for path in (tmp_path / "run" / "checkpoints").glob("step-00000005.pt"):
        path.unlink()
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.to_yaml())  # no global_batch_size: the run keeps its value
    run_two(path, LOCAL_FOLDERS)
    assert len(train_lines(recipe)) == 5
    for ours, theirs in zip(train_lines(recipe), train_lines(one_process_run), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    assert not (tmp_path / "run-other-machine").exists()


MEMORY = """
import os, sys, torch
torch.set_num_threads(1)
from fledge.training import arm
from fledge.training.distributed import DistributedContext
from fledge.training.make import _train
from fledge.training.recipe import load_recipe

def fail(owner, name, rank, call):
    whole, calls = getattr(owner, name), []
    def fails_once(*args, **kwargs):
        calls.append(1)
        if os.environ["RANK"] == rank and len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Injected")
        return whole(*args, **kwargs)
    setattr(owner, name, fails_once)

fail(arm.Arm, "backward", "1", 1)
fail(arm, "evaluate", "0", 3)  # of the second attempt, at its end
dist, told = DistributedContext.join(use_cuda=False), []
fitted = _train(load_recipe(sys.argv[1]), False, told.append, dist)
dist.leave()
assert fitted.data.micro_batch_size == 1 and fitted.objective.recompute, fitted
assert len(told) == 2, told
"""


def test_out_of_memory_on_one_process_is_retried_by_both(one_process_run, tmp_path):
    """In `fledge make`: the other process does not wait forever."""
    data = replace(one_process_run.data, micro_batch_size=4, global_batch_size=8)
    one_step = replace(one_process_run.run, steps=1, evaluate_every=1)
    two = replace(one_process_run, output=str(tmp_path / "two"), data=data, run=one_step)
    path = tmp_path / "recipe.yaml"
    path.write_text(two.to_yaml())
    run_two(path, MEMORY)
    assert train_lines(two)[-1]["step"] == 1


BROADCAST = """
import os, numpy as np, torch
import torch.distributed as dist
from fledge.training.distributed import DistributedContext

together, packed = DistributedContext.join(use_cuda=False), []
whole = dist.broadcast_object_list
def noted(box, **options):
    whole(box, **options)
    packed.append(len(box[0][0]))
dist.broadcast_object_list = noted
value = {"drafter": {"w": torch.arange(3_000_000.0).view(1000, -1).t()}, "array": np.arange(10**6), "empty": torch.zeros(0, 3)}
value |= {"step": 5, "state": [torch.ones((), dtype=torch.bfloat16), np.zeros(0), np.array(["a"])]}
found = together.broadcast(value if together.is_first else None)
assert packed[0] < 10_000, packed  # tensors are not pickled: a checkpoint would be in memory three times
assert torch.equal(found["drafter"]["w"], value["drafter"]["w"]) and np.array_equal(found["array"], value["array"])
assert found["empty"].shape == (0, 3) and found["state"][0].dtype == torch.bfloat16 and found["state"][2][0] == "a"
together.leave()
"""


def test_a_checkpoint_is_sent_tensor_by_tensor(tmp_path):
    run_two(tmp_path, BROADCAST)


WAITING = """
import os, sys, time, torch
torch.set_num_threads(1)
from pathlib import Path
from fledge.training import trainer
from fledge.training.recipe import load_recipe

written, texts, build = Path(sys.argv[1]).with_name("written"), trainer.held_out_texts, trainer.Arm
def slowly(context):
    found = texts(context)
    time.sleep(3)
    written.touch()
    return found
def after(*args):
    assert written.exists(), "the next collective is one of GPUs, which gives up after ten minutes"
    return build(*args)
trainer.held_out_texts, trainer.Arm = slowly, after
trainer.train(load_recipe(sys.argv[1]))
"""


def test_others_wait_on_the_host_while_the_first_writes_held_out_answers(one_process_run, tmp_path):
    data = replace(one_process_run.data, global_batch_size=2)
    two = replace(one_process_run, output=str(tmp_path / "two"), data=data, run=replace(one_process_run.run, steps=1))
    path = tmp_path / "recipe.yaml"
    path.write_text(two.to_yaml())
    run_two(path, WAITING)


MAKE = """
import sys, torch
torch.set_num_threads(1)
from pathlib import Path
from fledge.training import make_plan
from fledge.training.make import make

make_plan.STEP_TOKENS["cpu"] = 3 * 128  # three rows a step for one process
folder = Path(sys.argv[1])
made = make("toy", folder / "out", hours=0.008, prompts=folder / "prompts.jsonl", device="cpu", log=lambda text: None)
assert made is None or made.acceptance_length["5"] > 1
"""


def test_a_drafter_is_made_by_two_processes(tmp_path):
    """Both processes answer. Three rows per step become four: three stopped the command after all answers."""
    prompts_of_toy(tmp_path / "prompts.jsonl", 81)
    run_two(tmp_path, MAKE)
    out = tmp_path / "out"
    names = ("answers.jsonl", "answers.rank1.jsonl", "answers-self.jsonl", "answers-self.rank1.jsonl")
    ids = [[json.loads(line)["id"] for line in (out / name).read_text().splitlines()] for name in names]
    assert [sorted(map(int, some)) for some in ids[:2]] == [list(range(0, 81, 2)), list(range(1, 81, 2))]
    assert ids[2] != ids[3]  # each process writes its own prompts
    trained = [json.loads(line)["id"] for line in (out / "data" / "train.jsonl").read_text().splitlines()]
    own = [name for name in trained if name.startswith("self-")]
    assert sorted(own) == sorted({*ids[2], *ids[3]})  # no duplicates, although the toy has few questions
    recipe = load_recipe(out / "recipe.yaml")
    assert (recipe.data.global_batch_size, recipe.data.micro_batch_size) == (4, 2)
    assert (out / "drafter" / "provenance.json").exists()
    assert max(line["step"] for line in read_journal(out / "run" / "log.jsonl")) > 0


def test_a_step_that_cannot_be_shared_is_refused(one_process_run):
    with pytest.raises(UserError, match="2 rows per step cannot be divided equally among 3 processes"):
        resolve(replace(one_process_run, data=replace(one_process_run.data, global_batch_size=2)), DistributedContext(0, 3))
