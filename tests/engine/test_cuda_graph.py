"""The captured executor, run without graphs, gives the eager executor's answers while requests arrive and are cancelled."""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from fledge.engine import admission, recompute
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors import cuda_graph, device_batch
from fledge.engine.executors.batch_state import ADJUSTED, SAMPLED, TRUNCATED
from fledge.engine.executors.output_reader import LaunchAhead
from fledge.engine.executors.recording import FEW_LONG_ROWS
from fledge.errors import RequestError, UserError
from fledge.kernels import compile_ahead
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.engine.test_device_batch import MLA, prompts
from tests.engine.test_request import Letters
from tests.oracle import engine_with
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

GREEDY = SamplingParams(max_tokens=20, temperature=0)


def drafter(target=None, **settings):
    return tiny_drafter(tiny_drafter_config(target, fc_norm=True, norm_output=True, **settings))


def device_engine(decoder, speculation=None, **settings) -> Engine:
    config = EngineConfig(
        **({"device": "cpu", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 8, "kv_cache_tokens": 2048} | settings)
    )
    return build_engine(decoder, speculation or Speculation(drafter(), 3), config, capture=False)


def with_costs(engine: Engine, seconds) -> None:
    """Replaces the engine's cost model: a cycle takes `seconds(batch size, depth)`."""
    costs = engine.executor.costs
    costs.seconds = lambda num_running, num_drafted, depth: seconds(costs.batch[0], depth) if costs.batch else None


def finish(engine) -> list:
    deltas = []
    while engine.has_unfinished():
        deltas += engine.step()
        engine.check_integrity()
    return deltas


@pytest.fixture(params=[1, 4], ids=["single cycles", "several together"])
def cycles(request, monkeypatch):
    """Fixes the number of cycles that are launched and read together."""
    monkeypatch.setattr(LaunchAhead, "record", lambda *_, **__: None)
    monkeypatch.setattr(LaunchAhead, "cycles", property(lambda _: request.param, lambda *_: None), raising=False)
    monkeypatch.setattr(cuda_graph, "MAX_CYCLES_BEFORE_PREFILL", request.param)
    return request.param


@pytest.mark.parametrize(
    "speculation",
    [Speculation(drafter(), 3), Speculation(drafter(mla=MLA), 3), Speculation("none")],
    ids=["eagle", "latent eagle", "plain"],
)
def test_answers_equal_the_eager_engines(speculation, cycles):
    decoder, texts = tiny_decoder(3), prompts(30, seed=1)
    plain = engine_with(decoder, Speculation("none"))
    wanted = [plain.add_request(text, GREEDY) for text in texts]
    finish(plain)
    engine = device_engine(decoder, speculation)
    found = [engine.add_request(text, GREEDY, speculate=index % 3 > 0) for index, text in enumerate(texts)]
    deltas = finish(engine)
    assert [request.answer for request in found] == [request.answer for request in wanted]
    assert [request.finish_reason for request in found] == [request.finish_reason for request in wanted]
    for request in found:
        assert [token for delta in deltas if delta.request is request for token in delta.tokens] == request.answer
    assert not engine.executor.row_of
    assert engine.pool.num_free == engine.pool.num_pages
    if speculation.drafter != "none":
        assert engine.stats.steps == sum(request.stats.steps for request in found) > 0
        assert not found[0].stats.steps


