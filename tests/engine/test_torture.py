"""Random arrivals, cancellations, a tiny cache, shared prefixes and every sampling option at once, in both executors.

Both give the same texts regardless of concurrent requests; no page is lost, and integrity checks pass after every step.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors.device_batch import CHOICE, DRAFT, LOGPROBS, VERIFY
from fledge.errors import RequestError
from fledge.kernels.bits import num_words, pack_bits
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
TIGHT = EngineConfig(
    device="cpu", dtype="float32", max_model_len=128, max_num_seqs=8, kv_cache_tokens=192, page_size=4, max_batched_tokens=48
)


class NotMultiplesOf:
    """A simple grammar: bans every token id that is a multiple of `number`."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.banned_W = torch.from_numpy(pack_bits(range(0, 128, number), num_words(128)))

    def __call__(self, tokens, logits):
        logits[:: self.number] = -torch.inf
        return logits

    def fill(self, tokens, mask_W):
        mask_W &= ~self.banned_W


def options(number: int, seed: int) -> dict:
    """Sampling options number `number`: every option occurs, alone and combined with others."""
    kinds = [
        {},
        {"temperature": 0.9, "seed": seed},
        {"temperature": 0.8, "top_p": 0.8, "seed": seed},
        {"temperature": 1.1, "top_k": 12, "min_p": 0.02, "seed": seed, "logprobs": 3},
        {"logprobs": 5},
        {"repetition_penalty": 1.3, "presence_penalty": 0.4},
        {"frequency_penalty": 0.5, "temperature": 0.7, "seed": seed},
        {"logit_bias": {3: 4.0, 9: -100.0}},
        {"min_tokens": 6, "stop_token_ids": [5, 40, 99]},
        {"stop_token_ids": list(range(0, 128, 5))},
        {"bad_word_ids": [[7], [11, 12]]},
        {"logits_processors": [NotMultiplesOf(3)]},
        {"logits_processors": [NotMultiplesOf(2)], "temperature": 0.9, "seed": seed, "repetition_penalty": 1.1},
    ]
    return kinds[number % len(kinds)]


def requests(count: int, seed: int, most_shared: int) -> list[tuple[list[int], SamplingParams, bool]]:
    """Random requests. Prompts begin with up to `most_shared` tokens of one of three texts."""
    chance = random.Random(seed)
    bases = [[chance.randrange(128) for _ in range(most_shared)] for _ in range(3)]
    made = []
    for number in range(count):
        tail = [chance.randrange(128) for _ in range(chance.randrange(1, 10))]
        prompt = [*chance.choice(bases)[: chance.randrange(most_shared)], *tail]
        settings = {"max_tokens": chance.randrange(7, 48), "temperature": 0.0} | options(number, chance.randrange(1000))
        made.append((prompt, SamplingParams(**settings), chance.random() < 0.8))
    return made


def run(engine, work, seed: int) -> list:
    """Runs the requests with random arrivals and cancellations and returns them."""
    chance, added, refused = random.Random(seed), [], 0
    for number, (prompt, params, speculate) in enumerate(work):
        if number % 11 == 3:
            with pytest.raises(RequestError):
                engine.add_request([*prompt, 9999], params)
            refused += 1
        added.append(engine.add_request(prompt, params, speculate=speculate))
        for _ in range(chance.randrange(3)):
            engine.step()
            engine.check_integrity()
        if chance.random() < 0.12:
            engine.abort(chance.choice(added))
            engine.check_integrity()
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    assert refused > 2
    assert engine.pool.num_free == engine.pool.num_pages
    return added


SPECULATION = {
    "plain": lambda drafter: Speculation("none"),
    "chain": lambda drafter: Speculation(drafter, 3),
    "tree": lambda drafter: Speculation(drafter, 3, TreeShape(2, 6)),
    "ngram": lambda drafter: Speculation("ngram", 3),
}


