"""The comparison of answers between different ways to serve the same requests."""

from __future__ import annotations

import pytest

from fledge.bench.identity import REFERENCE, Identity, compare_ways, first_difference
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.sampling import SamplingParams
from tests.engine.test_device_batch import prompts
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

WAYS = ["alone", "in a batch", "changing load", "prefix reuse", "chunked prefill"]


def build(capture: bool | None, seen: list[Engine]):
    decoder = tiny_decoder(12)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, fc_norm=True, norm_output=True))
    base = {"device": "cpu", "dtype": "float32", "max_model_len": 256, "kv_cache_tokens": 8192}

    def make(speculative: bool, **settings) -> Engine:
        speculation = Speculation(drafter if speculative else "none", 3)
        seen.append(build_engine(decoder, speculation, EngineConfig(**base, **settings), capture=capture))
        return seen[-1]

    return make


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured executor"])
def test_every_way_gives_the_same_answers(capture: bool | None, options: dict) -> None:
    engines: list[Engine] = []
    texts = [(text * 20)[: 5 + 20 * index] for index, text in enumerate(prompts(6, seed=2))]
    params = [SamplingParams(max_tokens=8, seed=index, ignore_eos=True, **options) for index in range(len(texts))]
    found = compare_ways(build(capture, engines), texts, params, users=4)
    assert list(found.answers) == [f"{kind}, {way}" for kind in ("plain", "speculative") for way in WAYS]
    assert len(found.pairs()) == 9
    assert found.holds, found.pairs()
    # The engines did what the names say: prefix cache hits and speculative steps.
    assert all(engine.pool.num_found for engine in (engines[1], engines[4]))
    assert all(engine.stats.steps for engine in engines[3:])


def test_differences_are_counted_and_placed() -> None:
    found = Identity({REFERENCE: [[1, 2, 3], [4, 5]], "other": [[1, 2, 9], [4, 5, 6]], "third": [[1, 2, 3], [4, 5]]})
    pairs = found.pairs()
    assert pairs["other"] == {"equal": 0, "of": 2, "first_difference": {"median": 2, "least": 2}}
    assert pairs["third"] == {"equal": 2, "of": 2}
    assert not found.holds
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1], [1, 2]) == 1
