"""Reading and writing the speculators layout."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.speculators import save_speculators
from fledge.errors import ModelError
from tests.tiny import tiny_drafter, tiny_drafter_config, tiny_model_config

TARGET = tiny_model_config()
VARIANTS = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "norm_before_residual": {"norm_before_residual": True, "norm_before_fc": True},
    "two layers": {"num_layers": 2},
    "norms on queries and keys": {"qk_norm": True, "window": 8, "norm_output": True},
    "four taps": {"aux_layer_ids": (0, 1, 2, 4)},
    "draft vocabulary and window": {"draft_vocab_size": 48, "window": 8, "own_embedding": True},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_round_trip(tmp_path, settings):
    drafter = tiny_drafter(tiny_drafter_config(TARGET, **settings))
    loaded = load_drafter(save_speculators(drafter, tmp_path / "drafter", "some/target"), TARGET)
    for name in ("aux_layer_ids", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual", "window"):
        assert getattr(loaded.config, name) == getattr(drafter.config, name), name
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_layout(tmp_path):
    drafter = tiny_drafter(tiny_drafter_config(TARGET, aux_layer_ids=(0, 1, 2, 4), fc_norm=True))
    folder = save_speculators(drafter, tmp_path / "drafter", "some/target", speculative_tokens=5)
    config = json.loads((folder / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert (config["fc_norm"], config["norm_output"]) == (True, False)
    names = set(load_file(folder / "model.safetensors"))
    assert "layers.0.hidden_norm.weight" in names
    assert not any(name.startswith("midlayer") for name in names)


def test_missing_norm_before_residual_means_true(tmp_path):
    folder = save_speculators(tiny_drafter(tiny_drafter_config(TARGET)), tmp_path / "drafter", "some/target")
    config = json.loads((folder / "config.json").read_text())
    assert not load_drafter(folder, TARGET).config.norm_before_residual
    del config["norm_before_residual"]
    (folder / "config.json").write_text(json.dumps(config))
    assert load_drafter(folder, TARGET).config.norm_before_residual


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators model type 'dflash' is not supported"),
        ({"transformer_layer_config": None}, "lacks transformer_layer_config"),
        ({"transformer_layer_config": {"model_type": "mamba"}}, "draft layers of type 'mamba'"),
    ],
)
def test_refusals(tmp_path, change, message):
    folder = save_speculators(tiny_drafter(tiny_drafter_config(TARGET)), tmp_path / "drafter", "some/target")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError, match=message):
        load_drafter(folder, TARGET)
