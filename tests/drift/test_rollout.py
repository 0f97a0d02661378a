"""The rollout of one text against the serving engine's own count, and against training's rollout over packed texts."""

from __future__ import annotations

import pytest
import torch

from fledge.drift.acceptance import walk
from fledge.drift.rollout import TargetText, roll_out
from fledge.drift.tally import Tally
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from fledge.training.attention import document_starts
from fledge.training.evaluate import acceptance as training_acceptance
from fledge.training.rollout import roll_out as packed_roll_out
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

VOCABULARY = 5  # so small that a random drafter is right now and then
PROMPTS = [[1, 4, 2, 3], [1, 2, 3, 4, 0, 1, 2], [0, 3, 2], [4, 1]]
NEW_TOKENS = 24
VARIANTS = [
    {},
    {"fc_norm": True, "norm_output": True},
    {"norm_output": True, "window": 12, "draft_vocab_size": 4},
    {"fc_norm": True, "norm_output": True, "num_layers": 2},
]


def pair(**flags):
    decoder = tiny_decoder(max_positions=2048, vocab_size=VOCABULARY)
    drafter = tiny_drafter(tiny_drafter_config(decoder.config, **flags))
    return decoder, drafter.share(decoder.embed_tokens, decoder.lm_head)


def served(decoder, drafter, depth):
    engine = build_engine(decoder, Speculation(drafter, depth), EngineConfig(dtype="float32"))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    return requests


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_counts_what_the_engine_counts(flags):
    decoder, drafter = pair(**flags)
    accepted = 0
    for depth in (2, 5):
        for request in served(decoder, drafter, depth):
            text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
            stats = walk(roll_out(drafter, text, 5, probe=False).matched_M, depth)
            assert (stats.accepted, stats.steps) == (request.stats.accepted, request.stats.steps)
            accepted += stats.accepted
    assert accepted >= 5


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_probes_are_those_of_training(flags):
    decoder, drafter = pair(**flags)
    tokens = served(decoder, drafter, 3)[1].tokens
    text = TargetText.of(decoder, tokens, len(PROMPTS[1]), drafter.config.aux_layer_ids)
    ours = roll_out(drafter, text, 6, sink=1)
    positions = torch.arange(len(tokens))[None]
    start = document_starts(torch.ones(1, len(tokens)))
    theirs = packed_roll_out(drafter, text.taps, text.tokens_T[None], positions, start, text.rows_M, 6, sink_column=1)
    assert ours.drafted_MJ.tolist() == theirs.drafted_MJ.tolist()
    torch.testing.assert_close(ours.rms_MJ, theirs.rms_MJ, rtol=1e-4, atol=1e-4)
    own = torch.stack([figures.own_MH.mean(1) for figures in ours.attention], 1)
    torch.testing.assert_close(own, theirs.own_MJ, rtol=1e-3, atol=1e-4)
    if not flags.get("window"):  # packed rows count a sink outside the window as if it were visible
        sink = torch.stack([figures.sink_MH.mean(1) for figures in ours.attention], 1)
        torch.testing.assert_close(sink, theirs.sink_MJ, rtol=1e-3, atol=1e-4)


def test_a_tally_gives_what_training_reports():
    decoder, drafter = pair(fc_norm=True)
    requests = served(decoder, drafter, 3)
    texts, starts = [one.tokens for one in requests], [len(one.prompt) for one in requests]
    expected = training_acceptance(drafter, decoder, texts, starts, depths=(2, 5))
    tally = Tally((2, 5))
    for tokens, start in zip(texts, starts, strict=True):
        whole = TargetText.of(decoder, tokens, start, drafter.config.aux_layer_ids)
        tally.add(roll_out(drafter, TargetText(whole.tokens_T, start, whole.taps), 5), looping=False)
    figures = tally.to_dict()
    assert figures["acceptance_length"] == pytest.approx(expected["acceptance_length"])
    for name in ("accuracy", "rms", "sink_share", "own_share"):
        assert figures[name] == pytest.approx(expected[name], rel=1e-3), name


def test_pieces_of_rows_make_no_difference(monkeypatch):
    decoder, drafter = pair()
    request = served(decoder, drafter, 3)[0]
    text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
    whole = roll_out(drafter, text, 4)
    monkeypatch.setattr("fledge.drift.rollout.PROBABILITIES_AT_ONCE", 500)
    pieces = roll_out(drafter, text, 4)
    assert whole.drafted_MJ.tolist() == pieces.drafted_MJ.tolist()
    for one, other in zip(whole.attention, pieces.attention, strict=True):
        torch.testing.assert_close(one.entropy_MH, other.entropy_MH)


def test_walk_counts_positions():
    #              row: 0  1  2  3  4  5
    stats = walk([2, 9, 9, 0, 1, 0], depth=5)  # accepts 2, then 0, then 1
    assert (stats.accepted, stats.steps, stats.emitted) == (3, 3, 6)
    assert stats.accepted_at == [2, 1, 0, 0, 0]
