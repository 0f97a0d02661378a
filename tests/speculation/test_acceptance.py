"""The acceptance model chooses the depth with the highest expected tokens per second; the cost table learns step costs."""

from __future__ import annotations

import random

import pytest

from fledge.speculation.acceptance import AcceptanceModel
from fledge.speculation.costs import LIFETIME, CostTable


def costs(step: float, each: float):
    return lambda depth: step + each * depth


def test_the_chosen_depth_falls_with_the_cost_per_token():
    depths = AcceptanceModel(5)
    assert depths.choose(1.0, costs(1.0, 0.05)) == 5
    assert depths.choose(1.0, costs(1.0, 0.4)) == 2
    assert depths.choose(1.0, costs(1.0, 0.6)) == 1
    assert depths.choose(1.0, costs(1.0, 0.9)) == 0


def test_acceptance_changes_the_chosen_depth():
    good, bad = AcceptanceModel(5), AcceptanceModel(5)
    for _ in range(2000):
        good.record(5, 5)
        bad.record(5, 0)
    cost = costs(1.0, 0.3)
    assert good.choose(1.0, cost) == 5
    assert bad.choose(1.0, cost) == 0
    assert good.tokens(5) > 5
    assert bad.tokens(5) < 1.2
    for _ in range(5000):
        bad.record(3, 3)
    assert bad.choose(1.0, cost) in (3, 4)  # little is known about the fourth position


def test_undrafted_requests_reduce_the_depth():
    depths = AcceptanceModel(3)
    assert depths.choose(1.0, costs(1.0, 0.3)) > 0
    assert depths.choose(0.1, costs(1.0, 0.3)) == 0
    assert depths.choose(0.0, costs(1.0, 0.0)) == 0


def test_without_known_costs_the_depth_is_the_limit():
    assert AcceptanceModel(4).choose(1.0, lambda depth: None) == 4
    assert AcceptanceModel(0).choose(1.0, lambda depth: 1.0) == 0


def test_counts_of_many_rows_are_weighted():
    one, many = AcceptanceModel(3), AcceptanceModel(3)
    for _ in range(5):
        one.record(3, 1)
    many.record(3, 1, times=5)
    assert abs(one.tokens(3) - many.tokens(3)) < 0.01


def test_depth_limits_of_rows_reduce_the_depth():
    depths, cost = AcceptanceModel(7), costs(1.0, 0.02)
    assert depths.choose(1.0, cost) == 7
    assert depths.choose(1.0, cost, [7, 7, 7, 7]) == 7
    assert depths.choose(1.0, cost, [1, 1, 1, 7]) < 7
    assert depths.choose(1.0, cost, [1, 1]) == 1
    assert depths.choose(1.0, cost, [6, 1]) <= 7, "6 is not among the candidate depths: the next larger one is the maximum"
    assert depths.choose(1.0, lambda depth: None, [2, 1]) == 2
    assert depths.choose(1.0, lambda depth: None, [6]) == 7


def test_early_stops_are_learnt():
    depths = AcceptanceModel(4)
    assert depths.nodes(4) == 4
    for number in range(4000):
        depths.record(4, min(number % 2, 1), drafted=1 + number % 2)
    assert depths.nodes(4) == pytest.approx(1.5, abs=0.1)
    assert depths.tokens(4) == pytest.approx(1.5, abs=0.1)


def test_untried_depths_are_expected_to_stop_as_early():
    """Otherwise deeper drafts look too expensive and are never tried."""
    depths = AcceptanceModel(6)
    for _ in range(300):
        depths.record(2, 1, drafted=1)
        depths.record(2, 1, drafted=2)
    assert depths.nodes(2) == pytest.approx(1.5, abs=0.02)
    assert depths.nodes(6) == pytest.approx(sum(0.5**place for place in range(6)), abs=0.05)


def test_of_equally_good_depths_the_deepest_is_chosen():
    depths, cost = AcceptanceModel(6), costs(1.0, 0.3)
    best = depths.choose(1.0, cost)
    assert best < 6
    depths.tolerance = 0.5
    assert depths.choose(1.0, cost) == 6


# Step costs, learnt from the steps that are run


