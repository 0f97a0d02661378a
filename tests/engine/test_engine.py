"""The life of a request: stops, limits, cancellation, log-probabilities, load. Tokens after a stop are not counted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import SIZES
from fledge.engine.kv_pool import PagePool
from fledge.errors import RequestError, UserError
from fledge.models.decoder import causal_attend
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

PROMPT = [5, 9, 77]


def finish(engine):
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()


def plain_answer(params: SamplingParams, prompt=PROMPT) -> list[int]:
    return run(engine_with(tiny_decoder(), Speculation("none")), [prompt], params)[0]


def perfect(answer: list[int], depth: int = 5):
    return engine_with(tiny_decoder(), OracleSpeculator({tuple(PROMPT): answer}, depth))


@pytest.mark.parametrize("at", range(1, 12))
def test_a_stop_token_ends_a_request_inside_a_draft(at):
    """Tokens of an accepted draft after the stop token are dropped and not counted as accepted."""
    whole = plain_answer(SamplingParams(max_tokens=40, temperature=0))
    stop = whole[at]
    params = SamplingParams(max_tokens=40, temperature=0, stop_token_ids=[stop])
    expected = whole[: whole.index(stop) + 1]
    engine = perfect(whole)
    request = engine.add_request(PROMPT, params)
    finish(engine)
    assert request.answer == expected
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)
    assert request.stats.emitted == len(expected) - 1  # the first token came from prefill
    assert request.stats.accepted <= len(expected) - 1


@pytest.mark.parametrize("limit", range(1, 14))
def test_the_token_limit_is_exact(limit):
    whole = plain_answer(SamplingParams(max_tokens=40, temperature=0))
    engine = perfect(whole)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=limit, temperature=0))
    finish(engine)
    assert request.answer == whole[:limit]
    assert request.finish_reason == "length"
    assert request.stats.emitted == limit - 1


def test_a_full_context_ends_a_request():
    params = SamplingParams(max_tokens=400, temperature=0)
    config = replace(CPU, max_model_len=64)
    plain = run(engine_with(tiny_decoder(), Speculation("none"), config), [PROMPT], params)[0]
    assert len(PROMPT) + len(plain) == 64
    drafter = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True))
    assert run(engine_with(tiny_decoder(), Speculation(drafter, 6), config), [PROMPT], params)[0] == plain


def test_stop_tokens_are_banned_until_min_tokens():
    free = plain_answer(SamplingParams(max_tokens=20, temperature=0))
    end = free[2]
    held = plain_answer(SamplingParams(max_tokens=20, min_tokens=10, temperature=0, stop_token_ids=[end]))
    assert end not in held[:10]
    assert len(held) >= 10


def test_penalties_and_bias_are_the_same_with_and_without_a_draft():
    params = SamplingParams(
        max_tokens=30, temperature=0, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.3, logit_bias={3: 2.5}
    )
    plain = plain_answer(params)
    assert plain != plain_answer(SamplingParams(max_tokens=30, temperature=0))
    engine = perfect(plain)
    request = engine.add_request(PROMPT, params)
    finish(engine)
    assert request.answer == plain
    assert request.stats.acceptance_length > 4


@pytest.mark.parametrize("drafted", [False, True])
def test_log_probabilities_equal_the_models(drafted):
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=3)
    answer = plain_answer(params)
    engine = perfect(answer) if drafted else engine_with(tiny_decoder(), Speculation("none"))
    request = engine.add_request(PROMPT, params)
    finish(engine)
    decoder = tiny_decoder()
    tokens = torch.tensor(PROMPT + answer[:-1])
    hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
    rows = decoder.logits(hidden[len(PROMPT) - 1 :]).log_softmax(-1)
    assert len(request.logprobs) == len(answer)
    for row, token, given in zip(rows, answer, request.logprobs, strict=True):
        assert given.token == token
        assert given.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [pair[0] for pair in given.top] == row.topk(3).indices.tolist()


def test_refused_requests_leave_no_state():
    engine = engine_with(tiny_decoder(), Speculation("none"))
    for prompt in ([], [500], [1] * 300):
        with pytest.raises(RequestError):
            engine.add_request(prompt, SamplingParams())
    with pytest.raises(RequestError, match="logit_bias"):
        engine.add_request([1], SamplingParams(logit_bias={999: 1.0}))
    small = engine_with(tiny_decoder(), Speculation("none"), replace(CPU, kv_cache_tokens=64))
    with pytest.raises(RequestError, match="cache"):
        small.add_request([1] * 20, SamplingParams(max_tokens=200))
    for one in (engine, small):
        assert not one.has_unfinished()
        assert one.pool.num_free == one.pool.num_pages


def test_64_requests_in_a_small_cache_with_cancellations():
    """Every request gets the answer it has alone; a cancelled one gets a prefix of it."""
    chance = random.Random(4)
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64, fc_norm=True, norm_output=True))
    tight = replace(CPU, kv_cache_tokens=256, max_batched_tokens=64, page_size=8, max_num_seqs=12)
    engine = engine_with(tiny_decoder(), Speculation(drafter, 3), tight)
    alone = engine_with(tiny_decoder(), Speculation("none"))
    requests, cancelled, refused = [], set(), 0
    for number in range(64):
        prompt = [chance.randrange(128) for _ in range(chance.randrange(1, 60))]
        params = SamplingParams(max_tokens=chance.randrange(1, 50), temperature=0)
        if number % 13 == 0:
            with pytest.raises(RequestError):
                engine.add_request([*prompt, 9999], params)
            refused += 1
            continue
        requests.append(engine.add_request(prompt, params))
        if chance.random() < 0.7:
            engine.step()
            engine.check_integrity()
        if chance.random() < 0.15:
            victim = chance.choice(requests)
            if not victim.finished:
                engine.abort(victim)
                cancelled.add(victim.id)
    finish(engine)
    assert refused == 5
    assert len(cancelled) > 2
    assert engine.scheduler.num_preemptions > 0
    assert engine.pool.num_free == engine.pool.num_pages
    for request in requests:
        expected = run(alone, [request.prompt], request.params)[0]
        if request.id in cancelled:
            assert request.finish_reason == "abort"
            assert request.answer == expected[: request.num_answer]
        else:
            assert request.answer == expected


def test_pages_tend_to_be_consecutive():
    pool = PagePool(32, 4)
    first, second = [], []
    for length in range(1, 49):
        assert pool.grow(first, length)
        assert pool.grow(second, length)
    for pages in (first, second):
        assert pages == list(range(pages[0], pages[0] + 12))
    assert not pool.grow(first, 4 * 25)
    assert len(first) == 12
    pool.check_integrity([first, second])
    pool.release(first)
    pool.check_integrity([second])


@pytest.mark.parametrize("broken", ["decoder", "stop strings"])
def test_a_detokenizer_error_ends_only_its_own_request(broken):
    params = SamplingParams(max_tokens=12, temperature=0)
    engine = engine_with(tiny_decoder(), Speculation("none"))
    beside, faulty = engine.add_request(PROMPT, params), engine.add_request([8, 9], params)

    class Decoder:
        def feed(self, token):
            return "x" if broken == "stop strings" else 1 / 0

        def flush(self):
            return 1 / 0

    class Matcher:
        def push(self, piece):
            return 1 / 0

    faulty.decoder, faulty.stop_matcher = Decoder(), Matcher()
    finish(engine)
    assert beside.answer == plain_answer(params)
    assert faulty.finish_reason == "error"
    assert isinstance(faulty.failure, ZeroDivisionError)
    assert engine.pool.num_free == engine.pool.num_pages


def drafter():
    return tiny_drafter(tiny_drafter_config(tiny_decoder().config))


@pytest.mark.parametrize("capture", [None, False])
@pytest.mark.parametrize("sizes", [{"max_num_seqs": 1, "kv_cache_tokens": 0}, {"max_num_seqs": 4, "kv_cache_tokens": 256}])
def test_a_cache_of_one_context_serves_a_request_of_that_length(sizes, capture):
    config = replace(CPU, max_model_len=256, **sizes)
    engine = build_engine(tiny_decoder(), Speculation(drafter(), 7), config, capture=capture)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=253, temperature=0, ignore_eos=True))
    finish(engine)
    assert request.num_answer == 253


def test_drafts_of_running_requests_do_not_starve_a_new_one():
    """32 requests at a depth of 7 take all 256 rows of a step."""
    config = replace(CPU, max_num_seqs=64, kv_cache_tokens=64 * 128)
    engine = build_engine(tiny_decoder(), Speculation(drafter(), 7).fixed_depth(), config)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    for number in range(32):
        engine.add_request([number, 2, 3], params)
    for _ in range(4):
        engine.step()
    late = engine.add_request([9, 9, 9], params)
    for _ in range(3):
        engine.step()
    assert late.num_answer


@pytest.mark.parametrize("adaptive", [False, True])
def test_prefixes_of_requests_with_one_output_token_are_reused(adaptive):
    """Scoring and classification: such requests finish before the drafter has processed their prompts."""
    speculation = Speculation(drafter(), 3, adaptive=adaptive, drift_guard=False)
    engine = build_engine(tiny_decoder(), speculation, CPU)
    prompt = [(7 * place) % 120 for place in range(100)]
    for expected in (0, 96):
        request = engine.add_request(prompt, SamplingParams(max_tokens=1, temperature=0))
        finish(engine)
        assert request.num_cached == expected
    # Drafts with reused pages equal those of an engine that computed the pages itself.
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    reused = engine.add_request(prompt, params)
    finish(engine)
    other = build_engine(tiny_decoder(), speculation, CPU)
    fresh = other.add_request(prompt, params)
    finish(other)
    assert reused.num_cached == 96
    assert reused.answer == fresh.answer
    if not adaptive:  # an adaptive depth depends on measured times
        assert reused.stats.accepted_at == fresh.stats.accepted_at


@pytest.mark.parametrize("params", [{"temperature": 0}, {"seed": 3}, {"top_p": 0.9}, {"temperature": 0, "logprobs": 2}])
@pytest.mark.parametrize("speculation", ["none", "ngram"])
@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured"])
def test_nan_logits_end_the_request_with_an_error(params, speculation, capture):
    """In prefill, and in the middle of an answer."""
    decoder = tiny_decoder()
    engine = build_engine(decoder, Speculation(speculation), CPU, capture=capture)
    request = engine.add_request(PROMPT, SamplingParams(max_tokens=40, **params))
    while request.num_answer < 3:
        engine.step()
    decoder.norm.weight.data[3] = float("nan")
    later = engine.add_request(PROMPT[:-1], SamplingParams(max_tokens=4, **params))
    finish(engine)
    engine.check_integrity()
    for one in (request, later):
        assert one.finish_reason == "error"
        assert "not numbers" in str(one.failure)
    assert 3 <= request.num_answer < 40
    assert not later.num_answer


def test_stop_strings_without_a_tokenizer_are_refused():
    engine = engine_with(tiny_decoder(), Speculation("none"))
    with pytest.raises(RequestError, match="stop strings need a tokenizer"):
        engine.add_request(PROMPT, SamplingParams(stop=["x"]))


@pytest.mark.parametrize("name", SIZES)
def test_negative_sizes_are_refused_with_the_flags_name(name):
    with pytest.raises(UserError, match=r"--[a-z-]+ must be positive"):
        build_engine(tiny_decoder(), Speculation("none"), replace(CPU, **{name: -1}))


@pytest.mark.parametrize("name", ["none", "ngram"])
def test_a_tree_needs_an_eagle_drafter(name):
    with pytest.raises(UserError, match="EAGLE drafter"):
        build_engine(tiny_decoder(), Speculation(name, 3, TreeShape()), CPU)


@pytest.mark.parametrize("depth", [2.7, True, 0, "deep"])
def test_an_invalid_depth_is_refused(depth):
    with pytest.raises(UserError, match="depth must be"):
        build_engine(tiny_decoder(), Speculation("none", depth), CPU)
