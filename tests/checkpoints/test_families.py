"""Configurations of the families: similar but unsupported ones are refused by the key that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fledge.checkpoints.hf import config_to_hf, load_decoder, save_decoder
from fledge.config import ModelConfig
from fledge.errors import ModelError
from tests.tiny import tiny_decoder, tiny_model_config

MOE, GEMMA, PHI = "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"


@pytest.mark.parametrize(
    ("architecture", "change", "named"),
    [
        (MOE, {"hidden_act": "gelu"}, "hidden_act"),
        (MOE, {"scoring_func": "sigmoid"}, "scoring_func"),
        (MOE, {"n_group": 8}, "n_group"),
        (MOE, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MOE, {"num_experts": 0}, "number of experts"),
        (MOE, {"moe_intermediate_size": 0}, "intermediate size cannot be 0"),
        (MOE, {"decoder_sparse_step": -1}, "decoder_sparse_step"),
        (MOE, {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ("MixtralForCausalLM", {"num_local_experts": "many"}, "num_local_experts"),
        ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 1 << 30}, "an expert's intermediate size cannot be"),
        (GEMMA, {"hidden_activation": "gelu"}, "hidden_activation"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (GEMMA, {"sliding_window": None}, "sliding_window"),
        (GEMMA, {"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        (PHI, {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        (PHI, {"rope_scaling": {"type": "su", "short_factor": [1.0], "long_factor": [1.0]}}, "must have 3 numbers"),
        (PHI, {"rope_scaling": {"type": "longrope", "short_factor": "x", "long_factor": [1.0]}}, "short_factor"),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("MistralForCausalLM", {"rope_parameters": {"llama_4_scaling_beta": 0.1}}, "llama_4_scaling_beta"),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}, "mrope"),
        ("GemmaForCausalLM", {"hidden_act": "relu"}, "hidden_act"),
        ("GemmaForCausalLM", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": 4}, "no_rope_layers"),
        ("Glm4ForCausalLM", {"partial_rotary_factor": 0.4}, "partial_rotary_factor"),
        ("LlamaForCausalLM", {"attention_multiplier": 0.1}, "attention_multiplier"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 4, "use_sliding_window": True}, "linear_attention"),
        ("Qwen3ForCausalLM", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 4}, "layer_types sliding_attention of layer 0"),
        ("LlamaForCausalLM", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, "sliding_attention of layer 3"),
        (MOE, {"layer_types": ["full_attention"] * 4, "use_sliding_window": True}, "full_attention of layer 0"),
        ("Qwen2ForCausalLM", {"dual_chunk_attention_config": {"chunk_size": 262144}}, "dual_chunk_attention_config"),
    ],
)
def test_unsupported_variants_are_refused_by_key(architecture: str, change: dict[str, Any], named: str) -> None:
    content = config_to_hf(tiny_model_config(architecture)) | {"sliding_window": 16}
    ModelConfig.from_hf(content)
    with pytest.raises(ModelError, match=named):
        ModelConfig.from_hf(content | change)


@pytest.mark.parametrize(
    "architecture", ["Gemma2ForCausalLM", "DeepseekV3ForCausalLM", "PhimoeForCausalLM", "GptOssForCausalLM"]
)
def test_other_architectures_are_refused_by_name(architecture: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture} is not supported; supported: .*Qwen3MoeForCausalLM"):
        ModelConfig.from_hf(config_to_hf(tiny_model_config()) | {"architectures": [architecture]})


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    folder = save_decoder(tiny_decoder(architecture=MOE), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.experts.5.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2\.mlp\.experts\.5\.up_proj\.weight"):
        load_decoder(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_text_part_of_a_multimodal_model(prefix: str, tmp_path: Path) -> None:
    decoder = tiny_decoder(architecture=GEMMA, tie_embeddings=True)
    folder = save_decoder(decoder, tmp_path)
    tensors = {prefix + name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    tensors |= {"vision_tower.vision_model.post_layernorm.weight": torch.ones(3)}
    tensors |= {"multi_modal_projector.mm_input_projection_weight": torch.ones(3)}
    save_file(tensors, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    text["eos_token_id"] = None
    del text["eos_token_id"]
    (folder / "config.json").write_text(json.dumps(whole))
    loaded = load_decoder(folder)
    assert loaded.config.eos_token_ids == (1, 106)
    for (name, mine), (_, theirs) in zip(decoder.named_parameters(), loaded.named_parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


def test_flat_configuration_of_a_multimodal_model() -> None:
    """The form of Qwen/Qwen2.5-VL-3B-Instruct: a tied head, and no rope base inside `rope_scaling`."""
    content = config_to_hf(tiny_model_config("Qwen2ForCausalLM", tie_embeddings=True)) | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 2e6,
        "vision_config": {"hidden_size": 1280},
    }
    config = ModelConfig.from_hf(content)
    assert (config.architecture, config.rope.kind, config.rope.theta) == ("Qwen2ForCausalLM", "default", 2e6)
    assert config.tie_embeddings
    del content["rope_theta"]
    assert ModelConfig.from_hf(content).rope.theta == 1e6
    stretched = {"type": "yarn", "mrope_section": [1, 1, 2], "factor": 4.0, "original_max_position_embeddings": 512}
    assert ModelConfig.from_hf(content | {"rope_scaling": stretched}).max_positions == 2048


def test_layers_without_rope_of_smollm3() -> None:
    content = config_to_hf(tiny_model_config("SmolLM3ForCausalLM", num_layers=9))
    del content["no_rope_layers"]
    assert ModelConfig.from_hf(content).unrotated == (3, 7)
    assert ModelConfig.from_hf(content | {"no_rope_layer_interval": 2}).unrotated == (1, 3, 5, 7)


def test_yarn_as_set_by_model_cards() -> None:
    """The model cards of Qwen2.5 and Qwen3 leave max_position_embeddings unchanged."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    content = config_to_hf(tiny_model_config("Qwen2ForCausalLM"))
    for said, found in ((32768, 131_072), (40960, 131_072), (262_144, 262_144)):
        config = ModelConfig.from_hf(content | {"rope_scaling": scaling, "max_position_embeddings": said})
        assert config.max_positions == found
        assert ModelConfig.from_hf(config_to_hf(config)) == config
    assert ModelConfig.from_hf(content | {"rope_scaling": scaling | {"type": "linear"}}).max_positions == 512


