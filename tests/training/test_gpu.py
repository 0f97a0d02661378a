"""On a GPU: compiled bf16 training against fp32 with dense masks, flex attention at any length, bit-exact resume."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.training.data.packing import PackedLoader
from fledge.training.data.samples import Sample
from fledge.training.drafter import start_random
from fledge.training.objective import Objective
from fledge.training.recipe import ObjectiveRecipe, build_recipe
from fledge.training.targets import toy
from fledge.training.targets.target import DecoderTarget
from fledge.training.trainer import train
from fledge.training.ttt import attention_with_lse, document_starts, packed_mask
from tests.tiny import tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
STEPS = 4


def networks(**flags) -> tuple[Decoder, EagleDrafter]:
    torch.manual_seed(0)
    decoder = Decoder(toy.TARGET)
    for parameter in decoder.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.08)
    decoder = decoder.eval().requires_grad_(False)
    drafter = EagleDrafter(tiny_drafter_config(decoder.config, **flags))
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids)
    start_random(drafter, target.head, target.embedding)
    return decoder, drafter.requires_grad_(True)


def loss_and_gradients(
    decoder: Decoder, drafter: EagleDrafter, length: int, device: str, compute: torch.dtype | None, compile: bool
) -> tuple[float, dict[str, torch.Tensor]]:
    decoder, drafter = deepcopy(decoder).to(device), deepcopy(drafter).to(device)
    if compute is not None:
        decoder = decoder.to(compute)
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids, compile=compile)
    settings = ObjectiveRecipe(ttt_steps=STEPS, outside_vocabulary="renormalise")
    objective = Objective(drafter, target, settings, length, 2 * length, compute_dtype=compute, compile=compile)
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        size = int(rng.integers(8, length))
        tokens = rng.integers(4, len(toy.WORDS), size).astype(np.int32)
        samples.append(Sample(tokens, np.arange(size) >= 4))
    batch = objective.plan(next(PackedLoader(samples, length, 2, seed=0)))
    weights = objective.step_weights(batch.num_valid_K.to(device))
    loss, _ = objective(batch.to(torch.device(device)), weights)
    loss.backward()
    return float(loss.detach()), {n: p.grad.float().cpu() for n, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("length", [256, 200])
@pytest.mark.parametrize("flags", [{"fc_norm": True, "norm_output": True}, {}, {"window": 24}], ids=["3.1", "3", "window"])
def test_compiled_bf16_against_fp32_with_dense_masks(length, flags):
    decoder, drafter = networks(**flags)
    expected, gradients = loss_and_gradients(decoder, drafter, length, "cpu", None, compile=False)
    found, compiled = loss_and_gradients(decoder, drafter, length, "cuda", torch.bfloat16, compile=True)
    assert found == pytest.approx(expected, rel=0.02)
    assert compiled.keys() == gradients.keys()
    for name, gradient in gradients.items():
        cosine = torch.nn.functional.cosine_similarity(gradient.flatten(), compiled[name].flatten(), dim=0)
        assert cosine > 0.99, (name, float(cosine))
        assert float(compiled[name].norm()) == pytest.approx(float(gradient.norm()), rel=0.1), name


@pytest.mark.parametrize("length", [128, 100, 257, 1000])
@pytest.mark.parametrize("window", [None, 70])
def test_flex_attention_at_any_length(length, window):
    """Forward and backward, also when the last block is not full."""
    document = torch.ones(2, length, dtype=torch.long, device="cuda")
    document[0, length // 3 :], document[1, length - 9 :] = 2, 0
    start = document_starts(document)
    results = []
    for flex in (True, False):
        torch.manual_seed(1)
        q, k, v = (torch.randn(2 * length, h, 16, device="cuda", requires_grad=True) for h in (4, 2, 2))
        out, lse = attention_with_lse(q, k, v, packed_mask(start, window, 2, flex=flex), length)
        (out.square().sum() + lse.sum()).backward()
        results.append((out, lse, q.grad, k.grad, v.grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=5e-3, atol=5e-3)  # matrix products use TF32


def test_resume_is_exact_on_the_card(tmp_path: Path):
    folder = toy.make(tmp_path / "toy", num_answers=200, steps=20)
    recipe = build_recipe(
        {
            "output": str(tmp_path / "whole"),
            "target": {"model": str(folder / "target")},
            "data": {
                "train": [str(folder / "answers.jsonl")],
                "held_out_samples": 4,
                "sequence_length": 200,  # not a multiple of the block size
                "micro_batch_size": 2,
            },
            "drafter": {"aux_layers": [1, 2, 3], "draft_vocab_size": 64},
            "objective": {"ttt_steps": 3},
            "run": {"steps": 8, "log_every": 1, "save_every": 4, "evaluate_every": 8, "device": "cuda"},
            "evaluation": {"max_new_tokens": 8, "depths": [2], "select_depth": 2},
        }
    )
    train(recipe)
    resumed = replace(recipe, output=str(tmp_path / "resumed"))
    train(resumed)
    checkpoints = tmp_path / "resumed" / "checkpoints"
    (checkpoints / "step-00000008.pt").unlink()
    train(resumed)
    whole, again = (
        torch.load(tmp_path / name / "checkpoints" / "step-00000008.pt", weights_only=True)["drafter"]
        for name in ("whole", "resumed")
    )
    for name, value in whole.items():
        assert torch.equal(value, again[name]), name
