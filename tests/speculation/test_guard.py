"""The drift guard: which requests get a lower depth, when they recover, and what does not count as drift."""

from __future__ import annotations

import itertools
import random

import pytest

from fledge.speculation.guard import FIRST_WAIT, LONGEST_WAIT, REASONS, DriftGuard

USUAL = (0.8, 0.75, 0.7, 0.65, 0.6)


def accepted(depth: int, rates, rng: random.Random) -> int:
    return sum(1 for _ in itertools.takewhile(lambda place: rng.random() < rates[place], range(depth)))


def calibrated(limit: int = 5, **settings) -> tuple[DriftGuard, random.Random]:
    guard, rng = DriftGuard(limit, **settings), random.Random(3)
    for step in range(300):
        guard.record(f"early {step % 10}", limit, accepted(limit, USUAL, rng))
    for name in list(guard.watched):
        guard.forget(name)
    assert guard.counts == DriftGuard(limit).counts
    return guard, rng


def run(guard: DriftGuard, name: str, steps: int, rates, rng: random.Random) -> list[int]:
    """Runs a request for `steps` steps; returns the depth of each."""
    depths = []
    for _ in range(steps):
        depths.append(guard.depth(name))
        guard.record(name, depths[-1], accepted(depths[-1], rates, rng))
    return depths


def changes(depths: list[int]) -> list[int]:
    return [depth for depth, _ in itertools.groupby(depths)]


def test_the_depth_falls_in_steps_outside_the_band_and_recovers():
    guard, rng = calibrated()
    run(guard, "good", 50, USUAL, rng)
    depths = run(guard, "drifting", 40, USUAL, rng)
    assert set(depths) == {5}
    depths = run(guard, "drifting", 100, (0.1,) * 5, rng)
    assert changes(depths) == [5, 2, 1]
    assert depths.index(1) < 40
    assert guard.depth("drifting") == 1, "never 0: otherwise a recovery could not be detected"
    assert guard.depth("good") == 5
    assert guard.counts.shortened == guard.counts.requests == 1
    assert guard.counts.shortenings == {"acceptance": 2, "rms": 0, "sink": 0}
    assert guard.counts.short_steps == sum(depth < 5 for depth in depths)
    depths = run(guard, "drifting", 150, USUAL, rng)
    assert changes(depths) == [1, 2, 4, 5]
    assert (guard.counts.recoveries, guard.counts.shortened, guard.counts.requests) == (1, 0, 1)


def test_no_depth_is_lowered_during_calibration():
    guard, rng = DriftGuard(4, calibration_steps=200), random.Random(0)
    run(guard, "good", 100, (1.0,) * 4, rng)
    assert set(run(guard, "bad", 100, (0.0,) * 4, rng)) == {4}
    assert changes(run(guard, "bad", 30, (0.0,) * 4, rng))[-1] == 1


def test_usual_variation_is_rarely_taken_for_drift():
    guard, rng = calibrated()
    for number in range(100):
        run(guard, f"{number}", 100, USUAL, rng)
        guard.forget(f"{number}")
    assert guard.counts.requests <= 5
    assert guard.counts.shortened == 0


def test_a_bad_drafter_is_within_its_own_band():
    guard, rng = DriftGuard(4, calibration_steps=50), random.Random(0)
    assert set(run(guard, "one", 400, (0.02,) * 4, rng)) == {4}


def test_the_depth_does_not_oscillate():
    """Drafts are good up to depth 2 and useless beyond: the wait before each new attempt at more depth doubles."""
    guard, rng = calibrated()
    depths = run(guard, "shallow", 1500, (0.9, 0.9, 0.0, 0.0, 0.0), rng)
    assert guard.counts.requests == 1
    assert 2 <= sum(guard.counts.shortenings.values()) <= 10
    runs = [len(list(same)) for depth, same in itertools.groupby(depths) if depth <= 2]
    assert min(runs[:-1]) >= FIRST_WAIT
    assert max(runs) > 8 * FIRST_WAIT


def test_misses_on_tokens_outside_the_draft_vocabulary_do_not_count():
    guard, _ = calibrated()
    for _ in range(200):
        guard.record("rare words", 5, 0, nameable=False)
    assert guard.depth("rare words") == 5
    for _ in range(200):
        guard.record("plain words", 5, 0)
    assert guard.depth("plain words") == 1
    before = list(guard.usual[False].tried)
    guard.record("rare words", 5, 2, nameable=False)
    assert [new > old for new, old in zip(guard.usual[False].tried, before, strict=True)] == [True, True, False, False, False]


def test_a_hard_text_with_low_confidence_is_no_drift():
    """Low confidence already ends drafts early. With a lower depth as well, the demo's story took 74 passes instead of 69."""

    def judged(confidence: float) -> DriftGuard:
        guard, rng = DriftGuard(5, calibration_steps=200), random.Random(1)
        for _ in range(300):
            guard.record("usual", 5, accepted(5, [0.8] * 5, rng), confidences=[0.7] * 5)
        for _ in range(100):
            guard.record("hard", 5, accepted(5, [0.4] * 5, rng), confidences=[confidence] * 5)
        return guard

    assert judged(0.3).counts.requests == 0
    assert judged(0.7).counts.requests == 1  # the usual confidence, but wrong