def test_64_requests_in_a_small_cache_with_cancellations(cycles):
    """Some requests are cancelled or refused, and the cache holds only a few at a time. All others get their plain answers."""
    decoder, rng = tiny_decoder(3), random.Random(5)
    engine = device_engine(decoder, kv_cache_tokens=512, page_size=16)
    plain = engine_with(decoder, Speculation("none"))
    requests, refused = [], 0
    for index, text in enumerate(prompts(64, seed=6)):
        if index % 9 == 4:
            with pytest.raises(RequestError):
                engine.add_request([999], GREEDY)
            refused += 1
            continue
        options = {"stop_token_ids": [7, 30]} if index % 4 == 0 else {}
        options |= {"repetition_penalty": 1.2} if index % 7 == 0 else {}
        params = SamplingParams(max_tokens=rng.randint(1, 40), temperature=0, **options)
        requests.append((engine.add_request(text, params), plain.add_request(text, params)))
        if index % 3 == 0:
            engine.step()
            engine.check_integrity()
        if index % 8 == 5:
            engine.abort(requests[rng.randrange(len(requests))][0])
    finish(engine)
    finish(plain)
    assert refused == 7
    assert engine.pool.num_free == engine.pool.num_pages
    cancelled = [one for one, _ in requests if one.finish_reason == "abort"]
    assert 0 < len(cancelled) < 10
    for one, two in requests:
        if one in cancelled:
            assert two.answer[: one.num_answer] == one.answer
        else:
            assert (one.answer, one.finish_reason, one.stop_reason) == (two.answer, two.finish_reason, two.stop_reason)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("speculation", [Speculation(drafter(), 3), Speculation("none")], ids=["eagle", "plain"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_preemption_does_not_change_answers(temperature, speculation, prefix_caching, cycles):
    """The cache holds all prompts but not the answers: the newest requests are preempted; answers equal a large cache's."""
    decoder, texts = tiny_decoder(3), prompts(7, seed=8, longest=20)
    params = [SamplingParams(max_tokens=50, temperature=temperature, seed=i, ignore_eos=True) for i in range(7)]
    answers = {}
    for kv_cache_tokens in (4096, 256):
        engine = device_engine(
            decoder, speculation, kv_cache_tokens=kv_cache_tokens, page_size=16, prefix_caching=prefix_caching
        )
        requests = [engine.add_request(text, one) for text, one in zip(texts, params, strict=True)]
        finish(engine)
        assert engine.pool.num_free == engine.pool.num_pages
        assert {request.finish_reason for request in requests} == {"length"}
        answers[kv_cache_tokens] = [request.answer for request in requests]
        preempted = sum(request.num_preemptions for request in requests)
        assert preempted == engine.scheduler.num_preemptions
        assert (preempted > 0) == (kv_cache_tokens == 256)
        assert not requests[0].num_preemptions, "the oldest request must never be preempted"
    assert answers[256] == answers[4096]


def test_a_preempted_request_can_be_cancelled():
    engine = device_engine(tiny_decoder(3), kv_cache_tokens=256, page_size=16)
    params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    requests = [engine.add_request(text, params) for text in prompts(6, seed=8, longest=20)]
    while not any(request.num_preemptions for request in requests):
        engine.step()
    preempted = next(request for request in requests if request.num_preemptions)
    before = preempted.num_answer
    engine.abort(preempted)
    engine.check_integrity()
    finish(engine)
    assert preempted.finish_reason == "abort"
    assert preempted.num_answer == before > 0
    assert all(request.num_answer == 100 for request in requests if request is not preempted)
    assert engine.pool.num_free == engine.pool.num_pages


def test_seeded_samples_do_not_depend_on_speculation_or_batch():
    decoder, texts = tiny_decoder(3), prompts(10, seed=7)
    cuts = ({}, {"top_p": 0.8}, {"top_k": 4}, {"min_p": 0.2}, {"top_k": 6, "top_p": 0.7, "min_p": 0.05})
    params = [SamplingParams(max_tokens=15, temperature=0.9, seed=i, **cuts[i % len(cuts)]) for i in range(10)]
    results = []
    for speculation, rows in ((Speculation("none"), 2), (Speculation(drafter(), 4), 8)):
        engine = device_engine(decoder, speculation, max_num_seqs=rows)
        requests = [engine.add_request(text, one) for text, one in zip(texts, params, strict=True)]
        finish(engine)
        results.append([request.answer for request in requests])
    assert results[0] == results[1]


@pytest.mark.parametrize("speculation", [Speculation(None), None], ids=["plain", "drafted"])
def test_sampling_in_the_graphs_of_top_p_gives_the_same_tokens(speculation):
    """Plain sampling uses the graphs for truncated sampling until its own are recorded."""
    texts = []
    for truncated in (False, True):
        engine = device_engine(tiny_decoder(3), speculation)
        engine.executor.batch.samples_truncated = truncated
        params = [SamplingParams(max_tokens=16, temperature=1.0, seed=number) for number in range(6)]
        requests = [engine.add_request(prompt, one) for prompt, one in zip(prompts(6, seed=5), params, strict=True)]
        finish(engine)
        texts.append([request.tokens for request in requests])
    assert texts[0] == texts[1]


def test_a_long_prompt_does_not_stall_other_requests(monkeypatch):
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 64)
    decoder = tiny_decoder(3)
    engine = device_engine(decoder, max_model_len=256)
    rng = random.Random(0)
    short = engine.add_request(prompts(1)[0], GREEDY)
    engine.step()
    long = engine.add_request([rng.randrange(128) for _ in range(180)], GREEDY)
    before = []
    while not long.answer:
        before.append(short.num_answer)
        engine.step()
    assert len(before) >= 3
    assert before[-1] >= before[0] + 2
    finish(engine)
    eager = engine_with(decoder, Speculation("none"), EngineConfig(device="cpu", dtype="float32", max_model_len=256))
    wanted = eager.add_request(long.prompt, GREEDY)
    finish(eager)
    assert long.answer == wanted.answer


def test_stop_strings(cycles):
    """The host finds stop strings: it stops the row and drops the tokens behind the match."""
    decoder = tiny_decoder(3)

    text = prompts(1, seed=9)[0]
    engine = device_engine(decoder)
    engine.tokenizer = SimpleNamespace(incremental_decoder=lambda skip_special_tokens: Letters())
    whole = engine.add_request(text, SamplingParams(max_tokens=30, temperature=0))
    finish(engine)
    stop = whole.text[7:9]
    cut = engine.add_request(text, SamplingParams(max_tokens=30, temperature=0, stop=stop))
    other = engine.add_request(prompts(1, seed=10)[0], GREEDY)
    finish(engine)
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert other.finish_reason == "length"


@pytest.mark.parametrize("num_rows", [1, 8])
def test_output_is_read_after_later_cycles_were_launched(num_rows, cycles):
    engine = device_engine(tiny_decoder(3), max_num_seqs=num_rows)
    for text in prompts(num_rows, seed=11):
        engine.add_request(text, GREEDY)
    engine.step()
    assert not any(request.num_answer for request in engine.requests.values())
    engine.step()
    assert len(engine.executor.reader.copies) == cycles
    assert all(request.num_answer == 1 for request in engine.requests.values())
    assert int(engine.executor.batch.state.rows.answered.sum()) > num_rows
    finish(engine)


def test_after_plain_steps_under_load_the_drafter_is_stale():
    """Requests that ran plain steps are not drafted for afterwards, new ones are. Answers do not change."""
    decoder, texts = tiny_decoder(3), prompts(6, seed=12)
    plain = engine_with(decoder, Speculation("none"))
    wanted = [plain.add_request(text, GREEDY) for text in texts]
    finish(plain)
    engine = device_engine(decoder)
    with_costs(engine, lambda size, depth: 1.0 + (10.0 if size > 2 else 0.01) * depth)
    found = [engine.add_request(text, GREEDY) for text in texts[:4]]
    for _ in range(3):
        engine.step()
    assert all(request.drafter_stale for request in found)
    while any(not request.finished for request in found):
        engine.step()
    found += [engine.add_request(text, GREEDY) for text in texts[4:]]
    finish(engine)
    assert [request.answer for request in found] == [request.answer for request in wanted]
    assert not any(request.stats.steps for request in found[:4])
    assert all(request.stats.steps for request in found[4:])


def loaded_engine(decoder, **settings) -> Engine:
    """An engine where a drafted token costs 0.01 plain steps with up to two rows, and ten plain steps with more."""
    engine = device_engine(decoder, **settings)
    with_costs(engine, lambda size, depth: 1.0 + (10.0 if size > 2 else 0.01) * depth)
    engine.executor.batch.prefills.graphs.seconds[4096, 1, 1024, 0] = 0.5
    return engine


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stale_requests_are_recomputed_when_the_load_is_gone(temperature, cycles, monkeypatch):
    monkeypatch.setattr(recompute, "STEPS", 3)
    decoder, texts = tiny_decoder(3), prompts(6, seed=12)
    params = [SamplingParams(max_tokens=10 if index < 4 else 90, temperature=temperature, seed=index) for index in range(6)]
    unloaded = device_engine(decoder)
    wanted = [unloaded.add_request(text, one) for text, one in zip(texts, params, strict=True)]
    finish(unloaded)
    engine = loaded_engine(decoder)
    found = [engine.add_request(text, one) for text, one in zip(texts, params, strict=True)]
    finish(engine)
    assert [request.answer for request in found] == [request.answer for request in wanted]
    assert engine.scheduler.num_recomputed == 2
    assert not any(request.stats.steps for request in found[:4])
    assert all(request.stats.steps for request in found[4:])
    assert not engine.scheduler.num_preemptions
    assert not engine.scheduler.recompute.done


def test_a_request_is_recomputed_at_most_once(monkeypatch):
    monkeypatch.setattr(recompute, "STEPS", 1)
    decoder, texts = tiny_decoder(3), prompts(20, seed=12)
    engine = loaded_engine(decoder)
    long = engine.add_request(texts[0], SamplingParams(max_tokens=90, temperature=0, ignore_eos=True))
    for text in texts[1:]:  # two short requests at a time
        while len(engine.requests) > 1:
            engine.step()
        for _ in range(3):
            engine.step()
        for _ in range(2):
            engine.add_request(text, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True))
    finish(engine)
    assert long.finished
    assert engine.scheduler.num_recomputed == 1


