"""Drafter checkpoints in the raw layout: they round-trip, and files that do not fit are refused by name."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.drafter_config import drafter_config_from_hf
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.config import MLAConfig, RopeConfig
from fledge.errors import ModelError
from tests.tiny import tiny_drafter, tiny_drafter_config, tiny_model_config

TARGET = tiny_model_config()
LLAMA3_ROPE = RopeConfig(
    theta=5e5, kind="llama3", factor=8.0, original_max_positions=64, low_freq_factor=1.0, high_freq_factor=4.0
)
YARN = RopeConfig(theta=1e4, kind="yarn", factor=4.0, original_max_positions=128, beta_fast=16.0, attention_factor=1.2)
MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6)
MLA_LATENT_QUERIES = dataclasses.replace(MLA, q_lora_rank=20)
DEEPSEEK_YARN = RopeConfig(theta=5e4, kind="yarn", factor=8.0, original_max_positions=64, mscale=1.0, mscale_all_dim=0.7)
VARIANTS = {
    "eagle 3": {},
    "eagle 3.1": {"fc_norm": True, "norm_output": True},
    "fc_norm only": {"fc_norm": True},
    "norm_output only": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "four taps": {"aux_layer_ids": (0, 1, 2, 4)},
    "own embedding": {"own_embedding": True},
    "the target's head": {"own_head": False},
    "draft vocabulary": {"draft_vocab_size": 48},
    "another hidden size": {"hidden_size": 16, "own_embedding": True},
    "window": {"window": 8},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3 rope": {"rope": LLAMA3_ROPE},
    "yarn": {"rope": YARN},
    "norms on queries and keys": {"qk_norm": True, "num_layers": 2, "window": 8},
    "latent attention": {"mla": MLA, "fc_norm": True, "norm_output": True},
    "latent attention, latent queries, two layers, window": {"mla": MLA_LATENT_QUERIES, "num_layers": 2, "window": 8},
    "latent attention, yarn": {"mla": MLA, "rope": DEEPSEEK_YARN},
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())
def test_drafter_round_trip(tmp_path, settings):
    drafter = tiny_drafter(tiny_drafter_config(TARGET, **settings))
    loaded = load_drafter(save_drafter(drafter, tmp_path / "drafter"), TARGET)
    original = drafter.config.rope.original_max_positions or drafter.config.max_positions
    rope = dataclasses.replace(drafter.config.rope, original_max_positions=original)
    assert loaded.config == dataclasses.replace(drafter.config, rope=rope)
    expected = drafter.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    assert torch.equal(loaded.rotary.inverse_frequencies, drafter.rotary.inverse_frequencies)


def test_file_has_the_layout_of_vllm(tmp_path):
    settings = {
        "draft_vocab_size": 48,
        "fc_norm": True,
        "norm_output": True,
        "aux_layer_ids": (0, 1, 2, 4),
        "window": 8,
    }
    drafter = tiny_drafter(tiny_drafter_config(TARGET, **settings))
    folder = save_drafter(drafter, tmp_path / "drafter", dtype=torch.bfloat16, extra={"made_by": "test", "fc_norm": False})
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2, 4]
    assert config["num_aux_hidden_states"] == 4
    assert (config["fc_norm"], config["norm_output"], config["tie_word_embeddings"]) == (True, True, False)
    assert (config["sliding_window"], config["layer_types"]) == (8, ["sliding_attention"])
    assert (config["torch_dtype"], config["made_by"]) == ("bfloat16", "test")
    assert set(tensors) == {
        "fc.weight",
        *(f"fc_norm.{i}.weight" for i in range(4)),
        *(f"midlayer.{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
        *(f"midlayer.self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"midlayer.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "norm.weight",
        "lm_head.weight",
        "d2t",
        "t2d",
    }
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(tensors["t2d"].nonzero().flatten(), torch.arange(48) + tensors["d2t"])


@pytest.fixture
def drafter_folder(tmp_path):
    settings = {"draft_vocab_size": 48, "fc_norm": True, "norm_output": True}
    return save_drafter(tiny_drafter(tiny_drafter_config(TARGET, **settings)), tmp_path / "drafter")


def change(folder, config=None, tensors=None):
    """Changes config keys and tensors of a saved drafter; None deletes one."""
    if config:
        settings = json.loads((folder / "config.json").read_text()) | config
        settings = {key: value for key, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(settings))
    if tensors:
        saved = load_file(folder / "model.safetensors") | tensors
        save_file({name: t for name, t in saved.items() if t is not None}, folder / "model.safetensors")
    return folder


IDS = "eagle_aux_hidden_state_layer_ids"
FAULTS = {
    "missing tensor": ({}, {"norm.weight": None}, "missing tensors: norm.weight"),
    "unknown tensor": ({}, {"extra.weight": torch.ones(2)}, "unknown tensors: extra.weight"),
    "shape": (
        {},
        {"fc.weight": torch.ones(32, 64)},
        r"fc.weight has shape \[32, 64\]; config.json asks for \[32, 96\]",
    ),
    "flag without weights": ({}, {f"fc_norm.{i}.weight": None for i in range(3)}, "sets fc_norm but the weights lack"),
    "weights without flag": ({"fc_norm": False}, {}, "fc_norm.0.weight.*does not set fc_norm"),
    "flag at two places": ({"eagle_config": {"norm_output": False}}, {}, "norm_output is True at top level and False"),
    "ids in conflict": ({"eagle_config": {IDS: [0, 1, 2]}}, {}, r"\[1, 2, 3\] at top level and \[0, 1, 2\]"),
    "ids not ascending": ({IDS: [2, 1, 3], "eagle_config": None}, {}, "must be ascending"),
    "ids not unique": ({IDS: [2, 2, 3], "eagle_config": None}, {}, "must be ascending, unique"),
    "ids past the target": ({IDS: [1, 2, 5], "eagle_config": None}, {}, "goes past the target's 4 layers"),
    "count of ids": ({"num_aux_hidden_states": 4}, {}, "num_aux_hidden_states is 4 but"),
    "d2t missing": ({}, {"d2t": None}, "lack d2t"),
    "d2t outside": ({}, {"d2t": torch.full((48,), 100)}, "outside the target's vocabulary of 128"),
    "d2t repeated": ({}, {"d2t": torch.tensor([1, 0] + [3] * 46), "t2d": None}, "maps 1 draft ids to a target id"),
    "d2t against t2d": ({}, {"t2d": torch.arange(128) < 48}, "d2t and t2d disagree"),
    "head missing": ({}, {"lm_head.weight": None}, "no lm_head.weight although draft_vocab_size 48"),
    "another hidden size": ({"target_hidden_size": 64}, {}, "made for a target of hidden size 64, this target has 32"),
    "another vocabulary": ({"vocab_size": 256}, {}, "made for a vocabulary of 256, this target has 128"),
    "architecture": ({"architectures": ["Eagle3MambaForCausalLM"]}, {}, "Eagle3MambaForCausalLM is not supported"),
    "another attention": ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, {}, "lacks kv_lora_rank, qk_nope_head_dim"),
    "norms of another kind": ({}, {"midlayer.self_attn.q_norm.weight": torch.ones(8)}, "unknown tensors: midlayer.self_attn.q"),
    "activation": ({"hidden_act": "gelu"}, {}, "activation 'gelu'"),
    "key missing": ({"hidden_size": None}, {}, "config.json lacks hidden_size"),
    "kind of value": ({"num_attention_heads": "many"}, {}, "wrong kind"),
    "layer ids of a trainer": ({IDS: None, "eagle_config": {IDS: 5}}, {}, "must be a list of layers, not 5"),
    "layer ids in words": ({IDS: None, "eagle_config": {IDS: [1, "low"]}}, {}, "must be a list of layers"),
    "rope type": ({"rope_scaling": {"rope_type": "longrope"}}, {}, "rope type 'longrope'"),
    "last state only": ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "not EAGLE 3"),
}


@pytest.mark.parametrize(("config", "tensors", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_invalid_drafters_are_refused(drafter_folder, config, tensors, message):
    load_drafter(drafter_folder, TARGET)  # valid before the change
    with pytest.raises(ModelError, match=message):
        load_drafter(change(drafter_folder, config, tensors), TARGET)


def test_latent_attention_file_has_the_layout_of_vllm(tmp_path):
    settings = {"mla": MLA_LATENT_QUERIES, "fc_norm": True, "norm_output": True, "rope": DEEPSEEK_YARN}
    folder = save_drafter(tiny_drafter(tiny_drafter_config(TARGET, **settings)), tmp_path / "drafter")
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    assert (config["architectures"], config["model_type"]) == (["Eagle3DeepseekV2ForCausalLM"], "deepseek_v2")
    expected = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    assert {key: config[key] for key in expected} == expected
    assert config["num_key_value_heads"] == 4
    assert "head_dim" not in config
    assert {key: config["rope_scaling"][key] for key in ("mscale", "mscale_all_dim")} == {"mscale": 1.0, "mscale_all_dim": 0.7}
    names = "midlayer.self_attn."
    assert {name.removeprefix(names): tuple(t.shape) for name, t in tensors.items() if name.startswith(names)} == {
        "q_a_proj.weight": (20, 64),
        "q_a_layernorm.weight": (20,),
        "q_b_proj.weight": (4 * 12, 20),
        "kv_a_proj_with_mqa.weight": (12 + 4, 64),
        "kv_a_layernorm.weight": (12,),
        "kv_b_proj.weight": (4 * (8 + 6), 12),
        "o_proj.weight": (32, 4 * 6),
    }
    straight = tiny_drafter(tiny_drafter_config(TARGET, mla=MLA))
    tensors = load_file(save_drafter(straight, tmp_path / "straight") / "model.safetensors")
    assert tensors[names + "q_proj.weight"].shape == (4 * 12, 64)
    assert names + "q_a_proj.weight" not in tensors
    as_deepseek_v3 = change(folder, {"architectures": ["Eagle3DeepseekV3ForCausalLM"], "head_dim": 4})
    assert load_drafter(as_deepseek_v3, TARGET).config.mla == MLA_LATENT_QUERIES


@pytest.fixture
def latent_folder(tmp_path):
    settings = {"draft_vocab_size": 48, "fc_norm": True, "norm_output": True, "mla": MLA_LATENT_QUERIES}
    return save_drafter(tiny_drafter(tiny_drafter_config(TARGET, **settings)), tmp_path / "drafter")


ATTENTION = "midlayer.self_attn."
LATENT_FAULTS = {
    "missing": ({}, {ATTENTION + "kv_b_proj.weight": None}, "missing tensors: midlayer.self_attn.kv_b_proj.weight"),
    "unknown": ({}, {ATTENTION + "k_proj.weight": torch.ones(4, 64)}, "unknown tensors: midlayer.self_attn.k_proj.weight"),
    "shape": ({}, {ATTENTION + "kv_a_proj_with_mqa.weight": torch.ones(16, 32)}, r"asks for \[16, 64\]"),
    "size": ({"v_head_dim": 8}, {}, r"kv_b_proj.weight has shape \[56, 12\]; config.json asks for \[64, 12\]"),
    "queries": ({"q_lora_rank": None}, {}, "missing tensors: midlayer.self_attn.q_proj.weight"),
    "rank without weights": ({}, {ATTENTION + "q_a_layernorm.weight": None}, "q_a_layernorm.weight"),
    "flag without weights": ({}, {f"fc_norm.{i}.weight": None for i in range(3)}, "sets fc_norm but the weights lack"),
    "weights without flag": ({"fc_norm": False}, {}, "fc_norm.0.weight.*does not set fc_norm"),
    "key missing": ({"kv_lora_rank": None}, {}, "config.json lacks kv_lora_rank"),
    "odd rotation": ({"qk_rope_head_dim": 3}, {}, "qk_rope_head_dim 3 is odd"),
    "nothing at all": ({"qk_nope_head_dim": 0}, {}, "needs qk_nope_head_dim of at least 1"),
    "wide values": ({"v_head_dim": 13}, {}, "v_head_dim 13 above"),
    "biases": ({"attention_bias": True}, {}, "attention_bias: latent attention"),
    "halves": ({"rope_interleave": False}, {}, "rope_interleave false"),
    "rope": ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, {}, "rope type 'linear' is not supported with latent"),
    "attention factor": (
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1.1}},
        {},
        "attention_factor and",
    ),
    "half an mscale": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "mscale_all_dim": 1.0}}, {}, "must both be set"),
    "another kind": ({"architectures": ["LlamaForCausalLMEagle3"]}, {}, "missing tensors: midlayer.self_attn.q_proj.weight"),
}


@pytest.mark.parametrize(("config", "tensors", "message"), LATENT_FAULTS.values(), ids=LATENT_FAULTS.keys())
def test_latent_attention_that_does_not_fit_is_refused(latent_folder, config, tensors, message):
    load_drafter(latent_folder, TARGET)  # valid before the change
    with pytest.raises(ModelError, match=message):
        load_drafter(change(latent_folder, config, tensors), TARGET)


def test_query_and_key_norms_are_detected_from_the_weights(tmp_path):
    """vLLM's Qwen3 drafter has these norms; some trainers label a Llama drafter as Qwen3."""
    folder = save_drafter(tiny_drafter(tiny_drafter_config(TARGET, qk_norm=True)), tmp_path / "drafter")
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    norms = {f"{ATTENTION}{part}_norm.weight": None for part in "qk"}
    assert load_drafter(folder, TARGET).config.qk_norm
    with pytest.raises(ModelError, match=r"missing tensors: midlayer\.self_attn\.k_norm"):
        load_drafter(change(folder, {}, {ATTENTION + "k_norm.weight": None}), TARGET)
    assert not load_drafter(change(folder, {}, norms), TARGET).config.qk_norm


