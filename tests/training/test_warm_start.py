"""Where drafters start, and how learning rates go."""

from __future__ import annotations

import pytest
import torch

from fledge.errors import ModelError
from fledge.training.losses import Head
from fledge.training.optimizers import build_optimizers
from fledge.training.schedule import learning_rate_factor
from fledge.training.warm_start import last_layer, start_from_drafter, start_from_target, start_random
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def started(flags: dict, **target):
    decoder = tiny_decoder(intermediate_size=64, **target)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, draft_vocab_size=50, **flags))
    copied = start_from_target(drafter, last_layer(decoder), Head(decoder.lm_head.weight), decoder.embed_tokens)
    return decoder, drafter, copied


@pytest.mark.parametrize(("flags", "scale"), [({}, 1.0), ({"fc_norm": True, "norm_output": True}, 0.1)])
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


def test_muon_takes_the_layers_matrices_alone():
    drafter = tiny_drafter().requires_grad_(True)
    adamw, muon = build_optimizers(drafter, "muon", 1e-3).parts
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
        assert learning_rate_factor(progress, kind, warmup=0.1, decay=0.2, floor=0.1) == pytest.approx(factor)
