"""Learning while captured cycles run: states stored by graphs, training on the device, and swapping the graphs' weights."""

from __future__ import annotations

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.learning.config import LearnConfig
from fledge.learning.gate import Decision
from fledge.learning.setup import build_learning_engine
from fledge.sampling import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.real, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
CONFIG = EngineConfig(device="cuda", max_num_seqs=8, max_model_len=1024, kv_cache_tokens=16384, deterministic=True)
LEARN = LearnConfig(budget=50, memory_mb=256, batch_tokens=1024, fixed_texts=8, fixed_tokens=32)
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)
QUESTIONS = [f"Write a function in Kotlin that adds {n} to every number of a list." for n in range(12)]


@pytest.fixture(scope="module")
def engine():
    built = build_learning_engine("smollm2-135m", Speculation(depth=3).fixed_depth(), CONFIG, LEARN)
    built.warm_up()
    return built


def serve(engine, **fields):
    prompts = [engine.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in QUESTIONS]
    requests = [engine.add_request(prompt, GREEDY, **fields) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
    return requests


def test_collection_training_and_weight_swaps_with_graphs(engine):
    hook = engine.hook
    plain = build_engine("smollm2-135m", Speculation(None), CONFIG)
    expected = [request.tokens for request in serve(plain)]
    del plain
    assert [request.tokens for request in serve(engine)] == expected
    samples = [one for client in hook.ring.by_client.values() for one in client] + hook.ring.held_out
    collected = [one for one in samples if one.text is not None]
    assert len(collected) >= 6
    for sample in collected:
        wanted = hook.target.read([(sample.tokens, sample.answer_start)])[0]
        for mine, other in zip(sample.text.taps, wanted.taps, strict=True):
            off = (mine[1:-1].float() - other[1:-1].float()).norm(dim=-1) / other[1:-1].float().norm(dim=-1)
            assert float(off.median()) < 0.03
    while not hook.learner.counts.steps:
        assert engine.idle()
    address = hook.served.network.fc.weight.data_ptr()
    noisy = {
        name: value + 0.5 * value.std() * torch.randn_like(value)
        for name, value in hook.served.weights.items()
        if value.numel()
    }
    before = serve(engine, learn=False)
    list(hook.served.swap(noisy, Decision(True, "a test")))
    after = serve(engine, learn=False)
    assert [request.tokens for request in after] == expected
    assert sum(r.stats.accepted for r in after) < 0.8 * sum(r.stats.accepted for r in before)  # the graphs read the new weights
    hook.roll_back("a test")
    again = serve(engine, learn=False)
    assert [request.tokens for request in again] == expected
    assert sum(r.stats.accepted for r in again) > 0.95 * sum(r.stats.accepted for r in before)
    assert hook.served.network.fc.weight.data_ptr() == address
    engine.check_integrity()