def test_all_problems_are_reported_at_once(drafter_folder):
    change(drafter_folder, {"num_aux_hidden_states": 5}, {"norm.weight": None, "extra": torch.ones(1), "d2t": None})
    with pytest.raises(ModelError) as refusal:
        load_drafter(drafter_folder, TARGET)
    for part in ("num_aux_hidden_states is 5", "missing tensors: norm.weight", "unknown tensors: extra", "lack d2t"):
        assert part in str(refusal.value)


def test_d2t_with_ids_instead_of_offsets_is_reported(drafter_folder):
    offsets = load_file(drafter_folder / "model.safetensors")["d2t"]
    change(drafter_folder, {}, {"d2t": offsets + torch.arange(48)})
    with pytest.raises(ModelError, match="target ids instead of offsets"):
        load_drafter(drafter_folder, TARGET)


def test_a_narrower_drafter_needs_an_embedding_and_a_head(tmp_path):
    settings = {"hidden_size": 16, "own_embedding": True, "draft_vocab_size": 48}
    folder = save_drafter(tiny_drafter(tiny_drafter_config(TARGET, **settings)), tmp_path / "drafter")
    change(folder, {}, {"embed_tokens.weight": None})
    with pytest.raises(ModelError, match=r"hidden size 16 differs from the target's 32.*embedding cannot be shared"):
        load_drafter(folder, TARGET)


