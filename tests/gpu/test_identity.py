"""The default configuration on a GPU in bf16: the same answers, bit for bit, alone, in a batch, under changing load, with
prefix reuse, in chunks, plain and speculative."""

from __future__ import annotations

import random

import pytest
import torch

from fledge.bench.identity import compare_ways
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.sampling import SamplingParams
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SHAPES = {
    "heads of 64": {"hidden_size": 192, "intermediate_size": 512, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64},
    "heads of 128": {"hidden_size": 512, "intermediate_size": 1408, "num_heads": 4, "num_kv_heads": 1, "head_dim": 128},
}


def networks(architecture: str, shape: dict[str, int]):
    """Networks whose best tokens have close logits, so that any difference in rounding changes an answer."""
    decoder = tiny_decoder(7, architecture, vocab_size=2000, max_positions=4096, **shape)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.2)
    return decoder, tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True))


def texts(count: int = 72) -> list[list[int]]:
    """Prompts of one token up to several chunks; every eighth starts with the prompt before it."""
    rng = random.Random(2)
    made = [[rng.randrange(2000) for _ in range(rng.choice([1, 7, 40, 130, 200, 700]))] for _ in range(count)]
    for index in range(7, count, 8):
        made[index] = [*made[index - 1], *made[index][:9]]
    made[3] = [rng.randrange(2000) for _ in range(2300)]
    return made


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("LlamaForCausalLM", "heads of 64"), ("Qwen2ForCausalLM", "heads of 128"), ("Qwen3ForCausalLM", "heads of 128")],
)
def test_answers_do_not_depend_on_how_they_are_computed(architecture: str, shape: str, options: dict) -> None:
    decoder, drafter = networks(architecture, SHAPES[shape])

    def build(speculative: bool, **settings) -> Engine:
        config = EngineConfig(device="cuda", dtype="bfloat16", max_model_len=2600, kv_cache_tokens=64 * 1024, **settings)
        engine = build_engine(decoder, Speculation(drafter if speculative else "none", 3), config)
        assert isinstance(engine.executor, CudaGraphExecutor)
        return engine

    prompts = texts()
    params = [SamplingParams(max_tokens=32, seed=index, ignore_eos=True, **options) for index in range(len(prompts))]
    found = compare_ways(build, prompts, params, users=64)
    assert found.holds, found.pairs()
