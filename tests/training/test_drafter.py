"""Initial weights of drafters, optimizers and learning rate schedules."""

from __future__ import annotations

import pytest
import torch

from fledge.config import MLAConfig
from fledge.errors import ModelError
from fledge.training.arm import build_optimizers, learning_rate_factor
from fledge.training.drafter import (
    last_layer,
    last_layer_of_transformers,
    start_from_drafter,
    start_from_target,
    start_random,
)
from fledge.training.recipe import OptimizerRecipe
from fledge.training.targets.target import Head
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def started(flags: dict, **target):
    decoder = tiny_decoder(intermediate_size=64, **target)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, draft_vocab_size=50, **flags))
    copied = start_from_target(drafter, last_layer(decoder), Head(decoder.lm_head.weight), decoder.embed_tokens, TAPS)
    return decoder, drafter, copied


TAPS = [size * torch.nn.functional.rms_norm(torch.randn(50, 32), (32,)) for size in (2.0, 5.0, 8.0)]


@pytest.mark.parametrize(
    ("flags", "stream"),
    [
        ({}, 8.0),
        ({"fc_norm": True}, 1.0),
        ({"norm_output": True}, 1.5),
        ({"fc_norm": True, "norm_output": True}, 1.5),
        ({"norm_before_residual": True}, 0.5),
        ({"fc_norm": True, "norm_output": True, "norm_before_residual": True}, 0.5),
    ],
    ids=str,
)
def test_a_copied_layer_adds_to_the_stream_in_proportion(flags, stream):
    """At every step: copied weights are scaled by the residual stream's size under the config, not by a constant."""
    decoder = tiny_decoder(intermediate_size=64)
    with torch.no_grad():
        decoder.norm.weight.fill_(1.5)
        decoder.layers[-1].input_layernorm.weight.fill_(0.5)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, draft_vocab_size=50, **flags))
    start_from_target(drafter, last_layer(decoder), Head(decoder.lm_head.weight), decoder.embed_tokens, TAPS)
    for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
        ours, theirs = (layer.get_parameter(name) for layer in (drafter.layers[0], decoder.layers[-1]))
        torch.testing.assert_close(ours, stream / 8.0 * theirs, rtol=1e-4, atol=1e-6)

    def rms(x: torch.Tensor) -> float:
        return float(x.square().mean(-1).sqrt().median())

    first = drafter.fuse(TAPS)
    fed_back = drafter.norm(torch.randn(50, 32)) if flags.get("norm_output") else first
    for state in (first, fed_back):
        residual = drafter.layers[0].hidden_norm(state) if flags.get("norm_before_residual") else state
        assert rms(residual) == pytest.approx(stream, rel=1e-3)


