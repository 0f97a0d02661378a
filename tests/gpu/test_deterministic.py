"""`deterministic` on a GPU in bf16: the same answers, bit for bit, in any batch, order and chunking, with or without drafts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors import device_batch
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.kernels.quantization import quantize_linears
from fledge.sampling import SamplingParams
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPE = {
    "hidden_size": 192,
    "intermediate_size": 320,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_positions": 4096,
}
SETTINGS = EngineConfig(
    device="cuda", dtype="bfloat16", max_model_len=2600, max_num_seqs=8, kv_cache_tokens=8 * 2688, deterministic=True
)


def networks(windows: tuple[int | None, ...] = (None,) * 4):
    """Networks whose best tokens have close logits, so that any difference in rounding changes an answer."""
    decoder = tiny_decoder(7, windows=windows, **SHAPE)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.2)
    config = tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True)
    return decoder, tiny_drafter(config)


def prompts() -> list[list[int]]:
    """Short prompts, two with a common prefix, and one with several chunks and KV splits."""
    rng = random.Random(2)
    texts = [[rng.randrange(1000) for _ in range(length)] for length in (3, 40, 130, 200, 700, 2300)]
    return [*texts, [*texts[3][:150], 7, 8, 9], [*texts[4][:300], *texts[0]]]


def answers(config: EngineConfig, texts, params: SamplingParams, depth: int = 0, quantization: str = "none", **options):
    decoder, drafter = networks(**options)
    if quantization != "none":
        quantize_linears(decoder, quantization, "cuda")
    engine = build_engine(decoder, Speculation(drafter if depth else "none", depth or 1).fixed_depth(), config)
    assert isinstance(engine.executor, CudaGraphExecutor)
    requests = [engine.add_request(text, params) for text in texts]
    while engine.has_unfinished():
        engine.step()
    return [(request.answer, [(one.token, one.logprob) for one in request.logprobs]) for request in requests]


GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=0.8, top_p=0.9, seed=5, ignore_eos=True)
# Log-probabilities show differences in any bit.
LOGPROBS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logprobs=1)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, LOGPROBS], ids=["greedy", "sampled", "logprobs"])
def test_answers_do_not_depend_on_the_batch_or_on_speculation(params, monkeypatch):
    texts = prompts()
    wanted = answers(SETTINGS, texts, params)
    assert answers(replace(SETTINGS, max_num_seqs=1), texts, params) == wanted
    assert answers(SETTINGS, texts[::-1], params)[::-1] == wanted
    assert answers(SETTINGS, texts, params, depth=3) == wanted
    assert answers(replace(SETTINGS, max_num_seqs=3, max_batched_tokens=256), texts, params) == wanted
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 96)
    assert answers(replace(SETTINGS, prefix_caching=False), texts, params, depth=5) == wanted


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_targets(quantization):
    texts = prompts()
    wanted = answers(SETTINGS, texts, GREEDY, quantization=quantization)
    assert answers(replace(SETTINGS, max_num_seqs=1), texts, GREEDY, quantization=quantization) == wanted
    assert answers(SETTINGS, texts, GREEDY, depth=3, quantization=quantization) == wanted


def test_log_probabilities_do_not_change_answers():
    texts = prompts()
    plain = answers(SETTINGS, texts, replace(GREEDY, max_tokens=24))
    assert [answer for answer, _ in answers(SETTINGS, texts, LOGPROBS)] == [answer for answer, _ in plain]


def test_sliding_windows():
    texts, options = prompts(), {"windows": (100, None, 100, None)}
    wanted = answers(SETTINGS, texts, GREEDY, **options)
    assert answers(replace(SETTINGS, max_num_seqs=1), texts, GREEDY, **options) == wanted
    assert answers(SETTINGS, texts, GREEDY, 3, **options) == wanted
