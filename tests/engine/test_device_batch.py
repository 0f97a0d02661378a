"""The captured speculation cycle, run eagerly: its drafts equal the eager engine's, its answers equal plain decoding."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from fledge.config import MLAConfig
from fledge.engine.build import Speculation
from fledge.engine.config import EngineConfig
from fledge.engine.executors import device_batch as device_batch_module
from fledge.engine.executors.batch_state import GREEDY, SAMPLED, RowInit
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.kernels.accept import DRAFTED
from fledge.sampling import SamplingParams
from tests.oracle import captured_answers, engine_with, make_batch, pages_for, record_drafts
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

MLA = MLAConfig(kv_lora_rank=12, qk_nope_head_dim=8, qk_rope_head_dim=6, v_head_dim=10)
VERSIONS = {
    "3": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True, "draft_vocab_size": 64},
    "norm_before_fc": {"norm_before_fc": True, "own_embedding": True},
    "norm_before_residual": {"norm_before_residual": True, "own_head": False},
    "window": {"fc_norm": True, "norm_output": True, "window": 9, "draft_vocab_size": 64},
    "two layers": {"fc_norm": True, "norm_output": True, "num_layers": 2},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "latent attention": {"fc_norm": True, "norm_output": True, "mla": MLA},
    "latent attention, window": {"mla": replace(MLA, q_lora_rank=20), "window": 9, "num_layers": 2, "draft_vocab_size": 64},
}
STOPS = (5, 17, 40, 99)


def prompts(count: int, seed: int = 0, longest: int = 30) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(128) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def settings(decoder, rows: int, max_len: int = 128) -> EngineConfig:
    config = EngineConfig(
        device="cpu", dtype="float32", max_model_len=max_len, max_num_seqs=rows, kv_cache_tokens=rows * (max_len + 32)
    )
    return config.resolve(decoder.config)


def device_batch(decoder, drafter, rows: int, max_len: int = 128) -> DeviceBatch:
    return make_batch(decoder, settings(decoder, rows, max_len), drafter)


def entries(batch: DeviceBatch, texts, limit: int = 40, **options) -> list[RowInit]:
    size, made, page = batch.config.page_size, [], 0
    for row, text in enumerate(texts):
        count = pages_for(batch, len(text), limit)
        made.append(RowInit(row, text, list(range(page, page + count)), limit, **options))
        page += count
    assert page * size <= batch.cache.keys.shape[2]
    return made


def answer_of(batch: DeviceBatch, row: int) -> list[int]:
    state = batch.state.rows
    length = int(state.length[row])
    return state.tokens[row, length - int(state.answered[row]) : length].tolist()


def engine_drafts(decoder, drafter, text, depth, steps) -> list[tuple[list[int], list[int]]]:
    """Returns (text so far, draft) for each step of the eager engine."""
    engine = engine_with(decoder, Speculation(drafter, depth))
    engine.add_request(text, SamplingParams(max_tokens=40, temperature=0))
    recorded = record_drafts(engine)
    for _ in range(steps + 1):
        engine.step()
    return [(tokens, draft.tokens) for _, tokens, draft in recorded[1:]]


@pytest.mark.parametrize("version", VERSIONS)
def test_drafts_equal_the_eager_engines(version):
    decoder = tiny_decoder()
    config = tiny_drafter_config(**VERSIONS[version])
    texts, depth = prompts(4, seed=1), 4
    expected = [engine_drafts(decoder, tiny_drafter(config), text, depth, 8) for text in texts]
    batch = device_batch(decoder, tiny_drafter(config), rows=4)
    batch.prefill(entries(batch, texts))
    compared = 0
    for _ in range(8):
        before = [answer_of(batch, row) for row in range(4)]
        batch.graphs.run(4, depth, GREEDY)
        for row, answer in enumerate(before):
            text = texts[row] + answer
            wanted = {tuple(key): draft for key, draft in expected[row]}.get(tuple(text))
            if wanted is not None:
                assert batch.state.drafts[row, :depth].tolist() == wanted
                compared += 1
    assert compared > 25


@pytest.mark.parametrize(
    ("version", "depth"), [("3", 1), ("3.1", 3), ("window", 5), ("latent attention", 3), ("latent attention, window", 4)]
)
def test_speculative_answers_equal_plain_answers(version, depth):
    decoder, texts = tiny_decoder(3), prompts(10, seed=2)
    plain = captured_answers(decoder, settings(decoder, 8), capture=False)
    wanted = sorted(plain.generate(texts, max_tokens=24, stop_ids=STOPS))
    drafter = tiny_drafter(tiny_drafter_config(**VERSIONS[version]))
    speculative = captured_answers(decoder, settings(decoder, 8), drafter=drafter, depth=depth, capture=False)
    assert sorted(speculative.generate(texts, max_tokens=24, stop_ids=STOPS)) == wanted
    options = {"max_tokens": 24, "temperature": 0.8, "seed": 3, "stop_ids": STOPS}
    assert sorted(speculative.generate(texts, **options)) == sorted(plain.generate(texts, **options))
    options["top_p"] = 0.7
    assert sorted(speculative.generate(texts, **options)) == sorted(plain.generate(texts, **options))


def oracle_drafts(batch: DeviceBatch, answers: list[list[int]], reach) -> None:
    """Makes the batch draft the true continuation, with wrong tokens after `reach(answered)` right ones."""
    draft = batch.method.draft

    def cheat(pages, depth: int, *, sampled: bool):
        drafted = draft(pages, depth, sampled=sampled)
        for row, answer in enumerate(answers[: len(pages)]):
            answered = int(batch.state.rows.answered[row])
            for place in range(depth):
                true = answer[answered + place] if answered + place < len(answer) else 0
                token = true if place < reach(answered) else (true + 1) % 128
                batch.state.drafts[row, place] = token
                if place == depth - 1:
                    drafted.last.ids_NC[row] = token
        return drafted

    batch.method.draft = cheat


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED])
@pytest.mark.parametrize("reach", [lambda answered: 9, lambda answered: answered % 5], ids=["perfect", "errs"])
def test_accepted_drafts(mode, reach):
    """However many tokens are accepted, the answer is the plain one; stop tokens and limits inside a draft are respected."""
    decoder, texts, depth = tiny_decoder(3), prompts(6, seed=4), 4
    options = {"limit": 30, "stop_ids": STOPS} | ({"temperature": 0.9, "seed": 5} if mode else {})
    plain = device_batch(decoder, None, rows=8)
    plain.prefill(entries(plain, texts, **options))
    while plain.state.rows.active.any():
        plain.graphs.run(8, 0, mode)
    answers = [answer_of(plain, row) for row in range(6)]

    config = tiny_drafter_config(fc_norm=True, norm_output=True)
    batch = device_batch(decoder, tiny_drafter(config), rows=8)
    batch.prefill(entries(batch, texts, **options))
    oracle_drafts(batch, answers, reach)
    state, steps, accepted = batch.state.rows, 0, 0
    while state.active.any():
        batch.graphs.run(8, depth, mode)
        steps += 1
        accepted += sum(int((report[1 : 1 + report[0]] >= DRAFTED).sum()) for report in state.report[:6])
    assert [answer_of(batch, row) for row in range(6)] == answers
    longest = max(map(len, answers))
    assert longest > 20
    assert steps < longest / 1.8 if reach(4) > 4 else steps < longest / 1.5
    assert accepted > 30


def test_the_drafter_is_synced_after_accepted_tokens():
    """After steps that accepted several tokens, drafts equal those after a prefill of the whole text."""
    decoder, texts, depth = tiny_decoder(3), prompts(4, seed=6), 4
    config = tiny_drafter_config(fc_norm=True, norm_output=True, draft_vocab_size=64)
    plain = device_batch(decoder, None, rows=4)
    plain.prefill(entries(plain, texts))
    for _ in range(20):
        plain.graphs.run(4, 0, GREEDY)
    answers = [answer_of(plain, row) for row in range(4)]
    batch = device_batch(decoder, tiny_drafter(config), rows=4)
    batch.prefill(entries(batch, texts))
    honest = batch.method.draft
    oracle_drafts(batch, answers, lambda answered: answered % 4)
    for _ in range(4):
        batch.graphs.run(4, depth, GREEDY)
    batch.method.draft = honest
    so_far = [texts[row] + answers[row][: int(batch.state.rows.answered[row])] for row in range(4)]
    batch.graphs.run(4, depth, GREEDY)
    fresh = device_batch(decoder, tiny_drafter(config), rows=4)
    fresh.prefill(entries(fresh, [text[:-1] for text in so_far]))
    fresh.graphs.run(4, depth, GREEDY)
    assert batch.state.drafts[:, :depth].tolist() == fresh.state.drafts[:, :depth].tolist()


def test_a_depth_limit_of_a_row():
    """A row whose depth limit is 0 emits one token per step while others emit more."""
    decoder, texts = tiny_decoder(3), prompts(2, seed=7)
    plain = device_batch(decoder, None, rows=2)
    plain.prefill(entries(plain, texts))
    for _ in range(20):
        plain.graphs.run(2, 0, GREEDY)
    answers = [answer_of(plain, row) for row in range(2)]
    batch = device_batch(decoder, tiny_drafter(), rows=2)
    both = entries(batch, texts)
    both[1].depth_limit = 0
    batch.prefill(both)
    oracle_drafts(batch, answers, lambda answered: 9)
    for _ in range(3):
        batch.graphs.run(2, 3, GREEDY)
    assert batch.state.rows.answered[: batch.state.dummy_row].tolist() == [1 + 3 * 4, 1 + 3]
    assert answer_of(batch, 1) == answers[1][:4]


@pytest.mark.parametrize("length", [65, 150])
def test_chunked_prefill_equals_one_pass(length, monkeypatch):
    """For the target and for the drafter."""
    monkeypatch.setattr(device_batch_module, "CHUNK_TOKENS", 64)
    decoder = tiny_decoder(3)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True))
    text = prompts(1, seed=8)[0] + [random.Random(1).randrange(128) for _ in range(length)]
    text = text[:length]
    found = []
    for chunked in (False, True):
        batch = device_batch(decoder, drafter, rows=1, max_len=length + 100)
        (entry,) = entries(batch, [text])
        if chunked:
            read = 0
            while read < length:
                assert not batch.state.rows.active.any()
                read = batch.prefill_chunk(entry, read)
        else:
            batch.prefill([entry])
        for _ in range(3):
            batch.graphs.run(1, 3, GREEDY)
        found.append((answer_of(batch, 0)[:4], batch.state.drafts[0, :3].tolist()))
    assert found[0] == found[1]