@pytest.mark.parametrize(("flags", "scale"), [({}, 1.0), ({"fc_norm": True}, 0.125)])
def test_the_targets_last_layer_is_copied(flags, scale):
    decoder, drafter, copied = started(flags)
    theirs, ours = decoder.layers[-1], drafter.layers[0]
    assert set(copied) >= {"fc", "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "norm", "hidden_norm"}
    assert torch.equal(ours.self_attn.qkv_proj.weight[:, 32:], theirs.self_attn.qkv_proj.weight)
    assert ours.self_attn.qkv_proj.weight[:, :32].abs().max() < 0.2
    torch.testing.assert_close(ours.self_attn.o_proj.weight, scale * theirs.self_attn.o_proj.weight)
    torch.testing.assert_close(ours.mlp.down_proj.weight, scale * theirs.mlp.down_proj.weight)
    ids = drafter.target_ids(torch.arange(50))
    assert torch.equal(drafter.lm_head.weight, decoder.lm_head.weight[ids])
    taps = [torch.randn(4, 32) for _ in range(3)]
    if not flags:
        torch.testing.assert_close(drafter.fuse(taps), taps[-1])


def test_projections_behind_query_norms_are_left_out():
    _, _, copied = started({}, architecture="Qwen3ForCausalLM")
    assert "qkv_proj" not in copied
    assert "o_proj" in copied


def test_projections_behind_query_norms_are_copied_with_the_norms():
    decoder, drafter, copied = started({"qk_norm": True}, architecture="Qwen3ForCausalLM")
    theirs, ours = decoder.layers[-1].self_attn, drafter.layers[0].self_attn
    assert {"qkv_proj", "q_norm", "k_norm", "o_proj"} <= set(copied)
    assert torch.equal(ours.qkv_proj.weight[:, 32:], theirs.qkv_proj.weight)
    assert torch.equal(ours.k_norm.weight, theirs.k_norm.weight)
    assert "qkv_proj" not in started({"qk_norm": True})[2]


def test_latent_attention_is_not_copied_from_other_attention():
    """Not even an output projection whose shape happens to fit."""
    mla = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    decoder, drafter, copied = started({"mla": mla, "fc_norm": True, "norm_output": True})
    ours, theirs = drafter.layers[0], decoder.layers[-1]
    assert ours.self_attn.o_proj.weight.shape == theirs.self_attn.o_proj.weight.shape
    assert set(copied) == {
        "lm_head", "fc", "hidden_norm", "post_attention_layernorm", "norm", "gate_up_proj", "down_proj",
    }  # fmt: skip
    assert torch.equal(ours.mlp.gate_up_proj.weight, theirs.mlp.gate_up_proj.weight)
    assert all(0 < w.abs().max() < 0.2 for name, w in ours.self_attn.named_parameters() if "norm" not in name)


@pytest.mark.parametrize("q_lora_rank", [20, None])
def test_latent_attention_is_copied_from_latent_attention(q_lora_rank):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    sizes = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "q_lora_rank": q_lora_rank}
    theirs = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            first_k_dense_replace=1,  # the last layer has experts, whose weights cannot be copied
            n_routed_experts=8,
            num_attention_heads=4,
            num_key_value_heads=4,
            **sizes,
        )
    )
    weights = last_layer_of_transformers(theirs)
    assert not [name for name in weights if "expert" in name]
    for factor in (1, 2):  # with another size nothing fits
        mla = MLAConfig(**sizes | {"kv_lora_rank": 12 * factor})
        drafter = tiny_drafter(tiny_drafter_config(mla=mla))
        head, embedding = Head(theirs.lm_head.weight.detach()), theirs.get_input_embeddings()
        copied = start_from_target(drafter, weights, head, embedding, TAPS)
        assert {"hidden_norm", "norm"} <= set(copied)
        assert "gate_up_proj" not in copied
        assert ("qkv_a_proj" in copied, "o_proj" in copied) == (factor == 1, factor == 1)
        if factor == 1:
            ours, last = drafter.layers[0].self_attn, theirs.model.layers[-1].self_attn
            queries = last.q_proj if q_lora_rank is None else last.q_a_proj
            expected = torch.cat([queries.weight, last.kv_a_proj_with_mqa.weight])
            assert torch.equal(ours.qkv_a_proj.weight[:, 32:], expected)
            assert torch.equal(ours.kv_b_proj.weight, last.kv_b_proj.weight)


@pytest.mark.parametrize("family", ["Gemma2", "Olmo2", "Llama"])
def test_norms_are_copied_by_their_position(family):
    """In Gemma 2 and OLMo 2, post_attention_layernorm is the norm after attention. Gemma stores norm weights minus one."""
    import transformers

    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    last = model.model.layers[-1]
    norms = [module for name, module in model.model.named_modules() if name.endswith("norm")]
    for norm in norms:
        torch.nn.init.normal_(norm.weight)
    weights = last_layer_of_transformers(model)
    drafter = tiny_drafter(tiny_drafter_config(head_dim=8))
    head, embedding = Head(model.lm_head.weight.detach()), model.get_input_embeddings()
    copied = set(start_from_target(drafter, weights, head, embedding, TAPS))
    layer = drafter.layers[0]
    if family == "Gemma2":
        assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight + 1)
        assert torch.equal(layer.post_attention_layernorm.weight, last.pre_feedforward_layernorm.weight + 1)
        assert torch.equal(drafter.norm.weight, model.model.norm.weight + 1)
    elif family == "Olmo2":
        assert copied.isdisjoint({"hidden_norm", "post_attention_layernorm"})
        assert (layer.post_attention_layernorm.weight == 1).all()
    else:
        assert torch.equal(layer.hidden_norm.weight, last.input_layernorm.weight)
        assert torch.equal(layer.post_attention_layernorm.weight, last.post_attention_layernorm.weight)
    assert {"o_proj", "down_proj"} & copied == ({"o_proj", "down_proj"} if family == "Llama" else set())