def test_no_recompute_with_undrafted_requests_or_a_full_cache(monkeypatch):
    monkeypatch.setattr(recompute, "STEPS", 1)
    decoder, texts = tiny_decoder(3), prompts(6, seed=12)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    engine = device_engine(decoder)
    with_costs(engine, lambda size, depth: 1.0 + 0.25 * depth)
    engine.executor.batch.prefills.graphs.seconds[4096, 1, 1024, 0] = 0.1
    for text in texts[1:]:
        engine.add_request(text, params, speculate=False)
    lonely = engine.add_request(texts[0], params)
    finish(engine)
    assert not engine.scheduler.num_recomputed
    assert not lonely.stats.steps
    engine = loaded_engine(decoder)
    for index, text in enumerate(texts):
        engine.add_request(text, replace(params, max_tokens=5 if index < 4 else 60))
    engine.step()
    monkeypatch.setattr(type(engine.pool), "num_free", property(lambda _: 2))
    while len(engine.requests) > 2:
        engine.step()
    for _ in range(5):
        engine.step()
    assert not engine.scheduler.num_recomputed


def test_statistics_count_only_drafted_requests(cycles):
    """Output is read later: what counts is which rows were drafted for when the cycle was launched."""
    engine, texts = device_engine(tiny_decoder(3)), prompts(4, seed=3)
    requests = [engine.add_request(text, GREEDY, speculate=index % 2 == 0) for index, text in enumerate(texts)]
    finish(engine)
    assert [bool(request.stats.steps) for request in requests] == [True, False, True, False]
    assert engine.stats.steps == sum(request.stats.steps for request in requests)


