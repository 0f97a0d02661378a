"""`fledge doctor` names the fault of checkpoints broken in known ways, and finds none in a good one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fledge.bench.doctor import AcceptanceMeter, Trial, diagnose, gain_in_errors
from fledge.checkpoints.eagle3 import save_drafter
from fledge.cli.doctor import doctor
from tests.interop.tiny_models import CHAT_TEMPLATE, save_target
from tests.interop.trained import FIRST_WORD, trained_drafter

IDS = "eagle_aux_hidden_state_layer_ids"
WORDS = [[(7 * i + 13 * j) % 58 + FIRST_WORD for j in range(3 + i % 3)] for i in range(12)]
PROMPTS = [" ".join(f"w{word}" for word in words) for words in WORDS]
DRAFTERS = {
    "eagle 3": {"own_embedding": True},
    "eagle 3.1": {"fc_norm": True, "norm_output": True, "draft_vocab_size": 56},
    "fc_norm only": {"fc_norm": True},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, target) -> dict[str, Path]:
    """The target and good drafters for it."""
    base = tmp_path_factory.mktemp("pair")
    drafters = {name: save_drafter(trained_drafter(target, **s), base / name) for name, s in DRAFTERS.items()}
    return {"target": save_target(target, base / "target"), **drafters}


def broken(source: Path, folder: Path, config: dict | None = None, tensors: dict | None = None) -> Path:
    """Copies a drafter with config keys and tensors replaced; None removes one."""
    folder.mkdir()
    settings = json.loads((source / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    saved = load_file(source / "model.safetensors") | (tensors or {})
    save_file({name: tensor for name, tensor in saved.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def examined(drafter: Path, target: Path, **options):
    return diagnose(drafter, str(target), **{"prompts": PROMPTS, "max_tokens": 24, "dtype": "float32", **options})


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_good_drafter_is_healthy(folders, name):
    diagnosis = examined(folders[name], folders["target"])
    assert diagnosis.healthy, diagnosis
    assert diagnosis.unchanged.first > 0.5


def layers(*ids):
    return {IDS: list(ids), "eagle_config": None}


ZERO = torch.zeros(56, dtype=torch.int64)
# change: (drafter, config, tensors, name of the fault, part of the remedy)
FAULTS = {
    "off by one": ("eagle 3", layers(3, 5, 6), {}, "layers off by one", "[2, 4, 5]"),
    "other layers": ("eagle 3", layers(0, 1, 8), {}, "wrong layers", "[2, 4, 5]"),
    "layers in conflict": ("eagle 3", {"eagle_config": {IDS: [0, 1, 8]}}, {}, "conflicting layers", "[2, 4, 5]"),
    "norm_output off": ("eagle 3.1", {"norm_output": False}, {}, "norm_output wrong", "true"),
    "norm_output on": ("eagle 3", {"norm_output": True}, {}, "norm_output wrong", "false"),
    "fc_norm off": ("eagle 3.1", {"fc_norm": False}, {}, "fc_norm wrong", '"fc_norm": true'),
    "flags swapped": (
        "fc_norm only",
        {"fc_norm": False, "norm_output": True},
        {},
        "fc_norm and norm_output swapped",
        '"norm_output": false',
    ),
    "residual": ("eagle 3", {"norm_before_residual": True}, {}, "norm_before_residual wrong", "false"),
    "d2t missing": ("eagle 3.1", {}, {"d2t": None}, "d2t missing", "rebuild d2t"),
    "d2t zero": ("eagle 3.1", {}, {"d2t": ZERO}, "d2t wrong", "t2d"),
    "d2t zero, no t2d": ("eagle 3.1", {}, {"d2t": ZERO, "t2d": None}, "d2t never filled", "the run that trained it"),
    "position limit": ("eagle 3", {"max_position_embeddings": 64}, {}, "position limit", "max_position_embeddings"),
    "another hidden size": ("eagle 3", {"target_hidden_size": 128}, {}, "wrong target", "trained for"),
}


@pytest.mark.parametrize(("name", "config", "tensors", "fault", "remedy"), FAULTS.values(), ids=FAULTS.keys())
def test_the_fault_is_named(tmp_path, folders, name, config, tensors, fault, remedy):
    diagnosis = examined(broken(folders[name], tmp_path / "broken", config, tensors), folders["target"])
    assert (diagnosis.fault, diagnosis.healthy) == (fault, False), diagnosis
    assert remedy in diagnosis.remedy


@pytest.mark.parametrize(("saved", "fault"), [(1, "layers off by one"), (0, None)])
def test_small_gain_of_shifted_layers_is_decided_on_longer_answers(monkeypatch, folders, saved, fault):
    """Short texts do not decide. `saved`: how many of 40 steps each long answer saves with the layers one lower."""
    texts = []

    def measure(self, network, fault="", remedy="", prompt_format=None, *, text="usual"):
        texts.append(text)
        is_lower = network.config.aux_layer_ids == (1, 3, 4)
        steps = tuple(40 + place % 3 - saved * is_lower + is_lower * (place % 2) for place in range(12))
        return Trial(fault, remedy, 1.2 + 0.1 * is_lower, 0.7, steps)

    monkeypatch.setattr(AcceptanceMeter, "measure", measure)
    diagnosis = examined(folders["eagle 3"], folders["target"])
    assert (diagnosis.fault, "[1, 3, 4]" in diagnosis.remedy) == (fault, fault is not None), diagnosis
    assert texts.count("long") == 2


def test_gain_in_errors():
    """Measured steps of the shipped drafter with layers [3, 16, 28] and with its own, on answers of 128 tokens."""
    before, after = (41, 29, 53, 14, 22, 63, 77, 13), (37, 26, 49, 15, 21, 60, 71, 13)
    assert gain_in_errors(before, after) == pytest.approx(5.51, abs=0.01)
    assert gain_in_errors(after, before) < -5
    assert gain_in_errors((41,), (37,)) == gain_in_errors(before, before) == 0


def test_ids_instead_of_offsets(tmp_path, folders):
    offsets = load_file(folders["eagle 3.1"] / "model.safetensors")["d2t"]
    ids = {"d2t": offsets + torch.arange(56)}
    for number, more in enumerate(({}, {"t2d": None})):
        folder = broken(folders["eagle 3.1"], tmp_path / str(number), {}, ids | more)
        assert examined(folder, folders["target"]).fault == "d2t holds ids instead of offsets"


def test_unusual_layers_are_found_by_search(tmp_path, target, folders):
    drafter = save_drafter(trained_drafter(target, aux_layer_ids=(1, 3, 6)), tmp_path / "drafter")
    diagnosis = examined(broken(drafter, tmp_path / "broken", layers(1, 3, 8)), folders["target"], thorough=True)
    assert (diagnosis.fault, "[1, 3, 6]" in diagnosis.remedy) == ("wrong layers", True), diagnosis


def test_rotary_settings(tmp_path, target, folders):
    """Not every trained drafter depends on positions, so the test tries seeds until one does."""
    squeezed = {"rope_scaling": {"type": "linear", "factor": 16.0}}
    for seed in range(2, 8):
        good = save_drafter(trained_drafter(target, seed=seed), tmp_path / f"good{seed}")
        diagnosis = examined(broken(good, tmp_path / f"broken{seed}", squeezed), folders["target"])
        if diagnosis.unchanged.accepted < 0.8 * examined(good, folders["target"]).unchanged.accepted:
            break
    assert (diagnosis.fault, "rope_theta to 8" in diagnosis.remedy) == ("rope wrong", True), diagnosis


def test_a_damaged_embedding(tmp_path, folders):
    shuffled = load_file(folders["eagle 3"] / "model.safetensors")["embed_tokens.weight"].roll(9, 0)
    folder = broken(folders["eagle 3"], tmp_path / "broken", {}, {"embed_tokens.weight": shuffled})
    assert examined(folder, folders["target"]).fault == "embedding wrong"


def test_another_target_of_the_same_size(tmp_path, target, folders):
    other = copy.deepcopy(target)
    order = torch.randperm(target.config.vocab_size, generator=torch.Generator().manual_seed(4))
    other.embed_tokens.weight.data = target.embed_tokens.weight[order]
    other.lm_head.weight.data = target.lm_head.weight[order]
    diagnosis = examined(folders["eagle 3"], save_target(other, tmp_path / "other"))
    assert diagnosis.fault == "wrong target"
    assert "embedding is not the target's" in diagnosis.explanation


def test_a_template_it_was_not_trained_on(tmp_path, target, folders):
    drafter = save_drafter(trained_drafter(target, roles=False), tmp_path / "drafter")
    chatty = save_target(target, tmp_path / "target", CHAT_TEMPLATE)
    assert examined(drafter, folders["target"]).healthy
    diagnosis = examined(drafter, chatty)
    assert diagnosis.fault == "wrong template", diagnosis


def test_unloadable_drafter_is_reported(tmp_path, folders):
    folder = broken(folders["eagle 3"], tmp_path / "broken", {}, {"norm.weight": None})
    diagnosis = examined(folder, folders["target"])
    assert (diagnosis.fault, diagnosis.unchanged) == ("unreadable", None)
    assert "norm.weight" in diagnosis.explanation


@pytest.mark.parametrize(
    ("key", "value"), [(IDS, 5), (IDS, [1, "low"]), ("vocab_size", "many"), ("draft_vocab_size", [1]), ("draft_vocab_size", -1)]
)
def test_values_of_the_wrong_kind(tmp_path, folders, key, value):
    folder = broken(folders["eagle 3.1"], tmp_path / "broken", {key: value, "eagle_config": None})
    diagnosis = examined(folder, folders["target"])
    assert (diagnosis.fault, diagnosis.trials) == ("unreadable", []), diagnosis


def test_command(tmp_path, folders):
    app = typer.Typer()
    app.command()(doctor)
    options = ["--model", str(folders["target"]), "--dtype", "float32", "--max-tokens", "8", "--json"]
    folder = broken(folders["eagle 3"], tmp_path / "broken", {}, {"norm.weight": None})
    shown = CliRunner().invoke(app, [str(folder), *options])
    assert shown.exit_code == 3, shown.output
    assert json.loads(shown.stdout)["fault"] == "unreadable"
    shown = CliRunner().invoke(app, [str(folder), *options[:-1]])
    assert "unreadable" in shown.stdout
