"""Export to other servers, and import of other trainers' layouts, which are written here as each trainer writes them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from fledge.checkpoints.drafter_files import read_drafter_files
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.checkpoints.export import export_drafter, import_drafter
from fledge.checkpoints.inspect import inspect_drafter
from fledge.checkpoints.origins import canonical
from fledge.cli.export import export
from fledge.cli.import_drafter import import_drafter as import_command
from fledge.config import MLAConfig, RopeConfig
from fledge.errors import ModelError
from fledge.models.drafter import EagleDrafter
from tests.tiny import tiny_drafter, tiny_drafter_config, tiny_model_config

TARGET = tiny_model_config(num_layers=8)
LAYERS = (2, 4, 5)  # also the default for eight layers
IDS = "eagle_aux_hidden_state_layer_ids"
MLA = MLAConfig(kv_lora_rank=512, qk_nope_head_dim=8, qk_rope_head_dim=64, v_head_dim=6, q_lora_rank=20)


def made(**settings) -> EagleDrafter:
    return tiny_drafter(tiny_drafter_config(TARGET, **{"aux_layer_ids": LAYERS, "draft_vocab_size": 48, **settings}))


def assert_same(folder, drafter: EagleDrafter) -> None:
    loaded = load_drafter(folder, TARGET)
    assert loaded.config.aux_layer_ids == drafter.config.aux_layer_ids
    assert loaded.config.version == drafter.config.version
    assert loaded.config.norm_before_residual == drafter.config.norm_before_residual
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def raw_files(tmp_path, drafter: EagleDrafter) -> tuple[dict, dict[str, Tensor]]:
    folder = save_drafter(drafter, tmp_path / "raw")
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def written(folder, config: dict, tensors: dict[str, Tensor], *, pickled: bool = False):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


NOT_IN_OTHERS = dict.fromkeys((IDS, "eagle_config", "num_aux_hidden_states", "target_hidden_size", "norm_before_residual"))


def safeailab(tmp_path, config, tensors):
    """EAGLE's own layout: a plain Llama configuration, pickled weights, no layer ids."""
    settings = config | NOT_IN_OTHERS | {"architectures": ["LlamaForCausalLM"], "fc_norm": None, "norm_output": None}
    return written(tmp_path / "safeailab", settings, tensors, pickled=True)


def specforge(tmp_path, config, tensors):
    """Layer ids inside eagle_config, as output indices; flags of 3.1 at top level; unused rope buffers."""
    theirs = {IDS: [i - 1 for i in LAYERS], "use_aux_hidden_state": True}
    settings = config | NOT_IN_OTHERS | {"eagle_config": theirs}
    return written(tmp_path / "specforge", settings, tensors | {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})


def torchspec(tmp_path, config, tensors):
    """Layer ids at top level, as output indices; a version key; the target's embedding included."""
    settings = config | NOT_IN_OTHERS | {IDS: [i - 1 for i in LAYERS], "_torchspec_version": "0.3"}
    return written(tmp_path / "torchspec", settings, {k.replace("midlayer", "layers.0"): v for k, v in tensors.items()})


def nemo(tmp_path, config, tensors):
    """The prefix `model.` on all names except the head and the maps."""
    outside = ("lm_head.weight", "d2t", "t2d")
    renamed = {
        name if name in outside else "model." + name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()
    }
    return written(tmp_path / "nemo", config | NOT_IN_OTHERS | {"target_hidden_size": 32}, renamed)


def angelslim(tmp_path, config, tensors):
    settings = config | NOT_IN_OTHERS | {"architectures": ["Eagle3LlamaForCausalLM"]}
    return written(tmp_path / "angelslim", settings, tensors)


def sglang_legacy(tmp_path, config, tensors):
    """`use_aux_norm`, and the older names of the fc_norm weights."""
    old = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
    settings = config | {"fc_norm": None, "use_aux_norm": True}
    return written(tmp_path / "legacy", settings, {old.get(name, name): tensor for name, tensor in tensors.items()})


