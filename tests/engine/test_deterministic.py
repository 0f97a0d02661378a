"""`deterministic`: an answer depends on its prompt and parameters alone, bit for bit: not on the other requests in the batch,
prefill chunks, preemption or drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.executors import device_batch
from fledge.engine.executors.batch_state import GREEDY
from fledge.errors import UserError
from fledge.kernels import native
from fledge.sampling import SamplingParams
from fledge.serving import flags
from fledge.speculation.depth import TreeShape
from fledge.speculation.distribution import draw
from tests.engine.test_device_batch import entries
from tests.kernels.test_native_build import is_wanted
from tests.oracle import make_batch
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

# Scale of the head's weights: logits lie so close together that another summation order changes some answer.
SCALE = 0.06
SETTINGS = EngineConfig(
    device="cpu", dtype="float32", max_model_len=160, max_num_seqs=8, kv_cache_tokens=2048, deterministic=True
)
# "torch" computes row by row in torch; the others use the native layers with weights of this type. Without native layers
# quantised weights are refused.
PATHS = ["float16", "float32", "torch", *(["int8", "int4"] if is_wanted() else [])]
WAYS = {
    "alone": {"max_num_seqs": 1},
    "three rows": {"max_num_seqs": 3},
    "chunked prefill": {"max_batched_tokens": 7},
    "a small cache": {"kv_cache_tokens": 208, "page_size": 8},
    "no prefix cache": {"prefix_caching": False},
}


def prompts(count: int = 6, seed: int = 5) -> list[list[int]]:
    rng = random.Random(seed)
    beginning = [rng.randrange(128) for _ in range(20)]
    return [beginning[: rng.choice([0, 20])] + [rng.randrange(128) for _ in range(rng.randint(1, 40))] for _ in range(count)]


def networks():
    decoder = tiny_decoder(7)
    with torch.no_grad():
        decoder.lm_head.weight.mul_(SCALE)
    config = tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True)
    return decoder, tiny_drafter(config)


@pytest.fixture(params=PATHS)
def path(request, monkeypatch) -> Iterator[str]:
    if request.param != "torch":
        assert (native.library() is not None) == is_wanted()
    else:
        monkeypatch.setenv("FLEDGE_NATIVE", "0")
        native.library.cache_clear()
    yield request.param
    monkeypatch.undo()
    native.library.cache_clear()


def settings(path: str, **changes) -> EngineConfig:
    if path.startswith("int"):
        return replace(SETTINGS, quantization=path, **changes)
    return replace(SETTINGS, dtype="float32" if path == "torch" else path, **changes)


def answers(config: EngineConfig, texts, params: SamplingParams, speculation: str = "none") -> list[tuple]:
    """Tokens and unrounded log-probabilities of the most likely ones."""
    decoder, drafter = networks()
    asked = Speculation(drafter if speculation == "eagle" else speculation, 3).fixed_depth()
    engine = build_engine(decoder, asked, config)
    requests = [engine.add_request(text, params) for text in texts]
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    return [(tuple(request.answer), tuple(map(tuple, (one.top for one in request.logprobs)))) for request in requests]


GREEDY_PARAMS = SamplingParams(max_tokens=16, temperature=0, logprobs=3)
SAMPLED = SamplingParams(max_tokens=16, temperature=1.0, top_p=0.9, seed=3, logprobs=3)


@pytest.mark.parametrize("params", [GREEDY_PARAMS, SAMPLED], ids=["greedy", "sampled"])
def test_answers_do_not_depend_on_the_batch(path, params):
    texts = prompts()
    wanted = answers(settings(path), texts, params)
    assert len({answer for answer, _ in wanted}) == len(texts)
    for name, changes in WAYS.items():
        assert answers(settings(path, **changes), texts, params) == wanted, name
    assert answers(settings(path), texts[::-1], params)[::-1] == wanted


@pytest.mark.parametrize("params", [GREEDY_PARAMS, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("speculation", ["eagle", "ngram"])
def test_answers_do_not_depend_on_speculation(path, params, speculation):
    texts = prompts()
    wanted = answers(settings(path), texts, params)
    for changes in ({}, {"max_num_seqs": 2}, {"max_batched_tokens": 9}):
        assert answers(settings(path, **changes), texts, params, speculation) == wanted


def keys_of(batch, row: int, length: int) -> torch.Tensor:
    size, place = batch.config.page_size, torch.arange(length)
    slot = batch.state.page_table[row].long()[place // size] * size + place % size
    return batch.cache.keys[:, :, slot].clone()


@pytest.mark.parametrize("prefilling", ["in one pass", "in chunks", "after a cached prefix"])
@pytest.mark.parametrize(("rows", "depth"), [(6, 0), (1, 0), (6, 3)])
def test_cached_keys_do_not_depend_on_prefill_or_drafts(prefilling, rows, depth, monkeypatch):
    """With the kernels' references: however prompts are prefilled, with or without drafts, the cache holds the same bits."""
    monkeypatch.setattr(device_batch, "CHUNK_TOKENS", 8)
    decoder, drafter = networks()
    texts = [text for text in prompts(8) if len(text) > 17][:6]
    config = replace(SETTINGS, dtype="float32").resolve(decoder.config)
    wanted = reference_keys(decoder, config, texts)
    for first in range(0, len(texts), rows):
        batch = make_batch(decoder, config, drafter=drafter if depth else None, capture=False)
        some = entries(batch, texts[first : first + rows], limit=16)
        if prefilling != "in chunks":
            batch.prefill(some)
        if prefilling == "after a cached prefix":
            batch.prefill([replace(entry, num_cached=16) for entry in some])
        if prefilling == "in chunks":
            for entry in some:
                read = 0
                while read < len(entry.text):
                    read = batch.prefill_chunk(entry, read)
        for _ in range(10):
            batch.step(len(some), depth, GREEDY)
        for row, keys in enumerate(wanted[first : first + rows]):
            assert torch.equal(keys_of(batch, row, keys.shape[2]), keys)


def reference_keys(decoder, config: EngineConfig, texts) -> list[torch.Tensor]:
    """The keys of each text and of ten tokens of its answer, computed one text at a time."""
    found = []
    for text in texts:
        batch = make_batch(decoder, config, capture=False)
        batch.prefill(entries(batch, [text], limit=16))
        for _ in range(10):
            batch.step(1, 0, GREEDY)
        found.append(keys_of(batch, 0, len(text) + 10))
    return found


def test_random_numbers_by_position_follow_the_distribution():
    params, count = SamplingParams(temperature=1.0, seed=4), 1000
    probabilities = torch.tensor([0.6, 0.3, 0.1])
    drawn = [draw(probabilities.log(), params, 4, position) for position in range(count)]
    for token, wanted in enumerate(probabilities.tolist()):
        assert abs(drawn.count(token) / count - wanted) < 4 * (wanted * (1 - wanted) / count) ** 0.5


def test_trees_are_refused():
    decoder, drafter = networks()
    with pytest.raises(UserError, match="excludes draft trees"):
        build_engine(decoder, Speculation(drafter, 3, TreeShape(2, 4)), SETTINGS)


def test_the_flag_of_serve():
    assert flags.parse(["--deterministic"]).engine_config.deterministic
    assert not flags.parse([]).engine_config.deterministic
