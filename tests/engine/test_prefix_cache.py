"""The prefix cache: texts with a common prefix share pages. Answers and bits are the same, and no page is lost."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors import device_batch, prefill
from fledge.engine.kv_pool import PageKeys, PagePool
from fledge.errors import RequestError
from fledge.kernels import native
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.engine.test_lossless import drafted_from_scratch
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

GREEDY = SamplingParams(max_tokens=20, temperature=0)
SMALL_PAGES = replace(CPU, page_size=8)
WITHOUT = replace(SMALL_PAGES, prefix_caching=False)


def drafter(**settings):
    return tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True, **settings))


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(128) for _ in range(length)]


def finish(engine) -> None:
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    assert engine.pool.num_free == engine.pool.num_pages


def answered(engine, prompt, params=GREEDY, **options):
    request = engine.add_request(prompt, params, **options)
    finish(engine)
    return request


# Keys and pages


def keys(tokens: list[int], drafted: bool = True) -> PageKeys:
    return PageKeys(tokens, 4, drafted=drafted)


def test_a_page_key_covers_all_tokens_up_to_the_page_and_the_next_one():
    tokens = list(range(10))
    known = keys(tokens).up_to(10)
    assert len(known) == 2
    assert keys(tokens[:9]).up_to(10) == known
    assert keys(tokens[:8]).up_to(10) == known[:1]  # the token after the second page is not known
    assert keys(tokens).up_to(7) == known[:1]
    for changed, same in ((0, 0), (3, 0), (4, 0), (5, 1), (8, 1), (9, 2)):
        other = keys([token + 100 * (place == changed) for place, token in enumerate(tokens)]).up_to(10)
        assert [mine == theirs for mine, theirs in zip(known, other, strict=True)] == [index < same for index in range(2)]
    assert keys(tokens, drafted=False).up_to(10)[0] != known[0]
    growing = keys(tokens[:6])
    assert growing.up_to(6) == known[:1]
    growing.tokens.extend(tokens[6:])
    assert growing.up_to(10) == known


def placed(pool: PagePool, tokens: list[int]) -> tuple[list[int], int]:
    """Places a computed text in the pool. Returns its pages and how many of its tokens were found."""
    pages, mine = [], keys(tokens)
    found = pool.take(pages, pool.find(mine), mine)
    assert pool.grow(pages, len(tokens))
    pool.share(pages, mine, len(tokens))
    return pages, found


def test_pages_are_shared_kept_and_evicted():
    pool = PagePool(8, 4)
    first, found = placed(pool, list(range(14)))
    assert (len(first), found) == (4, 0)
    second, found = placed(pool, [*range(9), 50, 51])  # the same prefix of two pages
    assert found == 8
    assert second[:2] == first[:2]
    assert second[2] not in first
    pool.check_integrity([first, second])
    assert pool.num_free == 3
    pool.release(first)
    pool.check_integrity([second])
    assert pool.num_free == 5  # one of them holds the first text's third page
    third, found = placed(pool, list(range(14)))
    assert found == 12
    pool.release(third)
    pool.release(second)
    pool.check_integrity([])
    assert pool.num_free == 8
    filler: list[int] = []
    assert not pool.grow(filler, 33)
    assert pool.grow(filler, 6 * 4)  # five blank pages and one kept page
    assert len(pool.find(keys(list(range(14))))) == 2  # the end of a text is evicted first
    pool.check_integrity([filler])
    pool.release(filler)


def test_equal_pages_computed_at_the_same_time_are_kept_once():
    pool = PagePool(8, 4)
    mine, yours = ([], keys(list(range(9)))), ([], keys(list(range(9))))
    for pages, _ in (mine, yours):
        assert pool.grow(pages, 9)
    for pages, some in (mine, yours):
        pool.share(pages, some, 9)
    pool.check_integrity([mine[0], yours[0]])
    pool.release(yours[0])
    pool.check_integrity([mine[0]])
    assert pool.find(keys(list(range(9)))) == mine[0][:2]


def test_integrity_is_checked():
    pool = PagePool(8, 4)
    pages, _ = placed(pool, list(range(9)))
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="miscounted"):
        pool.check_integrity([pages, pages])
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity([pages + pages[:1]])
    pool._is_blank[pages[0]] = 1
    with pytest.raises(AssertionError, match="blank"):
        pool.check_integrity([pages])


# The eager engine


def contents(engine, request) -> list[torch.Tensor]:
    """The cached keys and values of a request's computed text."""
    size = engine.pool.page_size
    slots = [request.pages[place // size] * size + place % size for place in range(request.num_computed)]
    caches = [engine.executor.cache] + ([engine.drafter.cache] if engine.drafter is not None and engine.drafter.taps else [])
    return [tensor[:, :, slots].clone() for cache in caches for tensor in (cache.keys, cache.values)]


TREE = TreeShape(3, 8)
DTYPES = ["float32", *(["float16"] if native.library() is not None else [])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("drafted", [False, True], ids=["plain", "eagle"])
def test_a_second_turn_computes_only_new_tokens(drafted, tree, dtype):
    def built(config):
        speculation = Speculation(drafter(draft_vocab_size=64) if drafted else "none", 3, tree if drafted else None)
        return engine_with(tiny_decoder(), speculation, replace(config, dtype=dtype))

    engine, fresh = built(SMALL_PAGES), built(WITHOUT)
    first = answered(engine, text(40))
    assert first.num_cached == 0
    turn = [*first.tokens, *text(9, seed=1)]
    second, alone = engine.add_request(turn, GREEDY), fresh.add_request(turn, GREEDY)
    engine.step(), fresh.step()
    engine.step(), fresh.step()  # the drafter processes a pass at the beginning of the next step
    # All of the first text except its last page or two, which the drafter has not processed completely.
    assert len(first.tokens) - 16 <= second.num_cached <= len(first.tokens)
    assert second.num_cached % 8 == 0
    assert alone.num_cached is None
    pairs = list(zip(contents(engine, second), contents(fresh, alone), strict=True))
    # With packed weights a row does not depend on others, so the target's bits equal a new computation. Accepted tokens of
    # a tree read their keys at other places: their sums round differently.
    if native.library() is not None and not (tree and drafted):
        assert all(torch.equal(mine, theirs) for mine, theirs in pairs[:2])
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())
    finish(engine), finish(fresh)
    assert second.answer == alone.answer
    if not (tree and drafted):  # the drafter's 8-bit activations let a tree's rounding change its drafts
        assert second.stats == alone.stats
    assert (engine.pool.num_queried, engine.pool.num_found) == (40 + len(turn), second.num_cached)
    assert fresh.pool.num_queried == 0


def test_a_repeated_text_computes_its_last_token():
    engine = engine_with(tiny_decoder(), Speculation("none"), SMALL_PAGES)
    for length in (16, 17):
        prompt = text(length, seed=length)
        first = answered(engine, prompt)
        again = answered(engine, prompt)
        assert again.num_cached == (8 if length == 16 else 16)
        assert again.answer == first.answer


def test_pages_without_the_drafters_keys_are_not_used_when_drafting():
    engine = engine_with(tiny_decoder(), Speculation(drafter(), 3), SMALL_PAGES)
    prompt = text(30)
    assert answered(engine, prompt, speculate=False).num_cached == 0
    assert answered(engine, prompt, speculate=False).num_cached == 24
    assert answered(engine, prompt).num_cached == 0
    assert answered(engine, prompt).num_cached == 24


@pytest.mark.parametrize("inner_settings", [{}, {"window": 12}], ids=["", "window"])
def test_drafts_equal_a_computation_from_scratch(inner_settings):
    """Prompts whose common prefix ends at each place around a page's end, one after another and together, with preemption."""
    decoder = tiny_decoder()
    network = drafter(draft_vocab_size=64, **inner_settings).share(decoder.embed_tokens, decoder.lm_head)
    base = text(40)
    prompts = [[*base[:place], *text(12, seed=place)] for place in (15, 16, 17, 23, 24, 25, 33)]
    plain = run(engine_with(decoder, Speculation("none")), prompts, GREEDY)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    config = replace(SMALL_PAGES, kv_cache_tokens=160, max_batched_tokens=32)
    inner = build_engine(decoder, Speculation(network, 4), config).drafter
    oracle = OracleSpeculator(answers, 5, reach=lambda length: length % 6, inner=inner)
    engine = engine_with(decoder, oracle, config)
    assert inner.cache.keys.shape[2] >= engine.pool.num_pages * 8  # a page number refers to the same slots in both caches
    assert [run(engine, [prompt], GREEDY)[0] for prompt in prompts] == plain
    assert engine.pool.num_found > 0
    assert run(engine, prompts, GREEDY) == plain
    assert engine.scheduler.num_preemptions > 0
    checked = 0
    for tokens, draft in oracle.inner_drafts:
        if len(draft):
            assert draft.tokens == drafted_from_scratch(decoder, network, tokens, len(draft))
            checked += 1
    assert checked > 50


def test_a_preempted_request_reuses_its_pages():
    engine = engine_with(tiny_decoder(), Speculation("none"), replace(SMALL_PAGES, kv_cache_tokens=96))
    requests = [engine.add_request(text(30, seed), replace(GREEDY, max_tokens=30)) for seed in range(2)]
    starts: dict[str, list[int]] = {request.id: [] for request in requests}
    schedule = engine.scheduler.schedule

    def watched():
        plan = schedule()
        for chunk in plan.prefills:
            starts[chunk.request.id].append(chunk.start)
        return plan

    engine.scheduler.schedule = watched
    finish(engine)
    assert engine.scheduler.num_preemptions > 0
    assert len(starts[requests[1].id]) > 1
    assert starts[requests[1].id].count(0) == 1, "it must be prefilled again from its cached pages"
    assert requests[1].num_cached == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["plain", "chain", "tree", "ngram"])
def test_64_requests_with_common_prefixes_in_a_small_cache(method, dtype):
    """Every request gets the answer it has alone; a cancelled one gets a prefix of it."""
    chance = random.Random(4)
    speculation = {
        "plain": Speculation("none"),
        "chain": Speculation(drafter(draft_vocab_size=64), 3),
        "tree": Speculation(drafter(draft_vocab_size=64), 3, TREE),
        "ngram": Speculation("ngram", 3),
    }[method]
    tight = replace(CPU, kv_cache_tokens=288, max_batched_tokens=64, page_size=8, max_num_seqs=12, dtype=dtype)
    engine = engine_with(tiny_decoder(), speculation, tight)
    alone = engine_with(tiny_decoder(), Speculation("none"), replace(CPU, dtype=dtype, prefix_caching=False))
    bases = [text(50, seed) for seed in range(3)]
    requests, cancelled, refused = [], set(), 0
    for number in range(64):
        prompt = [*chance.choice(bases)[: chance.randrange(1, 50)], *text(chance.randrange(1, 12), seed=number)]
        params = SamplingParams(max_tokens=chance.randrange(1, 50), temperature=0)
        if number % 13 == 0:
            with pytest.raises(RequestError):
                engine.add_request([*prompt, 9999], params)
            refused += 1
            continue
        requests.append(engine.add_request(prompt, params, speculate=chance.random() < 0.8))
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
    assert engine.pool.num_found > 200
    expected = [run(alone, [request.prompt], request.params)[0] for request in requests]
    for request, whole in zip(requests, expected, strict=True):
        assert request.finish_reason == "abort" if request.id in cancelled else request.finish_reason == "length"
        assert request.answer == (whole[: request.num_answer] if request.id in cancelled else whole)


# The captured cycle, run eagerly


def row_engine(decoder, speculation=None, **settings) -> Engine:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8, "kv_cache_tokens": 4096}
    config = EngineConfig(**(defaults | settings))
    return build_engine(decoder, speculation or Speculation(drafter(), 3), config, capture=False)


