"""Size and time estimates: against sizes of real networks, and one case calculated by hand."""

from __future__ import annotations

import pytest
import torch

from fledge.errors import UserError
from fledge.models.drafter import EagleDrafter
from fledge.training.planning import Plan, parse
from tests.tiny import tiny_drafter_config


def test_parameters_are_those_of_a_drafter():
    config = tiny_drafter_config(draft_vocab_size=96)
    with torch.device("meta"):
        drafter = EagleDrafter(config)
    plan = Plan(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        draft_vocab_size=96,
        num_taps=len(config.aux_layer_ids),
    )
    assert plan.drafter_parameters == sum(p.numel() for p in drafter.parameters() if p.dim() == 2)


def test_kimi_k2_estimate():
    plan = Plan()
    assert plan.bytes_per_token == 4 * 7168 * 2 == 57_344
    assert plan.storage_bytes == pytest.approx(57.344e12)  # 500,000 samples of 2,000 tokens: a billion
    assert plan.prefill_flops == pytest.approx(64e9 + 2 * 61 * 20_480 * 1_000)
    assert plan.prefill_gpu_hours == pytest.approx(1e9 * 66.49856e9 / 296.7e12 / 3600)
    layer = 14_336 * 21_504 + 7_168 * 7_168 + 3 * 7_168 * 18_432
    assert plan.layer_parameters == layer
    attention = 4 * 7_168 * 1_000
    head = 0.75 * 2 * 32_000 * 7_168 * 16
    assert plan.training_flops == pytest.approx(3 * (5 * (2 * layer + attention) + 2 * 3 * 7_168**2) + head)
    assert plan.training_gpu_hours == pytest.approx(2e9 * plan.training_flops / 296.7e12 / 3600)


def test_streaming_is_as_fast_as_the_slower_side():
    fast_trainer, fast_server = Plan(trainer_gpus=80), Plan(target_gpus=80)
    assert fast_trainer.bytes_per_s == fast_trainer.prefill_tokens_per_s * 57_344
    assert fast_server.bytes_per_s == fast_server.training_tokens_per_s * 57_344


def test_numbers_from_the_command_line():
    plan = parse(["hidden_size=4096", "active_parameters=8e9", "samples=1e5"])
    assert (plan.hidden_size, plan.active_parameters, plan.samples) == (4096, 8e9, 1e5)
    assert "| hidden states, per token | 32,768 B |" in plan.table()
    for wrong in ("hiden=3", "samples=many", "samples=0", "samples"):
        with pytest.raises(UserError, match=wrong.split("=")[0]):
            parse([wrong])
