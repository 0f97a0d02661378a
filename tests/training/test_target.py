"""Target states of packed documents equal those of each document alone, from our decoder and from transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from fledge.checkpoints.hf import save_decoder
from fledge.errors import ModelError
from fledge.kernels.gate import apply_gate
from fledge.kernels.moe import experts_reference
from fledge.models.decoder import causal_attend
from fledge.models.moe import stack_experts
from fledge.ops import base
from fledge.training.targets.target import DecoderTarget, TransformersTarget
from fledge.training.ttt import TrainBatch
from tests.tiny import tiny_decoder

DOCUMENT = torch.tensor([[1] * 7 + [2] * 4 + [3] * 9, [1] * 15 + [0] * 5])
TAPS = (0, 2, 3)


def packed() -> TrainBatch:
    tokens = torch.randint(1, 128, DOCUMENT.shape, generator=torch.Generator().manual_seed(0))
    positions = torch.zeros_like(tokens)
    for row in range(2):
        for number in (1, 2, 3):
            here = DOCUMENT[row] == number
            positions[row, here] = torch.arange(int(here.sum()))
    return TrainBatch.plan(tokens, positions, DOCUMENT, DOCUMENT > 0, steps=2, multiple=4)


@pytest.mark.parametrize(
    ("architecture", "windows"),
    [
        ("LlamaForCausalLM", (None,) * 4),
        ("Qwen3ForCausalLM", (None,) * 4),
        ("MistralForCausalLM", (3,) * 4),
        ("Qwen3MoeForCausalLM", (None,) * 4),
        ("Gemma3ForCausalLM", (5, None, 5, None)),
        ("Phi3ForCausalLM", (None,) * 4),
        ("SmolLM3ForCausalLM", (None,) * 4),
        ("Glm4ForCausalLM", (None,) * 4),
        ("GemmaForCausalLM", (None,) * 4),
    ],
)
def test_packed_documents_do_not_see_each_other(architecture, windows):
    decoder = tiny_decoder(architecture=architecture, windows=windows)
    batch = packed()
    states = DecoderTarget(decoder, TAPS).states(batch)
    for row in range(2):
        for number in set(DOCUMENT[row].tolist()) - {0}:
            here = (DOCUMENT[row] == number).nonzero().flatten()
            tokens = batch.tokens_BT[row, here]
            alone = decoder(tokens, torch.arange(len(tokens)), causal_attend(), TAPS)
            flat = row * DOCUMENT.shape[1] + here
            torch.testing.assert_close(states.hidden_ND[flat], alone.hidden_ND, rtol=1e-3, atol=1e-3)
            for ours, theirs in zip(states.taps, alone.taps, strict=True):
                torch.testing.assert_close(ours[flat], theirs, rtol=1e-3, atol=1e-3)


def test_stacked_experts_use_the_grouped_kernel(monkeypatch):
    """The GPU path, with the reference in place of the kernel."""
    decoder, calls = tiny_decoder(architecture="Qwen3MoeForCausalLM"), []
    wanted = DecoderTarget(decoder, TAPS).states(packed())
    stack_experts(decoder, torch.float32)

    def grouped(gate_up, down, x, weights, experts, residual):
        calls.append(len(x))
        run = [lambda rows, e=e: apply_gate(rows @ gate_up[e].t()) @ down[e].t() for e in range(len(down))]
        return experts_reference(run, x, weights, experts, residual)

    monkeypatch.setattr(base, "use_triton", lambda x: True)
    monkeypatch.setattr(base, "experts_triton", grouped)
    found = DecoderTarget(decoder, TAPS).states(packed())
    assert len(calls) == 3  # three layers have experts
    torch.testing.assert_close(found.hidden_ND, wanted.hidden_ND, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save_decoder(tiny_decoder(), tmp_path_factory.mktemp("model") / "tiny")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def test_transformers_gives_the_same_states(model):
    batch = packed()
    ours, theirs = DecoderTarget(tiny_decoder(), TAPS), TransformersTarget(model, TAPS)
    real = (DOCUMENT > 0).flatten()
    a, b = ours.states(batch), theirs.states(batch)
    torch.testing.assert_close(a.hidden_ND[real], b.hidden_ND[real], rtol=1e-3, atol=1e-3)
    for x, y in zip(a.taps, b.taps, strict=True):
        torch.testing.assert_close(x[real], y[real], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(ours.head(a.hidden_ND[real]), theirs.head(b.hidden_ND[real]), rtol=1e-2, atol=1e-2)


def test_missing_layers_are_refused(model):
    with pytest.raises(ModelError, match="cannot be tapped after"):
        DecoderTarget(tiny_decoder(), (1, 2, 5))
    with pytest.raises(ModelError, match="0…3, not"):
        TransformersTarget(model, (1, 2, 4))


def test_head_that_is_not_a_plain_linear_is_refused(model, monkeypatch):
    class Doubling(torch.nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    head = Doubling(32, 128, bias=False)
    head.weight = model.lm_head.weight
    monkeypatch.setattr(model, "lm_head", head)
    with pytest.raises(ModelError, match="cannot be a target"):
        TransformersTarget(model, TAPS)
