"""Two processes do what one does with twice the rows."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fledge.training import toy
from fledge.training.journal import read_journal
from fledge.training.recipe import Recipe, build
from fledge.training.trainer import train

SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from fledge.training.recipe import load_recipe
from fledge.training.trainer import train
train(load_recipe(sys.argv[1]))
"""


def run_in_two_processes(recipe: Recipe, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_text(recipe.to_yaml())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(path)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)


def train_lines(recipe: Recipe) -> list[dict]:
    return [line for line in read_journal(Path(recipe.output) / "log.jsonl") if line["kind"] == "train"]


@pytest.fixture(scope="module")
def toy_folder(tmp_path_factory) -> Path:
    torch.set_num_threads(1)
    return toy.make(tmp_path_factory.mktemp("toy"), num_answers=120, steps=10)


@pytest.mark.parametrize("distributed", ["ddp", "fsdp"])
def test_two_processes_equal_one(toy_folder, tmp_path, distributed):
    content = {
        "output": str(tmp_path / "one"),
        "target": {"model": str(toy_folder / "target")},
        "data": {"train": [str(toy_folder / "answers.jsonl")], "held_out_samples": 3, "sequence_length": 128, "batch_rows": 2},
        "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
        "objective": {"ttt_steps": 3},
        "run": {"steps": 5, "log_every": 1, "evaluate_every": 5, "device": "cpu", "distributed": distributed},
        "evaluation": {"max_new_tokens": 8, "depths": [2], "select_depth": 2},
    }
    one = build(Recipe, content, "")
    train(one)
    two = replace(one, output=str(tmp_path / "two"), data=replace(one.data, batch_rows=1))
    run_in_two_processes(two, tmp_path)
    assert len(train_lines(two)) == len(train_lines(one)) == 5
    for ours, theirs in zip(train_lines(two), train_lines(one), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
        assert ours["accuracy"] == pytest.approx(theirs["accuracy"], abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-3)