def test_sampled_and_greedy_drafts_have_separate_bands():
    """Drafter and target sample with the same noise: a sampled token is accepted far more often than its probability says."""
    guard, rng = DriftGuard(5, calibration_steps=200), random.Random(1)
    for _ in range(600):
        guard.record("drawn", 5, accepted(5, [0.85] * 5, rng))
    for _ in range(100):
        guard.record("greedy", 5, accepted(5, [0.6] * 5, rng), confidences=[0.55] * 5)
    assert guard.counts.requests == 0


def test_renew_discards_the_rates_of_the_previous_drafter():
    guard, rng = DriftGuard(5, calibration_steps=200), random.Random(1)
    for _ in range(3000):
        guard.record("before", 5, accepted(5, [0.35] * 5, rng), confidences=[1.0] * 5)
    guard.renew()
    for _ in range(300):
        guard.record("usual", 5, accepted(5, [0.8] * 5, rng), confidences=[0.7] * 5)
    for _ in range(100):
        guard.record("drifting", 5, accepted(5, [0.15] * 5, rng), confidences=[0.7] * 5)
    assert guard.depth("drifting") == 1


def test_a_fully_accepted_draft_has_no_miss():
    guard, _ = calibrated(limit=3)
    for _ in range(100):
        guard.record("perfect", 3, 3, nameable=False)
    assert [rate > 0.99 for rate in (guard.watched["perfect"].rates.rate(place) for place in range(3))] == [True] * 3


@pytest.mark.parametrize(("name", "reason", "strange"), [("rms", "rms", 4.0), ("rms", "rms", 0.2), ("sink_share", "sink", 0.9)])
def test_probed_figures_outside_the_band_lower_the_depth_until_they_return(name, reason, strange):
    guard, rng = calibrated(calibration_probes=10)

    def figures(**other) -> dict[str, list[float]]:
        return {
            "rms": [rng.gauss(1.0, 0.05) for _ in range(5)],
            "sink_share": [rng.gauss(0.3, 0.03) for _ in range(5)],
            "entropy": [2.0] * 5,
        } | other

    for number in range(30):
        guard.record_probe(f"{number % 3}", figures())
    assert not guard.counts.requests
    guard.record_probe("drifting", figures(**{name: [1.0 if name == "rms" else 0.3] * 3 + [strange] * 2}))
    assert guard.depth("drifting") == 2
    assert guard.counts.shortenings == dict.fromkeys(REASONS, 0) | {reason: 1}
    assert set(run(guard, "drifting", 100, USUAL, rng)) == {2}, "good acceptance must not compensate for it"
    guard.record_probe("drifting", figures(**{name: figures()[name][:2]}))
    assert changes(run(guard, "drifting", 100, USUAL, rng)) == [2, 4, 5]
    assert guard.counts.recoveries == 1
    assert guard.depth("0") == 5


def drifting_guard() -> DriftGuard:
    guard = DriftGuard(4, calibration_steps=0, calibration_probes=4)
    for _ in range(8):
        guard.record_probe("usual", {"rms": [1.0, 1.0], "sink_share": [0.3, 0.3]})
    guard.record_probe("drifting", {"rms": [1.0, 1.0], "sink_share": [0.3, 0.9]})
    assert guard.watched["drifting"].drifting == {"sink_share"}
    return guard


def test_a_probe_without_a_figure_does_not_change_its_state():
    guard = drifting_guard()
    guard.record_probe("drifting", {"rms": [1.0], "sink_share": [None]})
    assert guard.watched["drifting"].drifting == {"sink_share"}
    guard.record_probe("drifting", {"rms": [1.0, 1.0], "sink_share": [None, 0.3]})
    assert not guard.watched["drifting"].drifting


def test_old_probes_do_not_keep_the_depth_low():
    """Captured cycles probe one row at a time, so a request may never be probed again."""
    guard = drifting_guard()
    for _ in range(LONGEST_WAIT - 1):
        guard.record("drifting", 2, 2)
    assert guard.depth("drifting") == 2
    for _ in range(LONGEST_WAIT):
        guard.record("drifting", 2, 2)
    assert guard.depth("drifting") == 4


def test_a_few_outlier_probes_do_not_widen_the_band():
    guard = DriftGuard(2, calibration_probes=10)
    for _ in range(40):
        guard.record_probe("usual", {"rms": [1.0, 1.0]})
    for _ in range(3):
        guard.record_probe("strange", {"rms": [50.0, 50.0]})
    assert guard.bands["rms"][0].mean < 1.1
    assert guard.depth("strange") == 1


def test_depth_1_is_kept_and_finished_requests_are_forgotten():
    guard, rng = calibrated(limit=1)
    assert set(run(guard, "one", 100, (0.0,), rng)) == {1}
    assert not guard.counts.requests
    guard, rng = calibrated()
    run(guard, "gone", 100, (0.0,) * 5, rng)
    assert guard.counts.shortened == 1
    guard.forget("gone")
    guard.forget("gone")
    assert guard.counts.shortened == 0
    assert not guard.watched
    assert guard.depth("gone") == 5
