"""Every example runs unmodified on tiny models. The notebook's cells run in order in one process, without Jupyter."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.training.targets import toy
from tests.serving.model_folder import make_model
from tests.serving.processes import ServerProcess
from tests.tiny import tiny_drafter, tiny_drafter_config

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOK = EXAMPLES / "tour.ipynb"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("examples") / "model", max_positions=1024)


@pytest.fixture(scope="module")
def drafter(model) -> Path:
    config = tiny_drafter_config(load_decoder(model).config, fc_norm=True, norm_output=True)
    return save_drafter(tiny_drafter(config), model.parent / "drafter")


def run(*words: object, **environment: object) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", **{key: str(value) for key, value in environment.items()}}
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_has_a_test():
    tested = {"offline_generation.py", "openai_client.py", "custom_drafter.py", "drift_plot.py", "tour.ipynb", "README.md"}
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == tested
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"({name})" in listed for name in tested - {"README.md"})


def test_offline_generation(model, drafter):
    out = run(EXAMPLES / "offline_generation.py", "--model", model, "--drafter", drafter, "--max-tokens", 12)
    assert out.count("same text without the drafter: True") == 3


def test_openai_client(model):
    with ServerProcess([str(model), "--drafter", "ngram"]) as server:
        out = run(EXAMPLES / "openai_client.py", "--url", f"{server.url}/v1", "--max-tokens", 12)
    assert "speculate=True: 12 tokens, speculation {'steps': " in out
    assert "speculate=False: 12 tokens, speculation {'steps': 0" in out


def test_custom_drafter(tmp_path):
    toy.make(tmp_path / "toy", num_answers=1, steps=60)  # fewer training steps: a weaker target, but faster
    out = run(EXAMPLES / "custom_drafter.py", "--out", tmp_path, "--hours", 0.001, "--device", "cpu")
    assert f"drafter: {tmp_path / 'drafter'}; acceptance length by depth: " in out
    assert ast.literal_eval(out.splitlines()[-1])["steps"] > 0


def test_drift_plot(model, drafter, tmp_path):
    picture = tmp_path / "drift.png"
    words = ["--model", model, "--drafter", drafter, "--max-tokens", 12, "--out", picture]
    assert "acceptance length {" in run(EXAMPLES / "drift_plot.py", *words)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_notebook(model, drafter):
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    assert "same text: True" in run("-c", code, FLEDGE_MODEL=model, FLEDGE_DRAFTER=drafter)