def true_cost(rows: float) -> float:
    return 10 + 3 * max(0.0, rows - 4)


def test_costs_are_learnt_from_few_noisy_passes():
    table, rng = CostTable(), random.Random(0)
    assert table.seconds(3) is None
    for _ in range(40):
        for rows in (1, 6, 16, 40, 96):
            slow = 20.0 if rng.random() < 0.05 else 1.0  # another process used the machine
            table.record(rows, true_cost(rows) * rng.uniform(0.9, 1.1) * slow)
    for rows in (1, 6, 10, 16, 30, 40, 70, 96, 128):
        assert table.seconds(rows) == pytest.approx(true_cost(rows), rel=0.2)


def test_unmeasured_sizes_are_assumed_to_be_cheap():
    table = CostTable()
    table.record(24, 60.0)
    assert table.seconds(4) <= 10.0
    assert table.seconds(24) == table.seconds(48) < 60.0
    table.record(4, 20.0)
    assert 20.0 < table.seconds(14) < 60.0
    assert table.seconds(44) == pytest.approx(table.seconds(24) + 40.0)
    for _ in range(100):
        table.record(24, 60.0)
    assert table.seconds(24) == pytest.approx(60.0, rel=0.01)


def test_costs_not_measured_for_long_are_dropped():
    table = CostTable()
    table.record(64, 1e9)
    for _ in range(LIFETIME + 64):
        table.record(1, 10.0)
    assert table.seconds(64) == pytest.approx(10.0, rel=0.01)


def test_a_few_slow_outliers_hardly_count():
    """A size that looks expensive may never be run again, so an outlier would not be corrected."""
    table = CostTable()
    for seconds in [10.0] * 20 + [40.0] * 4:
        table.record(8, seconds)
    assert table.seconds(8) < 11.5


def test_costs_follow_a_machine_that_becomes_slower():
    table = CostTable()
    for seconds in (10.0, 40.0):
        for _ in range(80):
            table.record(4, seconds)
        assert table.seconds(4) == pytest.approx(seconds, rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_depth_is_found_from_measured_steps(seed):
    """Only steps that are run are measured. On average over 100 steps the chosen depth loses less than 5 % to the best one."""
    rng, depths, table = random.Random(seed), AcceptanceModel(5, margin=1.0), CostTable()
    for _ in range(300):
        depths.record(5, sum(1 for _ in range(5) if rng.random() < 0.6))

    def seconds(batch: int, depth: int, of) -> float | None:
        cost = of(batch * (1 + depth))
        return None if cost is None else cost + 0.5 * depth

    for batch in (1, 16, 4, 1):
        lost = 0.0
        speeds = {depth: depths.tokens(depth) / seconds(batch, depth, true_cost) for depth in (0, 1, 2, 3, 5)}
        for _ in range(100):
            chosen = depths.choose(1.0, lambda depth, batch=batch: seconds(batch, depth, table.seconds))
            rows = batch * (1 + chosen)
            table.record(rows, true_cost(rows) * rng.uniform(0.95, 1.05))
            lost += 1 - speeds[chosen] / max(speeds.values())
        assert lost / 100 < 0.05, batch


def test_drafting_is_tried_again_after_many_steps_without_drafts():
    load = AcceptanceModel(5)
    costs = {0: 1.0, 1: 1.2, 2: 1.3, 3: 1.4, 4: 1.5, 5: 1.6}
    assert load.choose(1.0, costs.get) > 0
    for _ in range(600):
        load.record(5, 0)
    assert load.choose(1.0, costs.get) == 0
    for _ in range(100):
        load.decay()
    assert load.choose(1.0, costs.get) == 0, "not at once"
    for _ in range(5000):
        load.decay()
    assert load.choose(1.0, costs.get) > 0


def test_drafting_is_tried_again_after_forget():
    model = AcceptanceModel(5)
    for _ in range(500):
        model.record(5, 0)
    cost = {0: 1.0, 1: 1.3, 2: 1.5, 3: 1.7, 4: 1.9, 5: 2.1}.get
    assert model.choose(1.0, cost) == 0
    model.forget()
    assert model.choose(1.0, cost) > 0
