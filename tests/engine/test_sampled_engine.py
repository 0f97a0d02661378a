"""Sampling in the whole engine: speculative samples of a tiny target follow its exact distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare

from fledge.engine.build import Speculation, build_engine
from fledge.models.decoder import causal_attend
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from fledge.speculation.distribution import adjust
from tests.oracle import CPU, engine_with, probabilities, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

SHAPE = {"vocab_size": 12, "num_layers": 2, "hidden_size": 16}
PROMPT = [1, 5, 3]
RUNS = 3000


def exact(decoder, params: SamplingParams, answer: list[int]) -> torch.Tensor:
    tokens = torch.tensor(PROMPT + answer)
    hidden, _ = decoder(tokens, torch.arange(len(tokens)), causal_attend())
    return probabilities(adjust(decoder.logits(hidden[-1]), params, PROMPT, answer), params)


@pytest.mark.parametrize("tree", [None, TreeShape(3, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 1.0}, {"temperature": 1.3, "top_p": 0.9, "frequency_penalty": 1.0}], ids=["plain", "adjusted"]
)
def test_engine_samples_the_targets_distribution(tree, settings):
    decoder = tiny_decoder(2, **SHAPE)
    with torch.no_grad():  # flatter logits, so that many continuations are possible
        decoder.lm_head.weight.mul_(0.4)
    config = tiny_drafter_config(decoder.config, aux_layer_ids=(0, 1, 2), fc_norm=True, norm_output=True)
    engine = engine_with(decoder, Speculation(tiny_drafter(config), 2, tree), CPU)
    requests = [engine.add_request(PROMPT, SamplingParams(max_tokens=3, seed=seed, **settings)) for seed in range(RUNS)]
    while engine.has_unfinished():
        engine.step()
    assert engine.stats.accepted > 100
    params = SamplingParams(max_tokens=3, **settings)
    counts: dict[tuple[int, ...], int] = {}
    for request in requests:
        pair = tuple(request.answer[1:3])  # the first token comes from prefill, without a draft
        counts[(request.answer[0], *pair)] = counts.get((request.answer[0], *pair), 0) + 1
    expected: dict[tuple[int, ...], float] = {}
    first = exact(decoder, params, [])
    for a in range(12):
        if first[a] * RUNS < 5:
            continue
        second = exact(decoder, params, [a])
        for b in range(12):
            if first[a] * second[b] * RUNS < 5:
                continue
            third = exact(decoder, params, [a, b])
            for c in range(12):
                if (p := float(first[a] * second[b] * third[c])) * RUNS >= 8:
                    expected[(a, b, c)] = p
    observed = [counts.get(key, 0) for key in expected]
    pooled_p, pooled_count = 1 - sum(expected.values()), RUNS - sum(observed)
    statistic = chisquare([*observed, pooled_count], [*(p * RUNS for p in expected.values()), pooled_p * RUNS])
    assert len(expected) > 20
    assert statistic.pvalue > 1e-3


def test_a_seeded_answer_does_not_depend_on_concurrent_requests():
    decoder = tiny_decoder(2)
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=11)
    drafter = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True))
    alone = engine_with(decoder, Speculation(drafter, 3))
    request = alone.add_request(PROMPT, params)
    while alone.has_unfinished():
        alone.step()
    loaded = engine_with(decoder, Speculation(drafter, 3))
    others = [loaded.add_request([index, 7], SamplingParams(max_tokens=9, seed=index)) for index in range(5)]
    again = loaded.add_request(PROMPT, params)
    while loaded.has_unfinished():
        loaded.step()
    assert again.answer == request.answer
    assert len({tuple(other.answer) for other in others}) > 1


@pytest.mark.parametrize("capture", [None, False], ids=["eager", "captured"])
@pytest.mark.parametrize("huge", [2**32 + 1, 10**30])
def test_limits_above_int32_mean_no_limit(huge, capture):
    usual = SamplingParams(max_tokens=12, temperature=1.0, seed=5)
    for params, equivalent in (
        (replace(usual, top_k=huge), usual),
        (replace(usual, max_tokens=huge, min_tokens=huge), replace(usual, max_tokens=1000, min_tokens=1000)),
    ):
        engines = [
            build_engine(tiny_decoder(), Speculation(None), replace(CPU, max_model_len=32), capture=capture) for _ in range(2)
        ]
        answers = [run(engine, [PROMPT], one) for engine, one in zip(engines, (params, equivalent), strict=True)]
        assert answers[0] == answers[1]
        assert answers[0][0]


def test_any_number_of_stop_ids_ends_an_answer():
    """A row's state on the device holds 16 stop tokens; more are stored in a bitmap."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=3, stop_token_ids=range(0, 128, 5), ignore_eos=True)
    texts = [[number, 7] for number in range(6)]
    answers = [
        run(build_engine(tiny_decoder(), Speculation(None), CPU, capture=capture), texts, params) for capture in (None, False)
    ]
    assert answers[0] == answers[1]
    assert all(answer[-1] % 5 == 0 and len(answer) < 60 for answer in answers[0])