@pytest.mark.parametrize("page_size", [64, 256])  # whole pages hold 192 keys, or one page more than those
def test_short_rows_run_in_cycles_of_the_small_kv_bucket(page_size, monkeypatch, cycles):
    decoder = tiny_decoder(3)
    texts = [*prompts(3, seed=5), [number * 7 % 128 for number in range(170)]]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)

    def run(few_keys: int) -> tuple[list, list]:
        monkeypatch.setattr(device_batch, "FEW_KEYS", few_keys)
        engine, shapes = device_engine(decoder, max_model_len=512, kv_cache_tokens=4096, page_size=page_size), []
        step = engine.executor.batch.graphs.run
        monkeypatch.setattr(engine.executor.batch.graphs, "run", lambda *shape: (shapes.append(shape), step(*shape)))
        requests = [engine.add_request(text, params) for text in texts[:3]]
        for _ in range(3):
            engine.step()
        requests.append(engine.add_request(texts[3], params))
        finish(engine)
        return [request.answer for request in requests], [shape[3:] for shape in shapes]

    wanted, buckets = run(10**6)  # every row is short: one KV length bucket is enough
    assert set(buckets) == {()}
    found, buckets = run(192)
    assert found == wanted
    assert buckets[0] == (192,)
    assert buckets[-1] == ()  # the long request ends last


