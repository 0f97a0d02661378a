"""`fledge train` reports an error in a recipe in one line and writes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from fledge.training import trainer
from tests.cli.test_errors import fledge, refused


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    content = {
        "output": str(tmp_path / "out"),
        "target": {"model": "toy"},
        "data": {"train": "toy"},
        "run": {"steps": 3, "device": "cpu"},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("optimizer.max_grad_norm=-1", "optimizer.max_grad_norm must be greater than 0, not -1"),
        ("run.device=foo", "run.device: 'foo' must be auto, cpu, cuda"),
        ("data.cache=/proc/fledge", "data.cache: nothing can be written to /proc/fledge"),
        ("run.hidden_states_folder=/proc/fledge", "run.hidden_states_folder: nothing can be written to /proc/fledge"),
        ("output={here}/recipe.yaml/out", "output: nothing can be written to {here}/recipe.yaml/out (Not a directory)"),
    ],
)
def test_a_bad_value_is_reported_before_anything_is_written(monkeypatch, capsys, recipe, override, line):
    here = recipe.parent
    said = refused(monkeypatch, capsys, "train", recipe, override.format(here=here))
    assert said.startswith("fledge: " + line.format(here=here))
    assert list(here.iterdir()) == [recipe]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "runs/log.jsonl"), "fledge: runs/log.jsonl: Permission denied; "),
        (OSError(28, "No space left on device"), "fledge: No space left on device; the same command resumes"),
    ],
)
def test_a_disk_error_during_training_is_reported_in_one_line(monkeypatch, capsys, recipe, error, line):
    def fail(settings):
        raise error

    monkeypatch.setattr(trainer, "train", fail)
    assert refused(monkeypatch, capsys, "train", recipe).startswith(line)


def test_other_os_errors_are_not_caught(monkeypatch, capsys, recipe):
    def fail(settings):
        raise ConnectionResetError(104, "Connection reset by peer")

    monkeypatch.setattr(trainer, "train", fail)
    with pytest.raises(ConnectionResetError):
        refused(monkeypatch, capsys, "train", recipe)


def test_help_recipe_prints_the_keys_of_a_recipe(monkeypatch, capsys):
    code, out, _ = fledge(monkeypatch, capsys, "train", "--help-recipe")
    assert code == 0
    assert "  global_batch_size: null  # rows of an optimizer step over all GPUs" in out
    assert "  max_grad_norm: 0.5  # " in out