@pytest.mark.parametrize("windows", [(None,) * 4, (20, None, 20, None)], ids=["", "windows"])
@pytest.mark.parametrize("speculation", [Speculation(drafter(), 3), Speculation("none")], ids=["eagle", "plain"])
def test_rows_prefill_only_new_tokens(speculation, windows):
    decoder = tiny_decoder(3, windows=windows)
    engine = row_engine(decoder, speculation)
    fresh = row_engine(decoder, speculation, prefix_caching=False)
    base = text(70)
    turns = [base, [*base[:65], 3, 4, 5], [*base, *text(90, seed=2)], [*base[:20], *text(60, seed=3)]]
    first = [answered(one, base) for one in (engine, fresh)]
    assert first[0].answer == first[1].answer
    turns.append([*first[0].tokens, *text(30, seed=4)])
    found, wanted = ([one.add_request(turn, GREEDY) for turn in turns] for one in (engine, fresh))
    finish(engine), finish(fresh)
    assert [request.answer for request in found] == [request.answer for request in wanted]
    # The third has too little cached for reuse to pay (64 of 160), as has the fourth (16 of 80). The last finds most of the
    # first answer: 90 tokens less the last one and, with a drafter, less the tokens that a cycle can emit.
    assert [request.num_cached for request in found] == [64, 64, 0, 0, 80]
    # Drafts after a prefill with a cached prefix equal drafts after a prefill of the whole prompt.
    assert [request.stats for request in found] == [request.stats for request in wanted]


