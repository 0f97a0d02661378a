"""Looks at captured cycles see what the live probe sees of the same requests in the eager engine, and change nothing."""

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
ON_CARD = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CARD)]


def engines(decoder, drafter, device="cpu") -> tuple[Engine, Engine]:
    """The eager engine and one that runs captured rows."""
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "kv_cache_tokens": 4096, "page_size": 64, "prefix_caching": False}
    config = EngineConfig(device=device, dtype="float32", **sizes)
    other, speculation = deepcopy(decoder).to(device), Speculation(deepcopy(drafter).to(device), DEPTH, adaptive=False)
    eager = build_engine(decoder.cpu(), Speculation(drafter.cpu(), DEPTH, adaptive=False), replace(config, device="cpu"))
    return eager, build_engine(other, speculation, config, capture=None if device == "cuda" else False)


def heard_of(engine, probe, prompts) -> tuple[list, list]:
    heard, tell = [], probe.listener
    probe.listener = lambda sequence, figures: (heard.append((sequence, figures)), tell and tell(sequence, figures))
    requests = [engine.add_request(prompt, GREEDY) for prompt in prompts]
    while engine.has_unfinished():
        engine.step()
    return requests, heard


def is_same(seen: dict, known: dict) -> bool:
    """As far as both go; the room at an answer's end is the eager engine's business."""
    for name in NAMES:
        first, steps = 0 if name == "rms" else 1, min(len(known[name]), len(seen[name]))
        assert seen[name][:first] == [None] * first
        if seen[name][first:steps] != pytest.approx(known[name][first:steps], rel=1e-3, abs=1e-4):
            return False
    return True


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("flags", VARIANTS, ids=str)
@pytest.mark.parametrize("cycles", [1, 3])
def test_a_look_sees_what_the_live_probe_sees(flags, device, cycles, monkeypatch):
    decoder, drafter = pair(**flags)
    eager, captured = engines(decoder, drafter, device)
    monkeypatch.setattr(LaunchAhead, "cycles", property(lambda _: cycles, lambda *_: None), raising=False)
    (one,), wanted = heard_of(eager, LiveProbe(eager.drafter, every=1, sink=1), PROMPTS[:1])
    probe = LiveProbe(captured.drafter, every=1, sink=1)
    RowProbe(captured.executor, probe, every=1)
    (other,), found = heard_of(captured, probe, PROMPTS[:1])
    assert one.tokens == other.tokens
    assert len(found) > 2
    left = iter(wanted)  # not all: one look a launch, and the last ones end with the request or are late
    for _, seen in found:
        assert any(is_same(seen, known) for _, known in left), (
            "no draft of the eager engine looked like this, or not in this order"
        )
    assert probe.snapshot()["sink_share"][0] is None


@pytest.mark.parametrize("device", DEVICES)
def test_looking_changes_nothing(device):
    decoder, drafter = pair(fc_norm=True, norm_output=True)
    _, unwatched = engines(deepcopy(decoder), deepcopy(drafter), device)
    plain = [unwatched.add_request(prompt, GREEDY) for prompt in PROMPTS]
    while unwatched.has_unfinished():
        unwatched.step()
    _, watched = engines(decoder, drafter, device)
    requests, heard = heard_of(watched, watch_drafts(watched, every=1, sink=1), PROMPTS)
    watched.check_integrity()
    assert [one.tokens for one in requests] == [one.tokens for one in plain]
    assert [one.stats for one in requests] == [one.stats for one in plain]
    assert {sequence for sequence, _ in heard} == set(requests)  # each has its turn
    guard = watched.controller.guard
    assert sum(band.probes for band in guard.bands["sink_share"]) == sum(len(figures["rms"]) - 1 for _, figures in heard)


def test_only_every_so_many_launches_and_nothing_of_rows_that_have_left():
    decoder, drafter = pair()
    _, engine = engines(decoder, drafter)
    probe = watch_drafts(engine, every=3, sink=1)
    engine.add_request(PROMPTS[0], GREEDY)
    while engine.has_unfinished():
        engine.step()
    row_probe = engine.executor.before_drafts
    assert 0 < probe.num_sampled <= row_probe.seen // 3
    num_sampled = probe.num_sampled
    gone = engine.add_request(PROMPTS[0], GREEDY)
    engine.step()
    row_probe.seen = 2
    row_probe({0: gone}, DEPTH)
    assert probe.num_sampled == num_sampled + 1
    engine.executor.batch.state.rows.active.zero_()  # it has ended on the device, which the host does not know yet
    row_probe.seen = 2
    row_probe({0: gone}, DEPTH)
    assert probe.num_sampled == num_sampled + 1


def test_rows_with_very_many_keys_are_not_looked_at(monkeypatch):
    _, engine = engines(*pair())
    probe = watch_drafts(engine, every=1, sink=1)
    for most_keys, looks in ((63, False), (64, True)):  # a row has a page of 64
        monkeypatch.setattr(live, "MOST_KEYS", most_keys)
        probe.reset()
        engine.add_request(PROMPTS[0], GREEDY)
        while engine.has_unfinished():
            engine.step()
        assert bool(probe.num_sampled) == looks


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_look_never_waits_for_the_device():
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