# On a GPU pages are longer, and so prompts and cache are too: only full pages are reused.
ON_DEVICE = {"cpu": TIGHT, "cuda": replace(TIGHT, device="cuda", page_size=64, max_model_len=256, kv_cache_tokens=1024)}
MOST_SHARED = {"cpu": 60, "cuda": 160}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("method", SPECULATION)
def test_every_request_gets_the_answer_it_has_alone(method, device):
    config, work = ON_DEVICE[device], requests(52, 4, MOST_SHARED[device])
    roomy = replace(config, device="cpu", page_size=4, kv_cache_tokens=4096, max_num_seqs=1, prefix_caching=False)
    alone = build_engine(tiny_decoder(3), Speculation("none"), roomy)
    wanted = [alone.add_request(prompt, params) for prompt, params, _ in work]
    while alone.has_unfinished():
        alone.step()
    for capture in (None, False) if device == "cpu" else (None,):
        decoder = tiny_decoder(3).to(device)
        drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True)).to(device)
        engine = build_engine(decoder, SPECULATION[method](drafter), config, capture=capture)
        found = run(engine, work, seed=5)
        assert any(request.num_preemptions for request in found) or device != "cpu"
        assert engine.pool.num_found > 0
        cancelled = [one for one in found if one.finish_reason == "abort"]
        assert 0 < len(cancelled) < 20
        for one, other in zip(found, wanted, strict=True):
            if one in cancelled:
                assert other.answer[: one.num_answer] == one.answer
            else:
                assert (one.answer, one.finish_reason, one.stop_reason) == (
                    other.answer,
                    other.finish_reason,
                    other.stop_reason,
                )
                tops = [[token for token, _ in logprob.top] for logprob in one.logprobs]
                assert tops == [[token for token, _ in logprob.top] for logprob in other.logprobs]
                assert len(one.logprobs) == (0 if one.params.logprobs is None else one.num_answer)


def test_options_without_tree_support_disable_only_their_own_drafts():
    decoder = tiny_decoder(3)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True))
    engine = build_engine(decoder, SPECULATION["tree"](drafter), TIGHT, capture=False)
    options = [{}, {"logprobs": 2}, {"frequency_penalty": 0.5}, {"min_tokens": 3}, {"temperature": 0.8, "seed": 3}]
    params = [SamplingParams(**{"temperature": 0, "max_tokens": 10, "ignore_eos": True, **more}) for more in options]
    requests = [engine.add_request([5, 9, 77, 3 + index], one) for index, one in enumerate(params)]
    while engine.has_unfinished():
        engine.step()
    assert [request.stats.steps > 0 for request in requests] == [True, True, False, False, True]
    assert not any(request.drafter_stale for request in requests)
    assert not engine.executor.undrafted
    for stage in (DRAFT, VERIFY, CHOICE, CHOICE, LOGPROBS):  # recording runs a stage more than once
        engine.executor.batch.step(4, 3, stage)
    alone = build_engine(tiny_decoder(3), Speculation("none"), TIGHT)
    for request in requests:
        wanted = alone.add_request(request.prompt, request.params)
        while alone.has_unfinished():
            alone.step()
        assert wanted.answer == request.answer
        assert [one.top for one in request.logprobs] == [
            [(token, pytest.approx(value, abs=1e-4)) for token, value in one.top] for one in wanted.logprobs
        ]


