"""Offline generation: the captured executor, which refills and compacts rows, gives the eager engine's answers."""

from __future__ import annotations

import random

import pytest
import torch

from fledge.engine.admission import OfflineRefill
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors.graphs import batch_sizes, size_for
from fledge.engine.executors.prefill import RECORDED_AT
from fledge.engine.offline import AnswerGenerator, answer_generator, seed_function
from fledge.errors import RequestError
from tests.tiny import tiny_decoder, tiny_drafter

STOPS = (5, 17, 40, 99)


@pytest.fixture(autouse=True)
def few_threads():
    torch.set_num_threads(1)


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def captured_rows(decoder, rows: int, max_len: int = 128, tokens: int = 0, page_size: int = 16) -> AnswerGenerator:
    config = EngineConfig(
        device="cpu",
        dtype="float32",
        max_model_len=max_len,
        max_num_seqs=rows,
        kv_cache_tokens=tokens or rows * max_len,
        page_size=page_size,
    )
    engine = build_engine(decoder, Speculation(drafter=None), config, capture=False, admission=OfflineRefill())
    return AnswerGenerator(engine)


def eager_engine(decoder, max_len: int = 128) -> AnswerGenerator:
    config = EngineConfig(device="cpu", dtype="float32", max_model_len=max_len, max_num_seqs=16)
    return AnswerGenerator(build_engine(decoder, Speculation(drafter=None), config))


def collected(answers) -> dict[int, tuple[list[int], str]]:
    found = {}
    for index, tokens, reason in answers:
        assert index not in found
        found[index] = (tokens, reason)
    return found


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_greedy_answers_equal_the_eager_engines(architecture):
    decoder = tiny_decoder(3, architecture)
    texts = prompts(40)
    expected = collected(eager_engine(decoder).generate(texts, max_tokens=24, stop_ids=STOPS))
    rows = captured_rows(decoder, rows=8)
    found = collected(rows.generate(texts, max_tokens=24, stop_ids=STOPS))
    assert found == expected
    assert {reason for _, reason in found.values()} == {"stop", "length"}


def test_sliding_window():
    decoder = tiny_decoder(4, "MistralForCausalLM", windows=(6, None, 6, 6))
    texts = prompts(12, seed=2)
    expected = collected(eager_engine(decoder).generate(texts, max_tokens=20, stop_ids=()))
    assert collected(captured_rows(decoder, rows=5).generate(texts, max_tokens=20, stop_ids=())) == expected


def test_a_small_cache_does_not_change_answers():
    decoder = tiny_decoder(5)
    texts = prompts(20, seed=3)
    expected = collected(eager_engine(decoder).generate(texts, max_tokens=30, stop_ids=STOPS))
    tight = captured_rows(decoder, rows=8, tokens=128)
    assert collected(tight.generate(texts, max_tokens=30, stop_ids=STOPS)) == expected


def test_the_context_ends_an_answer():
    decoder = tiny_decoder(6)
    texts = [[1] * 39, [2] * 20]
    found = collected(captured_rows(decoder, rows=2, max_len=40).generate(texts, max_tokens=64, stop_ids=()))
    assert [len(found[index][0]) for index in range(2)] == [1, 20]
    assert found == collected(eager_engine(decoder, max_len=40).generate(texts, max_tokens=64, stop_ids=()))


def test_the_batch_shrinks_at_the_end():
    """Rows are compacted, and steps of smaller batch sizes run."""
    decoder = tiny_decoder(7)
    texts = prompts(40, seed=4)
    rows = captured_rows(decoder, rows=40)
    sizes = []
    graphs = rows.engine.executor.batch.graphs
    step = graphs.step
    graphs.step = lambda size, *rest: (sizes.append(size), step(size, *rest))
    found = collected(rows.generate(texts, max_tokens=60, stop_ids=STOPS))
    assert found == collected(eager_engine(decoder).generate(texts, max_tokens=60, stop_ids=STOPS))
    assert max(sizes) == 40
    assert 16 in sizes


def test_samples_do_not_depend_on_the_batch():
    decoder = tiny_decoder(8)
    texts = prompts(20, seed=5)
    options = {"max_tokens": 12, "temperature": 0.9, "seed": 11, "stop_ids": STOPS}
    wide = collected(captured_rows(decoder, rows=20).generate(texts, **options))
    narrow = collected(captured_rows(decoder, rows=3).generate(texts, **options))
    assert wide == narrow
    assert collected(captured_rows(decoder, rows=20).generate(texts, **(options | {"seed": 12}))) != wide


def test_a_tiny_top_p_is_greedy():
    decoder = tiny_decoder(9)
    texts = prompts(10, seed=6)
    rows = captured_rows(decoder, rows=4)
    greedy = collected(rows.generate(texts, max_tokens=10, stop_ids=STOPS))
    assert collected(rows.generate(texts, max_tokens=10, temperature=1.5, top_p=1e-4, stop_ids=STOPS)) == greedy
    assert collected(rows.generate(texts, max_tokens=10, temperature=1.5, seed=1, stop_ids=STOPS)) != greedy


