"""The whole speculation cycle with the Triton kernels in the interpreter, so that it can be tested without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch

from fledge.config import MoEConfig
from fledge.engine.config import EngineConfig
from fledge.engine.executors.batch_state import GREEDY
from fledge.kernels.quantization import quantize_linears
from fledge.models.decoder import causal_attend
from fledge.models.moe import stack_experts
from tests.engine.test_device_batch import answer_of, entries
from tests.kernels.support import INTERPRETED
from tests.oracle import make_batch
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")]
TEXTS = [[3, 14, 15], [92, 65, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 28, 84, 19, 71, 69]]
STEPS = 3


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("fledge.") and hasattr(module, "use_triton"):
            monkeypatch.setattr(module, "use_triton", lambda x: True)


EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "moe": MoEConfig(8, 3, 32, layers=(0, 1))}


@pytest.mark.parametrize(
    ("quantization", "depth", "family"),
    [("int8", 2, {}), ("int4", 0, {}), ("none", 2, {}), ("none", 0, EXPERTS), ("int4", 2, EXPERTS)],
)
def test_answers_equal_the_models(quantization, depth, family):
    decoder = tiny_decoder(7, num_layers=2, **family)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True, aux_layer_ids=(0, 1, 2)))
    if quantization != "none":
        quantize_linears(decoder, quantization)
    stack_experts(decoder, torch.float32)
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=64, max_num_seqs=2, kv_cache_tokens=256).resolve(
        decoder.config
    )
    batch = make_batch(decoder, config, drafter=drafter if depth else None, capture=False)
    batch.prefill(entries(batch, TEXTS, limit=8))
    for _ in range(STEPS):
        batch.step(len(TEXTS), depth, GREEDY)
    answers = [answer_of(batch, row)[: STEPS + 1] for row in range(len(TEXTS))]
    for text, answer in zip(TEXTS, answers, strict=True):
        tokens = torch.tensor(text + answer[:-1])
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
        assert decoder.logits(hidden[len(text) - 1 :]).argmax(-1).tolist() == answer