def test_layer_ids_default_to_low_middle_high(drafter_folder):
    target = tiny_model_config(num_layers=12)
    change(drafter_folder, {IDS: None, "eagle_config": None})
    assert load_drafter(drafter_folder, target).config.aux_layer_ids == (2, 6, 9)
    with pytest.raises(ModelError, match="name the target"):
        load_drafter(drafter_folder)


def test_configuration_without_weights():
    raw = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 8,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "rope_theta": 5e5,
        "eagle_config": {IDS: [2, 4, 7], "norm_output": True},
    }
    config = drafter_config_from_hf(raw)
    assert (config.head_dim, config.num_kv_heads, config.draft_vocab_size) == (8, 8, 1000)
    assert (config.aux_layer_ids, config.norm_output, config.rope.theta) == ((2, 4, 7), True, 5e5)
    with pytest.raises(ModelError, match=r"config\.json lacks vocab_size"):
        drafter_config_from_hf({**raw, "vocab_size": None})


def test_alias_of_the_first_layer(drafter_folder):
    expected = load_drafter(drafter_folder, TARGET).state_dict()
    tensors = load_file(drafter_folder / "model.safetensors")
    save_file(
        {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()},
        drafter_folder / "model.safetensors",
    )
    for name, tensor in load_drafter(drafter_folder, TARGET).state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    save_file(
        tensors | {"layers.0.hidden_norm.weight": torch.ones(32)},
        drafter_folder / "model.safetensors",
    )
    with pytest.raises(ModelError, match="twice"):
        load_drafter(drafter_folder, TARGET)


