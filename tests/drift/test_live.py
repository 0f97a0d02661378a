"""The live probe sees what the rollout over the finished text sees, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from fledge.drift.live import LiveProbe, coverage, watch_drafts
from fledge.drift.probes import ATTENTION
from fledge.drift.rollout import TargetText, roll_out
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.drift.test_probes import decoder_with_sink
from tests.drift.test_rollout import NEW_TOKENS, PROMPTS, VARIANTS, pair
from tests.tiny import tiny_drafter, tiny_drafter_config

DEPTH = 4


def serve(decoder, drafter, every, tree=None):
    # In fp32: a packed drafter rounds activations to 8 bits, which makes other roundings visible.
    engine = build_engine(decoder, Speculation(drafter, DEPTH, tree).fixed_depth(), EngineConfig(dtype="float32"))
    probe = LiveProbe(engine.drafter, every=every, sink=1) if every else None
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    return requests, probe


def drafted_from(matched):
    """Rows at which a speculative run drafts."""
    at, rows = 0, []
    while at < len(matched):
        rows.append(at)
        at += min(matched[at], DEPTH) + 1
    return rows


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_live_figures_are_those_of_the_rollout(flags):
    decoder, drafter = pair(**flags)
    requests, probe = serve(decoder, drafter, every=1)
    seen = {"rms": [], "sink_share": [], "own_share": [], "entropy": []}
    for request in requests:
        text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
        rollout = roll_out(drafter, text, DEPTH, sink=1)
        rows = drafted_from(rollout.matched_M)
        seen["rms"].append(rollout.rms_MJ[rows])
        for name, figure in (("sink_share", "sink"), ("own_share", "own"), ("entropy", "entropy")):
            at = ATTENTION.index(figure)
            seen[name].append(torch.stack([one[..., at].mean(1)[rows] for one in rollout.attention], 1))
    live = probe.snapshot()
    assert live["drafts"] == sum(len(part) for part in seen["rms"])
    for name, parts in seen.items():
        assert live[name] == pytest.approx(torch.cat(parts).mean(0).tolist(), rel=1e-3, abs=1e-4), name


def test_looking_changes_nothing():
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    unwatched, _ = serve(decoder, drafter, every=0)
    for every in (1, 3):
        watched, probe = serve(decoder, drafter, every)
        assert [one.tokens for one in watched] == [one.tokens for one in unwatched]
        assert [one.stats for one in watched] == [one.stats for one in unwatched]
        assert probe.num_sampled > 0
    assert probe.num_sampled < sum(one.stats.steps for one in watched) / 2


def test_trees_are_left_alone_and_detaching_ends_it():
    decoder, drafter = pair()
    _, probe = serve(decoder, drafter, every=1, tree=TreeShape(2, 6))
    assert probe.snapshot() == {"drafts": 0, "rms": [], "sink_share": [], "own_share": [], "entropy": []}
    probe.detach()
    assert probe.speculator.step.__self__ is probe.speculator


def test_a_listener_hears_of_each_sequence_apart_and_the_engines_guard_is_one():
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    engine = build_engine(decoder, Speculation(drafter, DEPTH, adaptive=False))
    probe = watch_drafts(engine, every=1)
    heard, tell = [], probe.listener
    probe.listener = lambda sequence, figures: (heard.append((sequence, figures)), tell(sequence, figures))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    assert {sequence for sequence, _ in heard} == set(requests)
    assert len(heard) == probe.num_sampled
    means = probe.snapshot()
    for name in ("rms", "sink_share", "own_share", "entropy"):
        for step in range(DEPTH):
            values = [figures[name][step] for _, figures in heard if len(figures[name]) > step]
            assert sum(values) / len(values) == pytest.approx(means[name][step])
    bands = engine.controller.guard.bands
    assert [band.probes for band in bands["rms"]] == [band.probes for band in bands["sink_share"]] == probe.counts["rms"]
    assert watch_drafts(build_engine(decoder, Speculation("ngram", 3))) is None


def test_the_sink_is_the_targets_own_unless_it_is_given():
    decoder = decoder_with_sink(pivot=77)

    class Spaced:
        has_chat_template = False

        def encode(self, text):
            return [5, 9, 12, 77, *(ord(letter) % 60 for letter in text)]

    engine = build_engine(decoder, Speculation(tiny_drafter(tiny_drafter_config(decoder.config)), DEPTH))
    assert watch_drafts(engine).sink == 0  # nothing to ask the target with
    engine.tokenizer = Spaced()
    assert watch_drafts(engine).sink == 3
    assert watch_drafts(engine, sink=1).sink == 1


def test_the_log_says_which_drafts_are_looked_at():
    engine = build_engine(*fixed_depth_pair())
    probe = watch_drafts(engine, every=64)
    assert coverage(engine, probe) == "drift probe: one draft in 64, sink at column 0"
    plain = EngineConfig(dtype="float32", max_model_len=128, kv_cache_tokens=2048)
    device = build_engine(*fixed_depth_pair(), plain, capture=False)
    assert "one row every 512 launches" in coverage(device, watch_drafts(device))
    assert "one row every 7 launches" in coverage(device, watch_drafts(device, every=7))
    probe.speculator.tree = TreeShape(2, 6)
    assert "not the trees drafted here" in coverage(engine, probe)


def fixed_depth_pair():
    decoder, drafter = pair()
    return decoder, Speculation(drafter, DEPTH).fixed_depth()