def test_a_kv_bucket_is_used_only_where_it_makes_a_difference(monkeypatch):
    monkeypatch.setattr(device_batch, "FEW_KEYS", 128)
    rows = device_engine(tiny_decoder(3), max_model_len=400, page_size=64).executor.batch
    assert (rows.kv_bucket(128), rows.kv_bucket(129)) == ((128,), ())
    assert device_engine(tiny_decoder(3), max_model_len=64, page_size=64).executor.batch.kv_bucket(10) == ()


def test_requests_held_back_enter_together_and_all_are_answered(monkeypatch):
    """If a prefill pass takes long, new requests wait for each other; none is forgotten."""
    monkeypatch.setattr(cuda_graph.CudaGraphExecutor, "prefill_seconds", 10.0)
    monkeypatch.setattr(admission, "LONGEST_WAIT", 0.02)
    decoder, texts = tiny_decoder(3), prompts(40, seed=9)
    plain = engine_with(decoder, Speculation("none"))
    wanted = [plain.add_request(text, GREEDY) for text in texts]
    finish(plain)
    engine = device_engine(decoder, max_num_seqs=16, kv_cache_tokens=4096)
    groups = []
    read = engine.executor.batch.prefill
    monkeypatch.setattr(engine.executor.batch, "prefill", lambda entries: (groups.append(len(entries)), read(entries)))
    found = []
    for text in texts:
        found.append(engine.add_request(text, GREEDY))
        engine.step()
    finish(engine)
    assert [request.answer for request in found] == [request.answer for request in wanted]
    assert max(groups) > 1
    assert sum(groups) == len(texts)


def test_512_rows_at_once():
    decoder, texts = tiny_decoder(3), [text[:4] for text in prompts(520, seed=13)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    plain = engine_with(decoder, Speculation("none"))
    wanted = [plain.add_request(text, params) for text in texts]
    finish(plain)
    engine = device_engine(decoder, max_num_seqs=512, kv_cache_tokens=512 * 64)
    found = [engine.add_request(text, params) for text in texts]
    most = 0
    while engine.has_unfinished():
        engine.step()
        most = max(most, len(engine.executor.row_of))
    engine.check_integrity()
    assert most == 512
    assert [request.answer for request in found] == [request.answer for request in wanted]


class Clock:
    """A simulated device and its clock: launched work is done once `now` reaches `free_at`."""

    def __init__(self) -> None:
        self.now = self.free_at = 0.0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self.now) + seconds


