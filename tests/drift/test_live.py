"""The live probe measures what a rollout over the finished text measures, and does not change answers."""

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
    # In fp32: a packed drafter rounds activations to 8 bits, which makes other rounding differences visible.
    engine = build_engine(decoder, Speculation(drafter, DEPTH, tree).fixed_depth(), EngineConfig(dtype="float32"))
    probe = LiveProbe(engine.drafter, every=every, sink=1) if every else None
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    return requests, probe


def drafted_from(matched):
    """The rows at which a speculative run drafts."""
    at, rows = 0, []
    while at < len(matched):
        rows.append(at)
        at += min(matched[at], DEPTH) + 1
    return rows


@pytest.mark.parametrize("flags", VARIANTS, ids=str)
def test_live_figures_equal_the_rollouts(flags):
    decoder, drafter = pair(**flags)
    requests, probe = serve(decoder, drafter, every=1)
    wanted = {"rms": [], "sink_share": [], "own_share": [], "entropy": []}
    for request in requests:
        text = TargetText.of(decoder, request.tokens, len(request.prompt), drafter.config.aux_layer_ids)
        rollout = roll_out(drafter, text, DEPTH, sink=1)
        rows = drafted_from(rollout.matched_M)
        wanted["rms"].append(rollout.rms_MJ[rows])
        for name, figure in (("sink_share", "sink"), ("own_share", "own"), ("entropy", "entropy")):
            at = ATTENTION.index(figure)
            wanted[name].append(torch.stack([one[..., at].mean(1)[rows] for one in rollout.attention], 1))
    live = probe.snapshot()
    assert live["drafts"] == sum(len(part) for part in wanted["rms"])
    for name, parts in wanted.items():
        assert live[name] == pytest.approx(torch.cat(parts).mean(0).tolist(), rel=1e-3, abs=1e-4), name


def test_probing_does_not_change_answers():
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    unwatched, _ = serve(decoder, drafter, every=0)
    for every in (1, 3):
        watched, probe = serve(decoder, drafter, every)
        assert [one.tokens for one in watched] == [one.tokens for one in unwatched]
        assert [one.stats for one in watched] == [one.stats for one in unwatched]
        assert probe.num_sampled > 0
    assert probe.num_sampled < sum(one.stats.steps for one in watched) / 2


def test_trees_are_not_probed_and_detach_ends_probing():
    decoder, drafter = pair()
    _, probe = serve(decoder, drafter, every=1, tree=TreeShape(2, 6))
    assert probe.snapshot() == {"drafts": 0, "rms": [], "sink_share": [], "own_share": [], "entropy": []}
    probe.detach()
    assert probe.speculator.step.__self__ is probe.speculator


def test_the_listener_gets_figures_by_request_and_the_guard_listens():
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    engine = build_engine(decoder, Speculation(drafter, DEPTH, adaptive=False))
    probe = watch_drafts(engine, every=1)
    calls, listener = [], probe.listener
    probe.listener = lambda sequence, figures: (calls.append((sequence, figures)), listener(sequence, figures))
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.add_request(prompt, params) for prompt in PROMPTS]
    while engine.has_unfinished():
        engine.step()
    assert {sequence for sequence, _ in calls} == set(requests)
    assert len(calls) == probe.num_sampled
    means = probe.snapshot()
    for name in ("rms", "sink_share", "own_share", "entropy"):
        for step in range(DEPTH):
            values = [figures[name][step] for _, figures in calls if len(figures[name]) > step]
            assert sum(values) / len(values) == pytest.approx(means[name][step])
    bands = engine.controller.guard.bands
    assert [band.probes for band in bands["rms"]] == [band.probes for band in bands["sink_share"]] == probe.counts["rms"]
    assert watch_drafts(build_engine(decoder, Speculation("ngram", 3))) is None


def test_the_sink_is_found_in_the_target_unless_given():
    decoder = decoder_with_sink(pivot=77)

    class Spaced:
        has_chat_template = False

        def encode(self, text):
            return [5, 9, 12, 77, *(ord(letter) % 60 for letter in text)]

    engine = build_engine(decoder, Speculation(tiny_drafter(tiny_drafter_config(decoder.config)), DEPTH))
    assert watch_drafts(engine).sink == 0  # no tokenizer to make texts for the target
    engine.tokenizer = Spaced()
    assert watch_drafts(engine).sink == 3
    assert watch_drafts(engine, sink=1).sink == 1


def test_the_log_message_names_the_probed_drafts():
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
