"""`auto` finds the shipped drafter by model name, and by the weights of a folder or a GGUF file."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch

from fledge import drafters, sources
from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.fingerprint import is_same_model, target_fingerprint
from fledge.checkpoints.hf import save_decoder
from fledge.checkpoints.provenance import Provenance
from fledge.engine.build import build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.options import Speculation
from fledge.errors import ModelError
from tests.checkpoints.gguf_files import write_gguf
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

SIZES = {"vocab_size": 288, "num_layers": 4, "hidden_size": 64, "intermediate_size": 96}


def trained(seed: int):
    """A decoder with norms that are not all ones, rounded to bf16 as in published models."""
    torch.manual_seed(seed)
    decoder = tiny_decoder(**SIZES)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data = (1 + 0.1 * torch.randn_like(parameter)).bfloat16().float()
    return decoder


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Replaces the shipped drafters by one, for the target of seed 1."""
    decoder = trained(1)
    target = save_decoder(decoder, tmp_path / "model")
    record = {
        "target": "some/target",
        "target_fingerprint": target_fingerprint(target),
        "data": {"conversations": 1200, "tokens": 45_000},
    }
    here = tmp_path / "drafters"
    config = tiny_drafter_config(decoder.config)
    save_drafter(tiny_drafter(config), here / "for-some-target", texts={"provenance.json": json.dumps(record)})
    monkeypatch.setattr(drafters, "HERE", here)
    monkeypatch.setattr(drafters, "DEFAULTS", {"some/target": "for-some-target"})
    return here / "for-some-target"


@pytest.mark.parametrize("quantisation", ["F32", "F16", "Q8_0", "Q4_0"])
def test_folder_and_gguf_files_have_the_same_fingerprint(tmp_path, quantisation):
    decoder = trained(1)
    folder = target_fingerprint(save_decoder(decoder, tmp_path / "model"))
    assert folder is not None
    assert target_fingerprint(write_gguf(tmp_path / "model.gguf", decoder, "llama", quantisation)) == folder
    assert target_fingerprint(save_decoder(decoder, tmp_path / "half", dtype=torch.bfloat16)) == folder


def test_rounding_keeps_the_model_and_training_changes_it(tmp_path):
    """A GGUF file in fp32 precision is the same model as folders rounded to bf16 or fp16; one training step makes another."""
    decoder = trained(1)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data = 1 + 0.3 * torch.randn_like(parameter)
    file = target_fingerprint(write_gguf(tmp_path / "model.gguf", decoder, "llama", "Q8_0"))
    folder = target_fingerprint(save_decoder(decoder, tmp_path / "bf16", dtype=torch.bfloat16))
    assert file != folder
    assert is_same_model(file, folder)
    half = target_fingerprint(save_decoder(decoder.half().float(), tmp_path / "half", dtype=torch.bfloat16))
    assert is_same_model(file, half)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.data *= 1.008
    assert not is_same_model(file, target_fingerprint(save_decoder(decoder, tmp_path / "more", dtype=torch.bfloat16)))


def test_models_of_the_same_shape_are_distinguished(tmp_path):
    one, other = (target_fingerprint(save_decoder(trained(seed), tmp_path / f"{seed}")) for seed in (1, 2))
    assert not is_same_model(one, other)
    assert is_same_model(one, one)
    deeper = target_fingerprint(save_decoder(tiny_decoder(**SIZES | {"num_layers": 5}), tmp_path / "deeper"))
    assert not is_same_model(one, deeper)


def test_unreadable_models_have_no_fingerprint(tmp_path):
    assert target_fingerprint(tmp_path) is None
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + b"\0" * 40)
    assert target_fingerprint(tmp_path / "model.gguf") is None
    folder = save_decoder(trained(1), tmp_path / "model")
    shutil.copy(folder / "config.json", tmp_path / "config.json")
    assert drafters.default_drafter(str(tmp_path)) is None


def _gone(name):
    raise ModelError(f"{name}: the hub has no such model")


def test_auto_finds_it_by_name_folder_and_file(shipped, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "fledge")
    file = write_gguf(tmp_path / "renamed.gguf", trained(1), "llama", "Q8_0")
    for model in ("some/target", str(tmp_path / "model"), str(file)):
        caplog.clear()
        assert Speculation().resolve_drafter(model) == shipped, model
        assert "trained on answers of some/target in 1,200 conversations of 45,000 tokens" in caplog.text
    # A copy on the hub under another name.
    monkeypatch.setattr(sources, "from_hub", lambda name, *_, **__: tmp_path / "model" if name == "some/copy" else _gone(name))
    assert Speculation().resolve_drafter("some/copy") == shipped
    for model in ("other/name", "", str(save_decoder(trained(2), tmp_path / "other"))):
        assert Speculation().resolve_drafter(model) == "ngram", model


def test_log_allows_for_a_fine_tune_of_the_target(shipped, tmp_path, caplog):
    """The norms of a LoRA fine-tune, and so its fingerprint, are those of the base model."""
    caplog.set_level(logging.INFO, "fledge")
    tuned = trained(1)
    tuned.layers[0].mlp.down_proj.weight.data.zero_()
    assert Speculation().resolve_drafter(str(save_decoder(tuned, tmp_path / "tuned"))) == shipped
    assert "for this model or one that it was fine-tuned from" in caplog.text


def test_engine_uses_the_shipped_drafter(shipped, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "renamed.gguf", trained(1), "llama", "Q8_0")
    for dtype in ("auto", "float32"):  # the GGUF file directly, and converted
        engine = build_engine(str(file), Speculation(), EngineConfig(device="cpu", dtype=dtype))
        assert engine.drafter.description.startswith("EAGLE 3")


def test_names_of_the_shipped_drafters_exist():
    for name, folder in drafters.DEFAULTS.items():
        assert drafters.default_drafter(name) == drafters.HERE / folder
    for folder in drafters.shipped():
        assert len(Provenance.read(folder).target_fingerprint.split()) == 65
        assert folder.name in drafters.DEFAULTS.values()
        assert "conversations" in drafters.trained_on(folder)


@pytest.mark.real
def test_the_default_models_file_and_folder_have_the_shipped_drafter(smollm2_folder):
    from fledge import sources

    for path in (smollm2_folder, sources.find("smollm2-135m")):
        assert drafters.default_drafter(str(path)) == drafters.default_drafter("smollm2-135m")