def test_other_options_do_not_change_a_seeded_answer():
    """Log-probabilities and neutral options do not change a seeded request's tokens, in either executor."""
    prompt, seeded = [5, 9, 77, 3], {"max_tokens": 24, "temperature": 0.9, "seed": 11}
    answers = []
    for capture in (None, False):
        for more in ({}, {"logprobs": 5}, {"logit_bias": {3: 0.0}}, {"min_tokens": 1}):
            engine = build_engine(tiny_decoder(3), Speculation("none"), TIGHT, capture=capture)
            request = engine.add_request(prompt, SamplingParams(**seeded, **more))
            while engine.has_unfinished():
                engine.step()
            answers.append(request.answer)
    assert all(answer == answers[0] for answer in answers)


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured"])
def test_a_depth_above_16_is_used(capture):
    decoder = tiny_decoder(3)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config))
    config = replace(TIGHT, kv_cache_tokens=4096, max_batched_tokens=256)
    engine = build_engine(decoder, Speculation(drafter, 20).fixed_depth(), config, capture=capture)
    request = engine.add_request([5, 9, 77], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
    assert len(request.stats.drafted_at) == 20


def test_the_cache_is_sized_after_loading_weights(monkeypatch):
    """Free memory is measured after target and drafter are on the device."""
    from fledge.engine import build

    order, fit, with_cache = [], build.fit, EngineConfig.with_cache
    monkeypatch.setattr(build, "fit", lambda network, *rest, **more: order.append("weights") or fit(network, *rest, **more))
    monkeypatch.setattr(EngineConfig, "with_cache", lambda self, *rest: order.append("cache") or with_cache(self, *rest))
    build_engine(tiny_decoder(3), Speculation(tiny_drafter(), 3), TIGHT)
    assert order == ["weights", "weights", "cache"]


def test_python_logits_processors_are_refused_by_the_captured_executor():
    engine = build_engine(tiny_decoder(3), Speculation("none"), TIGHT, capture=False)
    with pytest.raises(RequestError, match="logits_processors are Python functions"):
        engine.add_request([1, 2], SamplingParams(logits_processors=[lambda tokens, logits: logits]))


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_in_one_request_ends_only_that_request(at):
    """A grammar fails at the first token, at the second, or later, in either executor."""

    class Broken:
        def __call__(self, tokens, logits):
            if len(tokens) >= at:
                raise ZeroDivisionError("a grammar with a fault")
            return logits

        def fill(self, tokens, mask_W):
            if len(tokens) >= at:
                raise ZeroDivisionError("a grammar with a fault")

    for capture in (None, False):
        engine = build_engine(tiny_decoder(3), Speculation("none"), replace(TIGHT, kv_cache_tokens=2048), capture=capture)
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        others = [engine.add_request([5, 9, number], params) for number in range(3)]
        faulty = engine.add_request([1, 2], replace(params, logits_processors=[Broken()]))
        while engine.has_unfinished():
            engine.step()
            engine.check_integrity()
        assert faulty.finish_reason == "error"
        assert isinstance(faulty.failure, ZeroDivisionError)
        assert faulty.num_answer <= at
        assert engine.pool.num_free == engine.pool.num_pages
        assert all(request.num_answer == 12 for request in others)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_weights_are_loaded_in_the_requested_dtype(dtype, monkeypatch, tmp_path):
    """They are not converted to bfloat16 first, which would round them."""
    from fledge import devices
    from fledge.engine import build

    class Asked(Exception):
        pass

    def load_decoder(folder, asked, device, **_):
        raise Asked(str(asked))

    for module in (build, devices):  # the configuration imports it when it is resolved
        monkeypatch.setattr(module, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(build, "reads_fp8", lambda device: True)
    monkeypatch.setattr(build, "check_fits", lambda *_: None)
    monkeypatch.setattr(build, "load_scheme", lambda folder: None)
    monkeypatch.setattr(build, "kept_bits", lambda *_: None)
    monkeypatch.setattr(build.sources, "find", lambda model: tmp_path)
    monkeypatch.setattr(build.sources, "resolve", lambda model: tmp_path)
    monkeypatch.setattr(build, "load_config", lambda folder: tiny_decoder().config)
    monkeypatch.setattr(build, "load_decoder", load_decoder)
    with pytest.raises(Asked, match=f"torch.{dtype}"):
        build_engine("a model", Speculation("none"), EngineConfig(device="cuda", dtype=dtype), tokenizer=object())
