"""On a GPU: 8- and 4-bit targets. Captured cycles equal eager ones; speculation is lossless up to ties."""

from __future__ import annotations

import pytest
import torch

from fledge.config import MoEConfig
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors.batch_state import GREEDY
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.kernels.quantization import QuantizedLinear, quantize_linears
from fledge.models.decoder import causal_attend
from fledge.sampling import SamplingParams
from tests.engine.test_device_batch import answer_of, entries, prompts
from tests.oracle import captured_answers, make_batch
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPE = {"hidden_size": 192, "intermediate_size": 320, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "moe": MoEConfig(8, 3, 64, layers=(0, 1, 2, 3))}
# Fraction of the largest logit by which a few bf16 roundings may shift another one.
TIE = 0.05


def networks(quantization: str, dtype: torch.dtype = torch.bfloat16):
    decoder = tiny_decoder(12, **SHAPE)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True))
    quantize_linears(decoder, quantization, "cuda")
    assert isinstance(decoder.layers[0].mlp.down_proj, QuantizedLinear)
    return decoder.to("cuda", dtype), drafter.to("cuda", dtype)


def settings(decoder, rows: int, dtype: str = "bfloat16") -> EngineConfig:
    return EngineConfig(
        device="cuda", dtype=dtype, max_model_len=128, max_num_seqs=rows, kv_cache_tokens=rows * 256, page_size=128
    ).resolve(decoder.config)


@torch.inference_mode()
def gap_at_first_difference(decoder, prompt: list[int], one: list[int], two: list[int]) -> float:
    """Where the answers first differ, the gap between the two tokens' logits as a fraction of the largest logit; 0 if equal."""
    place = next((index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
    if place is None:
        return 0.0
    text = torch.tensor(prompt + one[:place], device="cuda")
    hidden, _ = decoder(text, torch.arange(len(text), device="cuda"), causal_attend())
    logits = decoder.logits(hidden[-1]).float()
    return float((logits[one[place]] - logits[two[place]]).abs() / logits.abs().max())


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("rows", "depth"), [(1, 0), (2, 0), (1, 3), (8, 3), (24, 3)])
def test_captured_equals_eager(quantization, rows, depth):
    """The row counts cover each of the kernels."""
    decoder, drafter = networks(quantization)
    texts, results = prompts(rows, seed=1), []
    for capture in (False, True):
        batch = make_batch(decoder, settings(decoder, 32), drafter=drafter, capture=capture)
        batch.prefill(entries(batch, texts))
        for _ in range(5):
            batch.graphs.run(rows, depth, GREEDY)
        results.append([answer_of(batch, row)[:6] for row in range(rows)])
    assert results[0] == results[1]


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_speculative_answers_equal_plain_answers(quantization, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    decoder, drafter = networks(quantization, getattr(torch, dtype))
    texts = prompts(30, seed=8)
    plain = captured_answers(decoder, settings(decoder, 16, dtype), capture=True)
    wanted = sorted(plain.generate(texts, max_tokens=20, stop_ids=()))
    speculative = captured_answers(decoder, settings(decoder, 16, dtype), drafter=drafter, depth=3, capture=True)
    found = sorted(speculative.generate(texts, max_tokens=20, stop_ids=()))
    if dtype == "float32":
        assert found == wanted
    for text, one, two in zip(texts, wanted, found, strict=True):
        assert gap_at_first_difference(decoder, text, one.tokens, two.tokens) <= TIE


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(
    "family", [{}, {"architecture": "Qwen3MoeForCausalLM", "moe": MoEConfig(8, 3, 64, layers=(0, 1, 2, 3))}]
)
def test_serving_from_a_configuration(quantization, family):
    decoder, texts = tiny_decoder(12, **SHAPE, **family), prompts(6, seed=3)
    config = EngineConfig(device="cuda", max_model_len=128, max_num_seqs=4, kv_cache_tokens=4096, quantization=quantization)
    engine = build_engine(decoder, Speculation("none"), config)
    assert isinstance(engine.executor, CudaGraphExecutor)
    assert isinstance(engine.decoder.lm_head, QuantizedLinear)
    requests = [engine.add_request(text, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)) for text in texts]
    while engine.has_unfinished():
        engine.step()
    assert all(len(request.answer) == 12 for request in requests)
