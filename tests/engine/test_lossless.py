"""Speculation is lossless: greedy output equals plain output token for token, however good or bad the drafter is."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fledge.config import MLAConfig
from fledge.engine.build import Speculation, build_engine
from fledge.models.decoder import causal_attend
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.methods.eagle import EagleSpeculator
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

GREEDY = SamplingParams(max_tokens=128, temperature=0)
MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, q_lora_rank=20)


def random_prompts(count: int, longest: int = 48, seed: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [torch.randint(0, 128, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(100)


@pytest.fixture(scope="module")
def plain(prompts) -> list[list[int]]:
    return run(engine_with(tiny_decoder(), Speculation("none")), prompts, GREEDY)


def test_plain_decoding_equals_the_model_without_a_cache(prompts, plain):
    decoder = tiny_decoder()
    for prompt, answer in zip(prompts[:10], plain, strict=False):
        tokens = torch.tensor(prompt + answer[:-1])
        hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
        assert decoder.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist() == answer


@pytest.mark.parametrize("tree", [None, TreeShape(4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("version", ["3", "3.1"])
def test_a_random_drafter(prompts, plain, version, tree):
    """Almost no drafted token is accepted."""
    flags = version == "3.1"
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64, fc_norm=flags, norm_output=flags))
    engine = engine_with(tiny_decoder(), Speculation(drafter, 4, tree))
    assert run(engine, prompts, GREEDY) == plain
    assert engine.stats.acceptance_length < 1.1


@pytest.mark.parametrize("tree", [None, TreeShape(4, 12)], ids=["chain", "tree"])
@pytest.mark.parametrize("settings", [{"mla": MLA}, {"mla": MLA, "window": 12}, {"qk_norm": True}], ids=str)
@pytest.mark.parametrize("version", ["3", "3.1"])
def test_a_random_drafter_with_other_attention(prompts, plain, version, settings, tree):
    flags = version == "3.1"
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64, fc_norm=flags, norm_output=flags, **settings))
    engine = engine_with(tiny_decoder(), Speculation(drafter, 4, tree))
    assert run(engine, prompts[:12], GREEDY) == plain[:12]
    assert engine.drafter.cache.keys.shape[1] == (4 if "mla" in settings else 2)
    assert engine.drafter.cache.keys.shape[3] == (12 if "mla" in settings else 8)
    assert engine.stats.steps > 0


def test_the_ngram_drafter(prompts, plain):
    engine = engine_with(tiny_decoder(), Speculation("ngram", 5))
    assert run(engine, prompts, GREEDY) == plain
    assert engine.stats.steps > 0


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_perfect_drafter(prompts, plain, tree):
    """Everything is accepted: a step emits the whole draft and the bonus token."""
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    engine = engine_with(tiny_decoder(), OracleSpeculator(answers, 5, tree=tree))
    assert run(engine, prompts, GREEDY) == plain
    assert engine.stats.unconditional_rates[0] == 1.0
    assert engine.stats.acceptance_length > 5.5


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_drafter_with_errors_at_every_depth(prompts, plain, tree):
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    engine = engine_with(tiny_decoder(), OracleSpeculator(answers, 5, tree=tree, reach=lambda length: length % 6))
    assert run(engine, prompts, GREEDY) == plain
    assert 2 < engine.stats.acceptance_length < 5


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_every_family_with_a_sliding_window(family, tree):
    windows = (16, None, 16, None)
    prompts = random_prompts(8)
    params = SamplingParams(max_tokens=40, temperature=0)
    plain = run(engine_with(tiny_decoder(1, family, windows=windows), Speculation("none")), prompts, params)
    decoder = tiny_decoder(1, family, windows=windows)
    tokens = torch.tensor(prompts[0] + plain[0][:-1])
    hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
    assert decoder.logits(hidden[len(prompts[0]) - 1 :]).argmax(-1).tolist() == plain[0]
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    oracle = OracleSpeculator(answers, 5, tree=tree, reach=lambda length: length % 6)
    assert run(engine_with(decoder, oracle), prompts, params) == plain


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_small_cache_and_chunked_prefill_do_not_change_answers(tree):
    """Preemption, recomputation, and prompts longer than a step's token budget."""
    prompts = random_prompts(24, longest=100)
    params = SamplingParams(max_tokens=48, temperature=0)
    plain = run(engine_with(tiny_decoder(), Speculation("none")), prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    tight = replace(CPU, kv_cache_tokens=400, max_batched_tokens=32, page_size=8)
    engine = engine_with(tiny_decoder(), OracleSpeculator(answers, 5, tree=tree, reach=lambda n: n % 6), tight)
    assert run(engine, prompts, params) == plain
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"fc_norm": True, "norm_output": True},
        {"norm_output": True, "window": 12},
        {"norm_output": True, "qk_norm": True},
        {"fc_norm": True, "norm_output": True, "mla": MLA},
    ],
)
def test_eagle_drafts_equal_a_computation_from_scratch(flags):
    """The drafter's cache, its sync after partly accepted drafts, and preemption do not change the drafts."""
    decoder = tiny_decoder()
    network = tiny_drafter(tiny_drafter_config(draft_vocab_size=64, **flags)).share(decoder.embed_tokens, decoder.lm_head)
    prompts = random_prompts(6)
    params = SamplingParams(max_tokens=30, temperature=0)
    plain = run(engine_with(decoder, Speculation("none")), prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    config = replace(CPU, kv_cache_tokens=160, max_batched_tokens=32, page_size=8)
    inner_engine = build_engine(decoder, Speculation(network, 4), config)
    oracle = OracleSpeculator(answers, 5, reach=lambda n: n % 6, inner=inner_engine.drafter)
    engine = engine_with(decoder, oracle, config)
    heads = (network.config.num_kv_heads, network.config.head_dim)
    inner_engine.drafter.cache = type(engine.executor.cache)(1, *heads, engine.pool.num_pages, 8, torch.float32, "cpu")
    assert run(engine, prompts, params) == plain
    assert isinstance(oracle.inner, EagleSpeculator)
    assert oracle.inner.depth == DepthPolicy(4)
    checked = 0
    for tokens, draft in oracle.inner_drafts:
        if len(draft):
            assert draft.tokens == drafted_from_scratch(decoder, network, tokens, len(draft))
            checked += 1
    assert checked > 50


def drafted_from_scratch(decoder, network, tokens: list[int], depth: int) -> list[int]:
    """Drafts `depth` tokens without a cache: for each, the pairs (x1, g0), (x2, g1), … of the whole text in one pass."""
    context = torch.tensor(tokens[:-1])
    _, taps = decoder(context, torch.arange(len(context)), causal_attend(), network.config.aux_layer_ids)
    states, paired, drafted = network.fuse(taps), list(tokens[1:]), []
    for _ in range(depth):
        positions = torch.arange(len(paired))
        hidden, feedback = network(torch.tensor(paired), states, positions, causal_attend())
        drafted.append(int(network.target_ids(network.logits(hidden[-1]).argmax())))
        states, paired = torch.cat([states, feedback[-1:]]), [*paired, drafted[-1]]
    return drafted


def test_speculation_can_be_switched_off_per_request(plain, prompts):
    drafter = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True))
    engine = engine_with(tiny_decoder(), Speculation(drafter, 4))
    requests = [engine.add_request(prompt, GREEDY, speculate=index % 2 == 0) for index, prompt in enumerate(prompts[:10])]
    while engine.has_unfinished():
        engine.step()
    assert [request.answer for request in requests] == plain[:10]
    assert all(bool(request.stats.steps) == request.speculate for request in requests)
