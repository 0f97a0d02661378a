"""The probe of captured cycles measures what the live probe measures in the eager engine, and does not change answers."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from fledge.drift import live
from fledge.drift.live import NAMES, LiveProbe, RowProbe, watch_drafts
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.output_reader import LaunchAhead
from fledge.sampling import SamplingParams
from tests.drift.test_rollout import NEW_TOKENS, PROMPTS, VARIANTS, pair

DEPTH = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_GPU)]


def engines(decoder, drafter, device="cpu") -> tuple[Engine, Engine]:
    """An eager and a captured engine with the same networks."""
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_tokens": 4096, "page_size": 64, "prefix_caching": False}
    config = EngineConfig(device=device, dtype="float32", **sizes)
    other, speculation = deepcopy(decoder).to(device), Speculation(deepcopy(drafter).to(device), DEPTH, adaptive=False)
    eager = build_engine(decoder.cpu(), Speculation(drafter.cpu(), DEPTH, adaptive=False), replace(config, device="cpu"))
    return eager, build_engine(other, speculation, config, capture=None if device == "cuda" else False)


def probed(engine, probe, prompts) -> tuple[list, list]:
    calls, listener = [], probe.listener
    probe.listener = lambda sequence, figures: (calls.append((sequence, figures)), listener and listener(sequence, figures))
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
    return requests, calls


def is_same(seen: dict, known: dict) -> bool:
    """Compares the steps that both have: at an answer's end the eager engine drafts fewer tokens."""
    for name in NAMES:
        first, steps = 0 if name == "rms" else 1, min(len(known[name]), len(seen[name]))
        assert seen[name][:first] == [None] * first
        if seen[name][first:steps] != pytest.approx(known[name][first:steps], rel=1e-3, abs=1e-4):
            return False
    return True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", VARIANTS, ids=str)
@pytest.mark.parametrize("cycles", [1, 3])
def test_samples_equal_the_live_probes(flags, device, cycles, monkeypatch):
    decoder, drafter = pair(**flags)
    eager, captured = engines(decoder, drafter, device)
    monkeypatch.setattr(LaunchAhead, "cycles", property(lambda _: cycles, lambda *_: None), raising=False)
    (one,), wanted = probed(eager, LiveProbe(eager.drafter, every=1, sink=1), PROMPTS[:1])
    probe = LiveProbe(captured.drafter, every=1, sink=1)
    RowProbe(captured.executor, probe, every=1)
    (other,), found = probed(captured, probe, PROMPTS[:1])
    assert one.tokens == other.tokens
    assert len(found) > 2
    left = iter(wanted)  # only some are sampled: one per launch, and the last ones come too late
    for _, seen in found:
        assert any(is_same(seen, known) for _, known in left), "no draft of the eager engine, in this order, has these figures"
    assert probe.snapshot()["sink_share"][0] is None


@pytest.mark.parametrize("device", DEVICES)
def test_probing_does_not_change_answers(device):
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    _, unwatched = engines(deepcopy(decoder), deepcopy(drafter), device)
    plain = [unwatched.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while unwatched.has_unfinished():
        unwatched.step()
    _, watched = engines(decoder, drafter, device)
    requests, calls = probed(watched, watch_drafts(watched, every=1, sink=1), PROMPTS)
    watched.check_integrity()
    assert [one.tokens for one in requests] == [one.tokens for one in plain]
    assert [one.stats for one in requests] == [one.stats for one in plain]
    assert {sequence for sequence, _ in calls} == set(requests)  # every request is probed
    guard = watched.controller.guard
    assert sum(band.probes for band in guard.bands["sink_share"]) == sum(len(figures["rms"]) - 1 for _, figures in calls)


def test_every_nth_launch_is_probed_and_finished_rows_are_not():
    decoder, drafter = pair()
    _, engine = engines(decoder, drafter)
    probe = watch_drafts(engine, every=3, sink=1)
    engine.add_request(PROMPTS[0], GREEDY)
    while engine.has_unfinished():
        engine.step()
    row_probe = engine.executor.before_drafts
    assert 0 < probe.num_sampled <= row_probe.seen // 3
    num_sampled = probe.num_sampled
    finished = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    row_probe.seen = 2
    row_probe({0: finished}, DEPTH)
    assert probe.num_sampled == num_sampled + 1
    engine.executor.batch.state.rows.active.zero_()  # finished on the device, which the host does not know yet
    row_probe.seen = 2
    row_probe({0: finished}, DEPTH)
    assert probe.num_sampled == num_sampled + 1


def test_rows_with_too_many_keys_are_not_probed(monkeypatch):
    _, engine = engines(*pair())
    probe = watch_drafts(engine, every=1, sink=1)
    for most_keys, is_probed in ((63, False), (64, True)):  # a row has a page of 64
        monkeypatch.setattr(live, "MOST_KEYS", most_keys)
        probe.reset()
        engine.add_request(PROMPTS[0], GREEDY)
        while engine.has_unfinished():
            engine.step()
        assert bool(probe.num_sampled) == is_probed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_sample_does_not_synchronise():
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    _, engine = engines(decoder, drafter, "cuda")
    watch_drafts(engine, every=1, sink=1)
    request = engine.add_request(PROMPTS[0], GREEDY)
    for _ in range(4):
        engine.step()
    row = engine.executor.row_of[request]
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.executor.before_drafts.sample(row, DEPTH, 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