def test_sharded_and_pickled_weights(drafter_folder):
    expected = load_drafter(drafter_folder, TARGET).state_dict()
    tensors = load_file(drafter_folder / "model.safetensors")
    (drafter_folder / "model.safetensors").unlink()
    torch.save(tensors, drafter_folder / "pytorch_model.bin")
    pickled = load_drafter(drafter_folder, TARGET).state_dict()
    (drafter_folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    with pytest.raises(ModelError, match="cannot be read as plain tensors"):
        load_drafter(drafter_folder, TARGET)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, drafter_folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    index = drafter_folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    sharded = load_drafter(drafter_folder, TARGET).state_dict()
    for name, tensor in expected.items():
        assert torch.equal(tensor, pickled[name]), name
        assert torch.equal(tensor, sharded[name]), name
    (drafter_folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        load_drafter(drafter_folder, TARGET)


def test_files_that_are_not_a_drafter(tmp_path, drafter_folder):
    with pytest.raises(ModelError, match="no such folder"):
        load_drafter(tmp_path / "nowhere", TARGET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json"):
        load_drafter(tmp_path / "empty", TARGET)
    with pytest.raises(ModelError, match="this is a file"):
        load_drafter(drafter_folder / "config.json", TARGET)
    weights = drafter_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged or truncated"):
        load_drafter(drafter_folder, TARGET)


def test_pickle_error_without_a_message(drafter_folder, monkeypatch):
    (drafter_folder / "model.safetensors").rename(drafter_folder / "pytorch_model.bin")
    monkeypatch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(AssertionError()))
    with pytest.raises(ModelError, match=r"cannot be read as plain tensors \(AssertionError\)"):
        load_drafter(drafter_folder, TARGET)


def test_saving_replaces_only_a_drafter(tmp_path, drafter_folder):
    (drafter_folder / "leftover.txt").write_text("from before")
    drafter = tiny_drafter(tiny_drafter_config(TARGET, norm_before_fc=True))
    save_drafter(drafter, drafter_folder)
    assert load_drafter(drafter_folder, TARGET).config.norm_before_fc
    assert sorted(file.name for file in drafter_folder.iterdir()) == ["config.json", "model.safetensors"]
    other = tmp_path / "photographs"
    other.mkdir()
    (other / "cat.jpg").write_text("meow")
    (other / "config.json").write_text('{"architectures": 5}')
    with pytest.raises(ModelError, match="is not a drafter"):
        save_drafter(drafter, other)
    assert sorted(file.name for file in other.iterdir()) == ["cat.jpg", "config.json"]
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], "temporary folders left behind"


def test_loads_in_another_type(drafter_folder):
    drafter = load_drafter(drafter_folder, TARGET, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in drafter.parameters()} == {torch.bfloat16}
    assert drafter.d2t.dtype == torch.int64
    assert drafter.rotary.inverse_frequencies.dtype == torch.float32