def test_padded_prefills_with_cached_prefixes(monkeypatch):
    monkeypatch.setattr(prefill, "RECORDED_AT", 1)
    decoder = tiny_decoder(3, windows=(20, None, 20, None))
    prompts = [[*text(81), *text(length, seed=length)] for length in (1, 30, 63, 64, 65, 100)]
    answers = []
    for pads, caching in ((True, True), (False, False)):
        engine = row_engine(decoder, prefix_caching=caching)
        engine.executor.batch.prefills.pads = pads
        answered(engine, text(81))
        requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
        finish(engine)
        answers.append([(request.answer, request.stats) for request in requests])
        if pads:
            assert [request.num_cached for request in requests] == [80, 80, 80, 80, 80, 0]
            assert (256, 64) in engine.executor.batch.prefills.buffers
    assert answers[0] == answers[1]


def test_chunked_prefill_starts_after_the_cached_prefix(monkeypatch):
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 64)
    decoder, base = tiny_decoder(3), text(150)
    engine, fresh = row_engine(decoder), row_engine(decoder, prefix_caching=False)
    starts = []
    prefill_chunk = engine.executor.batch.prefill_chunk
    monkeypatch.setattr(
        engine.executor.batch, "prefill_chunk", lambda entry, start: starts.append(start) or prefill_chunk(entry, start)
    )
    first = answered(engine, base)
    assert starts == [0, 64, 128]
    starts.clear()
    turn = [*first.tokens[:100], *text(80, seed=2)]
    second, alone = answered(engine, turn), answered(fresh, turn)
    assert (second.num_cached, starts) == (96, [96, 160])
    assert second.answer == alone.answer
    assert second.stats == alone.stats