class Event:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, clock.free_at

    def query(self) -> bool:
        return self.clock.now >= self.at

    def synchronize(self) -> None:
        self.clock.now = max(self.clock.now, self.at)

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def test_cycle_times_exclude_prefill_chunks_between_them(monkeypatch):
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 16)
    engine, clock = device_engine(tiny_decoder(3), max_model_len=400, kv_cache_tokens=4096), Clock()
    rows, cycle = engine.executor.batch, 5e-4
    run, prefill_chunk = rows.graphs.run, rows.prefill_chunk
    monkeypatch.setattr(rows, "mark", lambda: Event(clock))
    monkeypatch.setattr(rows, "download", lambda tensor: (tensor.clone(), Event(clock)))
    monkeypatch.setattr(rows.graphs, "run", lambda *shape: (run(*shape), clock.work(cycle)))
    monkeypatch.setattr(rows, "prefill_chunk", lambda *given: (clock.work(6 * cycle), prefill_chunk(*given))[1])
    seen = []
    monkeypatch.setattr(engine.executor.costs, "record", lambda shape, seconds: seen.append(seconds))
    engine.add_request(prompts(1, seed=3)[0], SamplingParams(max_tokens=120, temperature=0, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.add_request(prompts(1, seed=4)[0] * 20, GREEDY)  # many chunks
    finish(engine)
    assert len(seen) > 20
    assert seen == pytest.approx([cycle] * len(seen))


@pytest.mark.parametrize("few_keys", [128, 10**6])
def test_warm_up_records_the_usual_cycles(few_keys, monkeypatch):
    """Cycles of every size, depth and sampling mode, and cycles of few rows with long contexts."""
    monkeypatch.setattr(device_batch, "FEW_KEYS", few_keys)
    executor = device_engine(tiny_decoder(3), max_model_len=400, page_size=64, max_batched_tokens=512).executor
    batch, recorded = executor.batch, {"cycles": [], "prefills": [], "chunks": []}
    monkeypatch.setattr(batch.graphs, "capture", True)
    monkeypatch.setattr(batch, "record", recorded["cycles"].extend)
    for name in ("prefills", "chunks"):
        monkeypatch.setattr(getattr(batch, name), "record", recorded[name].extend)

    @contextmanager
    def traced():
        yield
        assert all(mode in {shape[2] for shape in recorded["cycles"]} for mode in range(ADJUSTED))
        for shapes in recorded.values():  # this pass only compiles kernels
            shapes.clear()

    monkeypatch.setattr(compile_ahead, "side_by_side", traced)
    assert len(executor.warm_up()) == 1
    cycles, bucket = recorded["cycles"], () if few_keys > 400 else (128,)
    assert SAMPLED not in {shape[2] for shape in cycles} | {shape[-1] for shape in recorded["prefills"]}
    assert ADJUSTED not in {shape[-1] for shape in recorded["prefills"]}
    assert batch.recorded_mode(SAMPLED) == TRUNCATED
    assert cycles[0][0] == batch.sizes[-1]  # the largest first: the others reuse its memory
    while executor.idle():
        pass
    assert batch.recorded_mode(SAMPLED) == SAMPLED
    assert len(set(cycles)) == len(cycles)
    assert {shape for shape in cycles if shape[3:] == bucket and shape[2] < ADJUSTED} == {
        (size, depth, mode, *bucket) for size in batch.sizes for depth in (0, 1, 2, 3) for mode in range(ADJUSTED)
    }
    assert {shape[:2] for shape in cycles if shape[2] == ADJUSTED} == {
        (size, depth) for size in batch.sizes for depth in (0, 3)
    }
    assert {shape[0] for shape in cycles if shape[3:] != bucket} == ({1, 2, FEW_LONG_ROWS} if bucket else set())
    assert {shape[-1] for shape in recorded["prefills"]} == set(range(ADJUSTED + 1))
    assert not recorded["chunks"]  # no prompt is longer than a chunk


def test_a_captured_tree_uses_the_draft_vocabularys_coverage():
    """As in the eager executor: tokens outside the draft vocabulary make deep nodes less likely."""
    engine = device_engine(tiny_decoder(3), Speculation(drafter(draft_vocab_size=64), 3, TreeShape(2, 4)))
    covered = engine.drafter.coverage.covered
    assert covered < 1
    assert engine.executor.batch.method.log_covered == math.log(covered)


def test_latent_attention_limits_the_depth():
    with pytest.raises(UserError, match="at most 61 tokens"):
        device_engine(tiny_decoder(3), Speculation(drafter(mla=MLA), 64), max_model_len=128)
