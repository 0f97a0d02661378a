"""The ablation's arms, trained side by side on a tiny model, and refused where they cannot share a pass of the target."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import pytest

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drift.subjects import load_subjects
from fledge.engine.config import EngineConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import arms

ARMS = {
    "eagle3": "",
    "fc-norm": "drafter.fc_norm=true",
    "norm-output": "drafter.norm_output=true",
    "eagle3.1": "drafter.version='3.1'",
    "bounded": "drafter.window=8",
}


@pytest.fixture(scope="module")
def recipe(folders, tmp_path_factory):
    """The ablation's own recipe, on a smaller model, less data and fewer steps."""
    root = tmp_path_factory.mktemp("arms")
    with (root / "answers.jsonl").open("w") as file:
        for number in range(24):
            turns = [
                ("user", f"the quick {'cat ' * (number % 5)}"),
                ("assistant", "the lazy dog sees the brown fox. " * (1 + number % 3)),
            ]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    changes = (
        f"output={root / 'run'} target.model={folders / 'model'} data.train=[{root / 'answers.jsonl'}] "
        f"data.cache={root / 'cache'} "
        "drafter.aux_layers=[1,2,3] drafter.draft_vocab_size=null drafter.window=null data.held_out_samples=2 "
        "data.sequence_length=64 data.micro_batch_size=2 objective.ttt_steps=3 evaluation.max_new_tokens=8 run.device=cpu"
    )
    path = Path(__file__).parents[2] / "recipes/ablation/base.yaml"
    return root, f"{path} {changes}"


def run(recipe, monkeypatch, overrides: dict[str, str]) -> Path:
    root, base = recipe
    texts = [f"{name}={base} {changes}" for name, changes in overrides.items()]
    monkeypatch.setattr(sys, "argv", ["arms.py", "--steps", "2", "--log-every", "1", "--out", str(root / "out"), *texts])
    arms.main()
    return root / "out"


def test_arms_differ_in_what_they_ask_for(recipe, folders, monkeypatch):
    out = run(recipe, monkeypatch, ARMS)
    configs = {name: load_drafter(out / name).config for name in ARMS}
    flags = {name: (config.fc_norm, config.norm_output, config.window) for name, config in configs.items()}
    assert flags == {
        "eagle3": (False, False, None),
        "fc-norm": (True, False, None),
        "norm-output": (False, True, None),
        "eagle3.1": (True, True, None),
        "bounded": (False, False, 8),
    }
    record = json.loads((out / "arms.json").read_text())
    assert record["steps"] == 2
    assert set(record["final"]) == set(ARMS)
    decoder = load_decoder(folders / "model")
    subject = load_subjects([f"alone={out / 'fc-norm'}"], "", decoder, EngineConfig(device="cpu", dtype="float32"))[0]
    assert subject.name == "alone"
    assert subject.trained.items() >= {"sequence_length": 64, "ttt_steps": 3, "augmented": True, "seed": 0}.items()
    assert subject.trained["templates"] == ["chatml", "llama3", "alpaca", "vicuna", "transcript", "none"]
    assert subject.weights_sha256 == hashlib.sha256((out / "fc-norm" / "model.safetensors").read_bytes()).hexdigest()


def test_arms_with_other_data_are_refused(recipe, monkeypatch):
    overrides = {"eagle3": "", "plain": "data.augmentation.system_probability=0"}
    with pytest.raises(SystemExit, match="plain"):
        run(recipe, monkeypatch, overrides)