def red_hat(tmp_path, config, tensors):
    """The speculators layout as its trainer writes it: no norm_before_residual key, which means true there."""
    layer = {
        key: config[key]
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "head_dim")
    }
    layer |= {key: config[key] for key in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings", "rope_theta")}
    settings = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9",
        "draft_vocab_size": config["draft_vocab_size"],
        "fc_norm": config["fc_norm"],
        "norm_output": config["norm_output"],
        IDS: list(LAYERS),
        "transformer_layer_config": layer | {"model_type": "llama"},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
    }
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items()}
    return written(tmp_path / "speculators", settings, renamed | {"verifier_norm.weight": torch.ones(32)})


EAGLE31 = {"fc_norm": True, "norm_output": True}
ORIGINS = {
    "SafeAILab": (safeailab, {}),
    "SpecForge": (specforge, EAGLE31),
    "TorchSpec": (torchspec, EAGLE31 | {"own_embedding": True}),
    "NeMo": (nemo, EAGLE31 | {"own_embedding": True}),
    "AngelSlim": (angelslim, {"own_embedding": True}),
    "raw": (sglang_legacy, EAGLE31),
    "speculators": (red_hat, EAGLE31 | {"norm_before_residual": True}),
}


@pytest.mark.parametrize("origin", ORIGINS)
def test_each_origin_is_read_correctly(tmp_path, origin):
    make, settings = ORIGINS[origin]
    drafter = made(**settings)
    folder = make(tmp_path, *raw_files(tmp_path, drafter))
    assert inspect_drafter(folder, TARGET).origin == origin
    assert_same(folder, drafter)
    imported, notes = import_drafter(folder, tmp_path / "imported", target=TARGET)
    assert notes
    assert_same(imported, drafter)
    assert canonical(read_drafter_files(imported)).origin == "raw"


def test_two_names_of_one_flag(tmp_path):
    config, tensors = raw_files(tmp_path, made(**EAGLE31))
    folder = written(tmp_path / "both", config | {"use_aux_norm": False}, tensors)
    with pytest.raises(ModelError, match="two names of one flag"):
        load_drafter(folder, TARGET)


def test_ids_of_our_own_layout_are_never_shifted(tmp_path):
    drafter = made(aux_layer_ids=(1, 4, 6))
    assert_same(save_drafter(drafter, tmp_path / "drafter"), drafter)


def test_import_rebuilds_a_missing_map_and_overrules_layers(tmp_path):
    drafter = made()
    config, tensors = raw_files(tmp_path, drafter)
    del tensors["d2t"]
    folder = written(tmp_path / "mapless", config, tensors)
    with pytest.raises(ModelError, match=r"lack d2t .t2d is there"):
        load_drafter(folder, TARGET)
    imported, notes = import_drafter(folder, tmp_path / "imported", target=TARGET, layer_ids=(1, 3, 8))
    loaded = load_drafter(imported, TARGET)
    assert torch.equal(loaded.d2t, drafter.d2t)
    assert loaded.config.aux_layer_ids == (1, 3, 8)
    assert "rebuilt from t2d" in " ".join(notes)
    with pytest.raises(ModelError, match="overwritten"):
        import_drafter(folder, folder, target=TARGET)


@pytest.mark.parametrize("to", ["vllm", "sglang", "speculators"])
def test_export(tmp_path, to):
    drafter = made(**EAGLE31).bfloat16()
    source = save_drafter(drafter, tmp_path / "source")
    out = export_drafter(source, to, tmp_path / "out", "some/target", target=TARGET, num_draft_tokens=5)
    loaded = load_drafter(out, TARGET, dtype=torch.bfloat16)
    assert loaded.config.aux_layer_ids == LAYERS
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.bfloat16
    readme = (out / "README.md").read_text()
    assert "EAGLE 3.1" in readme
    if to == "sglang":
        assert json.loads((out / "config.json").read_text())["eagle_config"][IDS] == [1, 3, 4]
        assert "--speculative-num-steps 5" in readme
    else:
        command = f"""vllm serve some/target --speculative-config '{{"model": "{out}", "method": "eagle3", """
        assert command + '"num_speculative_tokens": 5}' in readme
        assert "vLLM 0.25 or later" in readme


