"""Acceptance from one rollout against the serving engine's own count."""

from __future__ import annotations

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from fledge.training.evaluate import acceptance
from fledge.training.targets.continuations import continuations
from tests.drift.test_probes import decoder_with_sink
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

PROMPTS = [[5, 9, 77, 3], [1, 2, 3, 4, 5, 6, 7], [100, 50, 20], [64, 8], [11, 12, 13, 14, 15]]
NEW_TOKENS = 24


def good_drafter(decoder, **flags):
    """A drafter that agrees with the target now and then: its head is the target's."""
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, **flags))
    drafter.fc.weight.copy_(torch.eye(32).repeat(1, 3) / 3)
    drafter.lm_head.weight.copy_(decoder.lm_head.weight[drafter.target_ids(torch.arange(drafter.config.draft_vocab_size))])
    return drafter.share(decoder.embed_tokens, decoder.lm_head)


@pytest.mark.parametrize(
    "flags", [{}, {"fc_norm": True, "norm_output": True}, {"norm_output": True, "window": 12, "draft_vocab_size": 100}], ids=str
)
def test_equals_what_the_engine_counts(flags):
    decoder = tiny_decoder(max_positions=2048)
    drafter = good_drafter(decoder, **flags)
    answers = continuations(decoder, PROMPTS, NEW_TOKENS, stop_ids=[])
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    figures = acceptance(drafter, decoder, texts, [len(prompt) for prompt in PROMPTS], depths=(2, 4))
    for depth in (2, 4):
        engine = build_engine(decoder, Speculation(drafter, depth).fixed_depth(), EngineConfig(dtype="float32"))
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
        while engine.has_unfinished():
            engine.step()
        for request, answer, text in zip(requests, answers, figures["texts"], strict=True):
            assert request.answer == answer
            assert (request.stats.accepted, request.stats.steps) == (text[depth]["accepted"], text[depth]["steps"])
        assert figures["acceptance_length"][depth] == pytest.approx(engine.stats.acceptance_length)
    assert len(figures["accuracy"]) == len(figures["rms"]) == 4


def test_continuations_stop_at_the_stop_token():
    decoder = tiny_decoder()
    free = continuations(decoder, PROMPTS[:2], 10, stop_ids=[])
    stop = free[0][4]
    stopped = continuations(decoder, PROMPTS[:2], 10, stop_ids=[stop])
    assert stopped[0] == free[0][: free[0].index(stop) + 1]


def test_the_sink_is_the_targets_own_unless_it_is_given():
    decoder = decoder_with_sink(pivot=77)
    drafter = good_drafter(decoder)
    drafter.layers[0].self_attn.qkv_proj.weight.normal_()
    texts = [[5, 9, 77, *range(10, 40)], [7, 8, 77, *range(40, 75)]]
    shares = {column: acceptance(drafter, decoder, texts, [4, 4], (2,), column)["sink_share"] for column in (None, 0, 2)}
    assert shares[None] == shares[2]
    assert shares[None] != shares[0]