def test_pages_of_plain_steps_are_not_shared(monkeypatch):
    decoder, prompt = tiny_decoder(3), text(20)
    engine = row_engine(decoder)
    monkeypatch.setattr(engine.controller.acceptance, "choose", lambda *_: 0)
    first = answered(engine, prompt, replace(GREEDY, max_tokens=60))
    monkeypatch.undo()
    assert answered(engine, [*first.tokens[:30], 1]).num_cached == 16  # the prompt's only full page
    assert answered(engine, first.tokens).num_cached == 0  # reusing a sixth of it does not pay


def test_pages_of_an_incomplete_prefill_are_not_shared(monkeypatch):
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 64)
    engine, prompt = row_engine(tiny_decoder(3)), text(200)
    cancelled = engine.add_request(prompt, GREEDY)
    engine.step()
    engine.abort(cancelled)
    engine.check_integrity()
    assert answered(engine, prompt).num_cached == 0
    assert answered(engine, prompt).num_cached == 192


@pytest.mark.parametrize("again", ["abort", "preempt"])
def test_pages_of_an_incomplete_recompute_are_not_shared(monkeypatch, again):
    """A request preempted after some tokens has an answer, but its new pages hold only the chunks prefilled so far."""
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 64)
    engine, prompt = row_engine(tiny_decoder(3)), text(200)
    request = engine.add_request(prompt, replace(GREEDY, max_tokens=40, ignore_eos=True))
    while request.num_answer < 3:
        engine.step()
    engine.scheduler._preempt(request)
    engine._commit(engine.executor.reader.read(but_last=0, record=lambda *_: None))
    monkeypatch.setattr(engine.pool, "find", lambda keys: [])  # its old pages have been overwritten
    engine.step()
    assert engine.executor.prefilling
    shared = []
    share = engine.pool.share
    monkeypatch.setattr(engine.pool, "share", lambda *given: (shared.append(given), share(*given)))
    if again == "abort":
        engine.abort(request)
    else:
        engine.scheduler._preempt(request)
    assert not shared
    engine.check_integrity()


def test_64_rows_with_common_prefixes_in_a_small_cache():
    decoder, chance = tiny_decoder(3), random.Random(5)
    engine = row_engine(decoder, kv_cache_tokens=768, max_model_len=128)
    plain = engine_with(decoder, Speculation("none"), WITHOUT)
    bases, requests, refused = [text(60, seed) for seed in range(3)], [], 0
    for index in range(64):
        prompt = [*chance.choice(bases)[: chance.randrange(1, 60)], *text(chance.randrange(1, 12), seed=index)]
        if index % 9 == 4:
            with pytest.raises(RequestError):
                engine.add_request([999], GREEDY)
            refused += 1
            continue
        options = {"stop_token_ids": [7, 30]} if index % 4 == 0 else {}
        options |= {"repetition_penalty": 1.2} if index % 7 == 0 else {}
        params = SamplingParams(max_tokens=chance.randint(1, 40), temperature=0, **options)
        speculate = chance.random() < 0.8
        requests.append((engine.add_request(prompt, params, speculate=speculate), plain.add_request(prompt, params)))
        if index % 3 == 0:
            engine.step()
            engine.check_integrity()
        if index % 8 == 5:
            engine.abort(requests[chance.randrange(len(requests))][0])
    finish(engine), finish(plain)
    assert refused == 7
    assert engine.pool.num_found > 200
    cancelled = [one for one, _ in requests if one.finish_reason == "abort"]
    assert 0 < len(cancelled) < 10
    for one, two in requests:
        if one in cancelled:
            assert two.answer[: one.num_answer] == one.answer
        else:
            assert (one.answer, one.finish_reason, one.stop_reason) == (two.answer, two.finish_reason, two.stop_reason)
