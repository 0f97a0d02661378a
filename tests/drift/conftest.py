"""Fixtures: one lab run over a tiny model and four drafters, shared by all drift tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.hf import load_decoder
from fledge.drift.lab import run_lab
from fledge.drift.prompts import TEMPLATE_NAMES
from fledge.drift.suites import Settings
from tests.serving.model_folder import make_model
from tests.tiny import tiny_drafter, tiny_drafter_config

SETTINGS = replace(
    Settings.quick(),
    max_tokens=12,
    probe_depth=9,
    depth=5,
    prompts=2,
    questions=2,
    templates=TEMPLATE_NAMES,
    system_prompts=("none given", "short", "German"),
    lengths=(128, 256, 4096),
    noise=(1.0,),
    temperatures=(0.0, 1.0),
)


DRAFTERS = {
    "three": {},
    "three-one": {"fc_norm": True, "norm_output": True},
    "inputs": {"fc_norm": True},
    "outputs": {"norm_output": True},
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("lab")
    model = make_model(root / "model", max_positions=1500)
    decoder = load_decoder(model)
    for name, flags in DRAFTERS.items():
        drafter = tiny_drafter(tiny_drafter_config(decoder.config, **flags))
        save_drafter(drafter, root / name)
    return root


@pytest.fixture(scope="session")
def figures(folders):
    names = [str(folders / name) for name in DRAFTERS]
    return run_lab(str(folders / "model"), names, settings=SETTINGS, dtype="float32")
