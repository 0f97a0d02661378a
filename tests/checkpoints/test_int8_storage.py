"""Drafters stored in 8 bits: half the size, the same drafter for every reader, refused if something is missing."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from fledge.checkpoints.drafter_files import read_drafter_files
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.checkpoints.export import export_drafter, plain_folder
from fledge.checkpoints.inspect import inspect_drafter
from fledge.checkpoints.int8_storage import restore, store
from fledge.cli.export import export
from fledge.cli.inspect import inspect
from fledge.errors import ModelError
from tests.tiny import tiny_drafter, tiny_drafter_config, tiny_model_config

TARGET = tiny_model_config(hidden_size=64, intermediate_size=96)


def made(**settings):
    torch.manual_seed(3)
    drafter = tiny_drafter(tiny_drafter_config(TARGET, draft_vocab_size=48, fc_norm=True, norm_output=True, **settings))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return drafter


@pytest.fixture
def stored(tmp_path):
    return save_drafter(made(), tmp_path / "stored", dtype=torch.bfloat16, int8=True)


def edited(folder, **changes):
    """Replaces tensors of the folder; None removes one."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    return folder


def test_the_file_holds_codes_and_scales(stored):
    tensors = load_file(stored / "model.safetensors")
    matrices = [name for name, tensor in tensors.items() if tensor.dtype == torch.int8]
    assert "fc.weight" in matrices
    assert "lm_head.weight" in matrices
    assert "midlayer.mlp.down_proj.weight" in matrices
    for name in matrices:
        outputs, inputs = tensors[name].shape
        assert tensors[f"{name}_scale"].shape == (outputs, inputs // 32)
        assert tensors[f"{name}_scale"].dtype == torch.float16
    assert tensors["norm.weight"].dtype == torch.bfloat16
    assert tensors["d2t"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None])
def test_loads_in_the_requested_dtype(stored, dtype):
    """Weights are within half a step of their group plus bf16 rounding; norms and maps are exact."""
    original, loaded = made(), load_drafter(stored, TARGET, dtype)
    assert loaded.fc.weight.dtype == (dtype or torch.bfloat16)
    for name, tensor in original.state_dict().items():
        found = loaded.state_dict()[name]
        if tensor.ndim < 2:
            assert torch.equal(found.float(), tensor.bfloat16().float() if tensor.is_floating_point() else tensor), name
            continue
        groups = tensor.unflatten(1, (-1, 32))
        error = (found.float() - tensor).unflatten(1, (-1, 32)).abs()
        assert (error <= groups.abs().amax(-1, keepdim=True) * (0.5 / 127 + 3 * 2**-9)).all(), name
        assert error.max() > 0


def test_export_writes_the_served_weights(stored, tmp_path):
    """The weights exported to vLLM are bit for bit those Fledge uses, in bf16."""
    out = export_drafter(stored, "vllm", tmp_path / "out", "target", target=TARGET)
    config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
    assert "quantization_config" not in config
    assert tensors["fc.weight"].dtype == torch.bfloat16
    served, exported = load_drafter(stored, TARGET, torch.float32), load_drafter(out, TARGET, torch.float32)
    for name, tensor in served.state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name


def test_storing_twice_keeps_the_codes(stored, tmp_path):
    again = export_drafter(stored, "fledge", tmp_path / "again", "target", target=TARGET, storage="int8")
    first, second = (load_file(folder / "model.safetensors") for folder in (stored, again))
    for name, tensor in first.items():
        if tensor.dtype == torch.int8:
            assert (second[name].int() - tensor.int()).abs().max() <= 1, name


def test_matrices_not_divisible_into_groups_stay_unquantised():
    config, tensors = {"torch_dtype": "float32"}, {"fc.weight": torch.randn(4, 40), "norm.weight": torch.randn(64)}
    stored_config, stored_tensors = store(config, tensors)
    assert stored_tensors.keys() == tensors.keys()
    again_config, again = restore(stored_config, stored_tensors)
    assert again_config == config
    assert torch.equal(again["fc.weight"], tensors["fc.weight"])