def test_a_closed_generator_leaves_no_state():
    decoder = tiny_decoder(10)
    texts = prompts(20, seed=7)
    for generator in (captured_rows(decoder, rows=4), eager_engine(decoder)):
        expected = collected(generator.generate(texts, max_tokens=10, stop_ids=STOPS))
        running = generator.generate(texts, max_tokens=10, stop_ids=STOPS)
        next(running)
        running.close()
        assert collected(generator.generate(texts, max_tokens=10, stop_ids=STOPS)) == expected


@pytest.mark.parametrize("generator", [captured_rows(tiny_decoder(), 2), eager_engine(tiny_decoder())])
def test_invalid_input_is_refused_before_anything_runs(generator):
    with pytest.raises(RequestError, match="prompt 1 has 0 tokens"):
        generator.generate([[1], []], max_tokens=4)
    with pytest.raises(RequestError, match="prompt 0 has 128 tokens"):
        generator.generate([[1] * 128], max_tokens=4)
    with pytest.raises(RequestError, match="prompt 0 holds a token outside"):
        generator.generate([[128]], max_tokens=4)
    with pytest.raises(RequestError, match="top_p"):
        generator.generate([[1]], max_tokens=4, top_p=0.0)


def test_a_failed_request_raises():
    """Training would otherwise use it as an empty answer."""
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.lm_head.weight.fill_(torch.nan)
    generator = eager_engine(decoder)
    with pytest.raises(RuntimeError, match="not numbers"):
        list(generator.generate([[1, 2], [3]], max_tokens=4))
    assert not generator.engine.has_unfinished()


def test_answer_generator_on_cpu():
    generator = answer_generator(tiny_decoder(11), device="cpu", dtype="float32", max_model_len=64)
    found = collected(generator.generate(prompts(5), max_tokens=6, stop_ids=STOPS))
    assert sorted(found) == [0, 1, 2, 3, 4]


def test_a_drafter_does_not_change_answers():
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 64}
    drafted = answer_generator(tiny_decoder(11), **options, speculation=Speculation(tiny_drafter(), 3))
    assert drafted.engine.drafter is not None
    plain = answer_generator(tiny_decoder(11), **options)
    found, wanted = (collected(g.generate(prompts(5), max_tokens=20, stop_ids=STOPS)) for g in (drafted, plain))
    assert found == wanted
    assert drafted.engine.stats.steps > 0


def seeds(seed: int, count: int) -> list[int]:
    return list(map(seed_function(seed), range(count)))


def test_seeds_are_one_per_prompt_and_stable():
    assert seeds(3, 4) == seeds(3, 6)[:4]
    assert len({*seeds(3, 100), *seeds(4, 100)}) == 200
    assert all(0 <= seed < 2**63 for seed in seeds(2**70, 50))


@pytest.mark.parametrize(
    "make", [lambda decoder: captured_rows(decoder, rows=6), lambda decoder: captured_rows(decoder, rows=40), eager_engine]
)
def test_prompts_can_be_a_stream_that_depends_on_answers(make):
    """Each prompt of the second half is yielded only after one of the first half is answered; answers equal those of a list."""
    generator = make(tiny_decoder(13))
    texts = prompts(60, seed=9)
    options = {"max_tokens": 12, "temperature": 0.8, "stop_ids": STOPS}
    asked: list[int] = []  # by index in the stream
    ready = list(range(30))
    under_way = 0

    def stream():
        nonlocal under_way
        while ready or under_way:
            if not ready:
                yield None
                continue
            asked.append(ready.pop(0))
            under_way += 1
            yield texts[asked[-1]]

    found = {}
    for index, tokens, reason in generator.generate(stream(), seed=lambda index: 100 + asked[index], **options):
        under_way -= 1
        found[asked[index]] = (tokens, reason)
        if asked[index] < 30:
            ready.append(asked[index] + 30)
    assert found == collected(generator.generate(texts, seed=lambda index: 100 + index, **options))
    with pytest.raises(RequestError, match="prompt 1 holds a token outside"):
        list(generator.generate(iter([[1], [128]]), max_tokens=4, stop_ids=()))


def test_batch_sizes():
    assert batch_sizes(2048)[:3] == [1, 2, 4]
    assert batch_sizes(100) == [1, 2, 4, 8, 16, 32, 64, 100]
    assert batch_sizes(3) == [1, 2, 3]
    assert [size_for(batch_sizes(100), rows) for rows in (1, 16, 17, 65, 100)] == [1, 16, 32, 100, 100]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_graphs_equal_the_eager_run_and_do_not_synchronise():
    """In fp32 on the GPU graphs and the eager run give the same tokens; only reading output waits for the device."""
    decoder = tiny_decoder(12).cuda()
    texts = prompts(60, seed=8)
    config = EngineConfig(
        device="cuda", dtype="float32", max_model_len=128, max_num_seqs=32, kv_cache_tokens=4096, page_size=64
    )
    for options in ({}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
        results = []
        for capture in (False, None):
            engine = build_engine(decoder, Speculation(drafter=None), config, capture=capture, admission=OfflineRefill())
            generator = AnswerGenerator(engine)
            for _ in range(RECORDED_AT):  # afterwards all graphs are recorded
                list(generator.generate(texts, max_tokens=20, stop_ids=STOPS, **options))
            found = []
            torch.cuda.set_sync_debug_mode("error")
            try:
                found += generator.generate(texts, max_tokens=20, stop_ids=STOPS, **options)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            results.append(collected(found))
        assert results[0] == results[1]