def test_an_eagle_3_drafter_becomes_3_1_and_stays_close():
    decoder = tiny_decoder()
    head = Head(decoder.lm_head.weight)
    old = tiny_drafter(tiny_drafter_config(draft_vocab_size=50))
    new = tiny_drafter(tiny_drafter_config(draft_vocab_size=60, fc_norm=True, norm_output=True), seed=9)
    start_random(new, head, decoder.embed_tokens)
    taps = [size * torch.nn.functional.normalize(torch.randn(64, 32), dim=-1) * 32**0.5 for size in (1.0, 6.0, 22.0)]
    added = start_from_drafter(new, old, head, decoder.embed_tokens, taps)
    assert added == [f"fc_norm.{i}.weight" for i in range(3)]
    torch.testing.assert_close(new.fuse(taps), old.fuse(taps), rtol=1e-3, atol=1e-3)
    assert torch.equal(new.layers[0].mlp.down_proj.weight, old.layers[0].mlp.down_proj.weight)
    old_ids, new_ids = old.target_ids(torch.arange(50)).tolist(), new.target_ids(torch.arange(60)).tolist()
    for row, token in enumerate(new_ids):
        expected = old.lm_head.weight[old_ids.index(token)] if token in old_ids else decoder.lm_head.weight[token]
        assert torch.equal(new.lm_head.weight[row], expected)


def test_a_drafter_of_another_shape_is_refused():
    decoder = tiny_decoder()
    new, old = tiny_drafter(), tiny_drafter(tiny_drafter_config(aux_layer_ids=(0, 1, 2)))
    with pytest.raises(ModelError, match="its aux_layer_ids is"):
        start_from_drafter(new, old, Head(decoder.lm_head.weight), decoder.embed_tokens)


def test_a_drafter_with_other_attention_is_refused():
    decoder = tiny_decoder()
    mla = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=6)
    new, old = tiny_drafter(tiny_drafter_config(mla=mla)), tiny_drafter(tiny_drafter_config(num_kv_heads=4))
    with pytest.raises(ModelError, match="its mla is None"):
        start_from_drafter(new, old, Head(decoder.lm_head.weight), decoder.embed_tokens)


def test_muon_gets_only_matrices_of_layers_and_fc():
    drafter = tiny_drafter().requires_grad_(True)
    adamw, muon = build_optimizers(drafter, OptimizerRecipe(kind="muon")).parts
    names = {id(p): name for name, p in drafter.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    left = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert "fc.weight" in taken
    assert "layers.0.self_attn.qkv_proj.weight" in taken
    assert {"lm_head.weight", "norm.weight"} <= left
    assert taken | left == set(names.values())
    assert not taken & left


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {0.05: 0.5, 0.1: 1.0, 0.55: 0.55, 1.0: 0.1}),
        ("wsd", {0.05: 0.5, 0.1: 1.0, 0.8: 1.0, 0.9: 0.55, 1.0: 0.1}),
        ("linear", {0.05: 0.5, 0.55: 0.55, 1.0: 0.1}),
        ("constant", {0.05: 0.5, 0.5: 1.0, 1.0: 1.0}),
    ],
)
def test_learning_rates(kind, expected):
    for progress, factor in expected.items():
        settings = OptimizerRecipe(schedule=kind, warmup=0.1, decay=0.2, floor=0.1)
        assert learning_rate_factor(progress, settings) == pytest.approx(factor)


@pytest.mark.parametrize("warmup", [1e-6, 5e-5, 1e-4, 0.02])
def test_a_short_warm_up_never_exceeds_the_peak(warmup):
    settings = OptimizerRecipe(warmup=warmup)
    factors = [learning_rate_factor(progress, settings) for progress in (0.0, warmup / 2, warmup * 0.999, warmup, 0.5)]
    assert max(factors) <= 1.0
    assert factors[0] > 0