def test_keys_that_mixtral_and_phi_leave_out_have_their_own_defaults() -> None:
    mixtral, phi = (config_to_hf(tiny_model_config(name)) for name in ("MixtralForCausalLM", PHI))
    for key in ("rope_theta", "rms_norm_eps"):
        del mixtral[key], phi[key]
    assert (ModelConfig.from_hf(mixtral).rope.theta, ModelConfig.from_hf(mixtral).rms_norm_eps) == (1e6, 1e-5)
    assert (ModelConfig.from_hf(phi).rope.theta, ModelConfig.from_hf(phi).rms_norm_eps) == (1e4, 1e-5)


def test_keys_that_gemma_leaves_out_have_its_own_defaults() -> None:
    """The configuration of google/gemma-3-4b-it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = ModelConfig.from_hf({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (8, 4, 256, 262_208)
    assert config.windows[:6] == (1024,) * 5 + (None,)
    assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
    assert (config.local_rope.kind, config.local_rope.theta) == ("default", 1e4)
    assert config.tie_embeddings
    assert config.query_scale == 1.0


@torch.no_grad()
def test_short_phi_context_uses_short_factors() -> None:
    from fledge.config import RopeConfig

    rope = RopeConfig(1e4, "longrope", 8.0, 64, attention_factor=1.5, short_factor=(1.0, 2.0, 3.0), long_factor=(2.0, 4.0, 6.0))
    decoder = tiny_decoder(architecture=PHI, rope=rope)
    long = decoder.rotary.inverse_frequencies.clone()
    decoder.set_rotary(64)
    assert torch.equal(decoder.rotary.inverse_frequencies / 2, long)


def test_norms_stay_exact_when_the_network_is_cast() -> None:
    decoder = tiny_decoder(architecture=GEMMA)
    exact = decoder.layers[1].input_layernorm.weight.clone()
    decoder.to(torch.bfloat16)
    assert torch.equal(decoder.layers[1].input_layernorm.weight, exact)
    assert decoder.dtype == decoder.embed(torch.tensor([3])).dtype == torch.bfloat16