def test_inspect_reports_the_storage(stored, tmp_path):
    plain = inspect_drafter(save_drafter(made(), tmp_path / "plain", dtype=torch.bfloat16), TARGET)
    report = inspect_drafter(stored, TARGET)
    assert report.storage == "8 bits with scales, read as bfloat16"
    assert plain.storage == ""
    assert (report.problems, report.num_parameters) == ((), plain.num_parameters)
    assert report.num_bytes == sum(tensor.nbytes for tensor in load_file(stored / "model.safetensors").values())
    assert report.num_bytes < 0.6 * plain.num_bytes
    app = typer.Typer()
    app.command()(inspect)
    assert "8 bits with scales" in CliRunner().invoke(app, [str(stored)]).output


def test_the_command_writes_and_unpacks(tmp_path):
    app = typer.Typer()
    app.command()(export)
    plain = save_drafter(made(), tmp_path / "plain", dtype=torch.bfloat16, texts={"provenance.json": "{}"})
    run = CliRunner().invoke(app, [str(plain), str(tmp_path / "small"), "--to", "fledge", "--storage", "int8"])
    assert run.exit_code == 0
    assert "fledge serve TARGET --drafter" in run.output
    assert read_drafter_files(tmp_path / "small").storage
    assert (tmp_path / "small" / "provenance.json").read_text() == "{}"
    again = export_drafter(tmp_path / "small", "fledge", tmp_path / "again", "other")
    assert (again / "README.md").read_text() == (tmp_path / "small" / "README.md").read_text()  # an existing model card is kept
    assert CliRunner().invoke(app, [str(tmp_path / "small"), str(tmp_path / "big"), "--to", "vllm"]).exit_code == 0
    assert not read_drafter_files(tmp_path / "big").storage
    with pytest.raises(ModelError, match="vLLM does not read drafters stored in 8 bits"):
        export_drafter(plain, "vllm", tmp_path / "no", "target", storage="int8")
    with pytest.raises(ModelError, match="storage 'int3'"):
        export_drafter(plain, "fledge", tmp_path / "no", "target", storage="int3")


def test_other_servers_get_a_plain_copy(stored, tmp_path, monkeypatch):
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    plain = plain_folder(stored)
    assert plain != stored
    assert not read_drafter_files(plain).storage
    written = (plain / "model.safetensors").stat().st_mtime_ns
    assert plain_folder(stored) == plain
    assert (plain / "model.safetensors").stat().st_mtime_ns == written
    assert plain_folder(plain) == plain


def test_missing_or_unknown_tensors_are_refused(stored):
    scale = load_file(stored / "model.safetensors")["fc.weight_scale"]
    for other, said in (
        (scale[:, :-1].contiguous(), "must be float16, one for 32 inputs"),
        (scale.float(), "must be float16"),
        (None, "has no fc.weight_scale"),
    ):
        with pytest.raises(ModelError, match=said):
            load_drafter(edited(stored, **{"fc.weight_scale": other}), TARGET)
    edited(stored, **{"fc.weight_scale": torch.full_like(scale, torch.nan)})
    with pytest.raises(ModelError, match=r"fc\.weight has values that are not finite"):
        load_drafter(stored, TARGET)
    edited(stored, **{"fc.weight_scale": scale, "other.weight_scale": scale.clone()})
    with pytest.raises(ModelError, match=r"unknown tensors: other\.weight_scale"):
        load_drafter(stored, TARGET)
    config = json.loads((stored / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(config | {"torch_dtype": "int8"}))
    with pytest.raises(ModelError, match="torch_dtype"):
        load_drafter(stored, TARGET)


def test_other_quantised_drafters_are_still_refused(stored):
    config = json.loads((stored / "config.json").read_text())
    for other in ({"quant_method": "awq"}, "int8"):
        (stored / "config.json").write_text(json.dumps(config | {"quantization_config": other}))
        with pytest.raises(ModelError, match="quantised drafters are not supported"):
            load_drafter(stored, TARGET)
