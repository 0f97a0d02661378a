"""Metrics that the tiny server does not have: those of the drift probe and the drift guard, and the log line."""

from __future__ import annotations

import time

from fledge.drift.live import LiveProbe
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.sampling import SamplingParams
from fledge.serving.metrics import DRIFT, Metrics
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config


def test_the_drift_probe_is_exported_by_step_and_the_log_line_has_rates() -> None:
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=2, kv_cache_tokens=512, threads=1)
    engine = build_engine(tiny_decoder(), Speculation(tiny_drafter(), 3).fixed_depth(), config)
    metrics = Metrics("tiny")
    metrics.engine = engine
    metrics.probe = LiveProbe(engine.drafter, every=2)
    before = metrics._snapshot()
    request = engine.add_request([1, 2, 3, 4], SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
    while not request.finished:
        for delta in engine.step():
            if delta.request.num_answer == len(delta.tokens):
                metrics.began(delta.request, time.perf_counter())
            metrics.progressed(len(delta.tokens), {0.01: 1})
    metrics.finished(request, request.arrival)
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line[0] != "#")
    assert float(lines['fledge:drift_drafts_probed_total{engine="0",model_name="tiny"}']) == metrics.probe.num_sampled > 0
    for name in DRIFT:
        values = [float(lines[f'fledge:drift_{name}{{engine="0",model_name="tiny",step="{step}"}}']) for step in range(3)]
        assert values == metrics.probe.snapshot()[name]
    line = metrics._line(before, metrics._snapshot(), 2.0)
    assert "prompt 2.0 tokens/s, generation 12.0 tokens/s" in line
    assert f"acceptance length {engine.stats.acceptance_length:.2f}" in line
    assert len(line.split("by position ")[1].split()) == 3


def test_the_drift_guard_is_exported_and_logged_when_it_acts() -> None:
    config = EngineConfig(device="cpu", dtype="float32", max_num_seqs=2, kv_cache_tokens=512, threads=1)
    engine = build_engine(tiny_decoder(), Speculation(tiny_drafter(tiny_drafter_config(draft_vocab_size=64)), 4), config)
    metrics = Metrics("tiny")
    metrics.engine = engine
    before = metrics._snapshot()
    assert "drift guard" not in metrics._line(before, metrics._snapshot(), 1.0)
    guard = engine.controller.guard
    for step in range(400):
        guard.record("good", 4, 4)
        guard.record("bad", 4, 4 if step < 200 else 0)
    lines = dict(line.rsplit(" ", 1) for line in metrics.render().decode().splitlines() if line[0] != "#")
    labels = 'engine="0",model_name="tiny"'

    def value(name: str, more: str = "") -> float:
        return float(lines[f"fledge:drift_guard_{name}{{{labels}{more}}}"])

    assert value("requests_shortened_total") == value("shortened") == 1
    assert value("shortenings_total", ',reason="acceptance"') == 2
    assert value("shortenings_total", ',reason="rms"') == value("shortenings_total", ',reason="sink"') == 0
    assert value("recoveries_total") == 0
    assert value("short_steps_total") == guard.counts.short_steps > 100
    assert value("outside_vocabulary_share") == engine.drafter.coverage.share > 0
    assert "drift guard: 2 depths reduced, 1 now reduced" in metrics._line(before, metrics._snapshot(), 1.0)
    plain = Metrics("plain")
    plain.engine = build_engine(tiny_decoder(), Speculation("none"), config)
    assert b"drift_guard" not in plain.render()