@pytest.mark.parametrize("to", ["vllm", "sglang"])
def test_export_of_latent_attention(tmp_path, to):
    drafter = made(**EAGLE31, mla=MLA).bfloat16()
    source = save_drafter(drafter, tmp_path / "source")
    out = export_drafter(source, to, tmp_path / "out", "some/target", target=TARGET)
    loaded = load_drafter(out, TARGET, dtype=torch.bfloat16)
    assert loaded.config.mla == MLA
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert json.loads((out / "config.json").read_text())["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    readme = (out / "README.md").read_text()
    assert "latent attention (MLA): keys and values from 512, queries from 20" in readme
    assert "Do not use 0.22.0 or 0.22.1" in readme if to == "vllm" else "`Eagle3DeepseekV2ForCausalLM`" in readme


@pytest.mark.parametrize(
    ("to", "settings", "message"),
    [
        ("vllm", {"norm_before_fc": True}, "vLLM does not serve drafters with latent attention and norm_before_fc"),
        ("vllm", {"window": 8}, "vLLM does not serve drafters with latent attention and a window"),
        (
            "vllm",
            {"mla": replace(MLA, q_lora_rank=None)},
            "vLLM does not serve drafters with latent attention without q_lora_rank",
        ),
        ("vllm", {"mla": replace(MLA, kv_lora_rank=32)}, r"kv_lora_rank \+ qk_rope_head_dim of 96 \(it has 320, 512, 576\)"),
        ("sglang", {"window": 8}, "SGLang does not serve drafters with latent attention and a window"),
        ("sglang", {"mla": replace(MLA, q_lora_rank=None)}, "latent attention without q_lora_rank"),
        ("speculators", {}, "the speculators layout has no latent attention"),
    ],
)
def test_latent_attention_that_servers_misread_is_refused(tmp_path, to, settings, message):
    source = save_drafter(made(**{"mla": MLA} | settings), tmp_path / "source")
    with pytest.raises(ModelError, match=message):
        export_drafter(source, to, tmp_path / "out", "some/target")
    assert not (tmp_path / "out").exists()


def test_latent_attention_in_torchspec_layout(tmp_path):
    """Layer ids inside eagle_config, as output indices; rope kind under `type`; only latent sizes for heads."""
    rope = RopeConfig(theta=5e4, kind="yarn", factor=8.0, original_max_positions=64, mscale=1.0, mscale_all_dim=1.0)
    drafter = made(**EAGLE31, mla=MLA, rope=rope)
    config, tensors = raw_files(tmp_path, drafter)
    scaling = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0}
    theirs = {IDS: [i - 1 for i in LAYERS], "use_aux_hidden_state": True}
    settings = config | NOT_IN_OTHERS | {"eagle_config": theirs, "rope_scaling": scaling, "model_type": "kimi_k2"}
    assert_same(folder := written(tmp_path / "theirs", settings, tensors), drafter)
    loaded = load_drafter(folder, TARGET)
    assert (loaded.config.rope, loaded.config.mla) == (rope, MLA)


@pytest.mark.parametrize(
    "settings",
    [
        {"norm_before_fc": True},
        {"norm_before_residual": True},
        {"num_layers": 2},
        {"aux_layer_ids": (1, 2, 3)},
        {"qk_norm": True},
    ],
)
def test_drafters_unsupported_by_sglang_are_refused(tmp_path, settings):
    source = save_drafter(made(**settings), tmp_path / "source")
    with pytest.raises(ModelError, match="SGLang does not serve"):
        export_drafter(source, "sglang", tmp_path / "out", "some/target")
    assert not (tmp_path / "out").exists()


def test_commands(tmp_path):
    exporting, importing = typer.Typer(), typer.Typer()
    exporting.command()(export)
    importing.command()(import_command)
    source = str(save_drafter(made(), tmp_path / "source"))
    shown = CliRunner().invoke(exporting, [source, str(tmp_path / "out"), "--to", "vllm", "--target-name", "some/target"])
    assert shown.exit_code == 0, shown.output
    assert "vllm serve some/target" in shown.stdout
    assert isinstance(CliRunner().invoke(exporting, [source, str(tmp_path / "x"), "--to", "tgi"]).exception, ModelError)
    shown = CliRunner().invoke(importing, [source, str(tmp_path / "in"), "--layers", "1,2,3"])
    assert shown.exit_code == 0, shown.output
    assert load_drafter(tmp_path / "in", TARGET).config.aux_layer_ids == (1, 2, 3)
    assert isinstance(CliRunner().invoke(importing, [source, str(tmp_path / "y"), "--layers", "a"]).exception, ModelError)
