"""The report of `fledge inspect` on a drafter's files."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.inspect import inspect_drafter
from fledge.checkpoints.speculators import save_speculators
from fledge.cli.inspect import inspect
from fledge.config import MLAConfig
from tests.tiny import tiny_drafter, tiny_drafter_config, tiny_model_config

TARGET = tiny_model_config()


def saved(folder, **settings):
    return save_drafter(tiny_drafter(tiny_drafter_config(TARGET, **settings)), folder)


@pytest.mark.parametrize(
    ("settings", "version"),
    [
        ({}, "3"),
        ({"fc_norm": True, "norm_output": True}, "3.1"),
        ({"fc_norm": True}, "3 + fc_norm"),
        ({"norm_output": True}, "3 + norm_output"),
    ],
)
def test_versions(tmp_path, settings, version):
    report = inspect_drafter(saved(tmp_path / "drafter", **settings), TARGET)
    assert (report.version, report.problems, report.warnings) == (version, (), ())


def test_sizes(tmp_path):
    drafter = tiny_drafter(tiny_drafter_config(TARGET, draft_vocab_size=32))
    report = inspect_drafter(save_drafter(drafter, tmp_path / "drafter", dtype=torch.bfloat16))
    facts = report.as_dict()
    assert report.num_parameters == sum(parameter.numel() for parameter in drafter.parameters())
    assert report.num_bytes == 2 * report.num_parameters + 32 * 8 + 128  # d2t, t2d
    assert (report.dtypes, report.origin, facts["vocabulary_share"]) == (("bfloat16",), "raw", 0.25)
    assert json.loads(json.dumps(facts))["config"]["aux_layer_ids"] == [1, 2, 3]


def test_all_problems_at_once(tmp_path):
    folder = saved(tmp_path / "drafter", fc_norm=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_aux_hidden_states": 7, "vocab_size": 99}))
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"], tensors["fc_norm.1.weight"]
    save_file(tensors, folder / "model.safetensors")
    text = "\n".join(inspect_drafter(folder, TARGET).problems)
    for part in ("num_aux_hidden_states is 7", "vocabulary of 99", "missing tensors: norm.weight", "lack fc_norm.1"):
        assert part in text


def test_warnings(tmp_path):
    folder = saved(tmp_path / "drafter", draft_vocab_size=48, max_positions=2048)
    config = json.loads((folder / "config.json").read_text())
    nested = {"eagle_config": {"norm_output": True}, "eagle_aux_hidden_state_layer_ids": None, "norm_output": None}
    (folder / "config.json").write_text(json.dumps(config | nested))
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, "d2t": torch.zeros(48, dtype=torch.int64), "t2d": torch.arange(128) < 48},
        folder / "model.safetensors",
    )
    target = dataclasses.replace(TARGET, num_layers=8, rope=dataclasses.replace(TARGET.rope, theta=5e5))
    report = inspect_drafter(folder, target)
    assert report.problems == ()
    text = "\n".join(report.warnings)
    for part in (
        "max_position_embeddings is 2048",
        "rope theta 10000 differs from the target's 500000",
        "the default [2, 4, 5] is assumed",
        "norm_output only inside eagle_config",
        "d2t is all zero",
    ):
        assert part in text
    short = inspect_drafter(saved(tmp_path / "short", max_positions=100), TARGET)
    assert short.warnings == ("max_position_embeddings 100 is below the target's 512",)


def test_kinds_of_attention(tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    mla = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=20)
    folder = saved(tmp_path / "latent", mla=mla, fc_norm=True, norm_output=True)
    shown = " ".join(CliRunner().invoke(app, [str(folder)]).stdout.split())
    assert "4 heads of latent attention (MLA): keys and values from 12, queries from 20" in shown
    assert "no problem found" in shown
    facts = json.loads(CliRunner().invoke(app, [str(folder), "--json"]).stdout)
    assert (facts["version"], facts["config"]["mla"]["kv_lora_rank"]) == ("3.1", 12)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"model_type": "deepseek_v3"}))
    assert "own MTP layers" in inspect_drafter(folder, TARGET).warnings[0]
    folder = saved(tmp_path / "normed", qk_norm=True)
    assert "queries and keys normed" in " ".join(CliRunner().invoke(app, [str(folder)]).stdout.split())
    assert inspect_drafter(folder, TARGET).warnings == ()
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if "q_norm" not in n and "k_norm" not in n}, folder / "model.safetensors")
    report = inspect_drafter(folder, TARGET)
    assert report.problems == ()
    assert "without norms on queries and keys" in report.warnings[0]


def test_unknown_layout_is_a_problem(tmp_path):
    folder = save_speculators(tiny_drafter(), tmp_path / "drafter", "some/target")
    (folder / "config.json").write_text(json.dumps({"speculators_model_type": "eagle1"}))
    report = inspect_drafter(folder)
    assert report.config is None
    assert "eagle1" in report.problems[0]
    assert report.as_dict()["version"] is None


def test_command(tmp_path):
    app = typer.Typer()
    app.command()(inspect)
    folder = saved(tmp_path / "drafter", fc_norm=True, norm_output=True)
    shown = CliRunner().invoke(app, [str(folder)])
    assert shown.exit_code == 0
    assert "EAGLE 3.1" in shown.stdout
    assert "no problem found" in shown.stdout
    as_json = CliRunner().invoke(app, [str(folder), "--json"])
    assert json.loads(as_json.stdout)["version"] == "3.1"
    tensors = load_file(folder / "model.safetensors")
    del tensors["norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    broken = CliRunner().invoke(app, [str(folder)])
    assert broken.exit_code == 3
    assert "missing tensors: norm.weight" in broken.stdout.replace("\n", " ")
