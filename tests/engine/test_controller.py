"""Speculation depth by load and by the drift guard, in whole engines: the depths chosen, and that answers do not change."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.engine.engine import Engine
from fledge.engine.executors import sync_queue
from fledge.engine.request import Request
from fledge.sampling import SamplingParams
from fledge.speculation import controller as controller_module
from fledge.speculation.acceptance import AcceptanceModel
from fledge.speculation.controller import CLOSE, PLAIN_EVERY, PLAIN_EVERY_IF_CLOSE, SpeculationController
from fledge.speculation.costs import CostTable, RowCosts
from fledge.speculation.depth import TreeShape
from fledge.speculation.guard import DriftGuard
from fledge.speculation.methods.base import Drafted
from tests.engine.test_cuda_graph import device_engine, drafter
from tests.engine.test_lossless import drafted_from_scratch, random_prompts
from tests.oracle import CPU, OracleSpeculator, eager_engine, engine_with, record_drafts, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

LONG = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
ROOMY = replace(CPU, max_model_len=480, kv_cache_tokens=8192)
BAD = range(120, 240)  # text lengths at which all drafts of one request are wrong
DEPTH = 4


def usual_reach(place: int) -> int:
    """Number of right draft tokens: 2 to 4, the same in every run, without a period that a text could fall into step with."""
    return 2 + random.Random(place).randrange(3)


class DriftingOracle(OracleSpeculator):
    """Drafts 2 to 4 right tokens, but none for the prompt `drifting` while its text's length is in `BAD`."""

    def __init__(self, answers, drifting: list[int], *, tree: bool = False) -> None:
        super().__init__(answers, DEPTH, tree=tree)
        self.drifting = tuple(drifting)

    def draft_one(self, item):
        length = len(item.request.tokens)
        is_bad = tuple(item.request.prompt) == self.drifting and length in BAD
        self.reach = lambda _: 0 if is_bad else usual_reach(length)
        return super().draft_one(item)


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return random_prompts(4, longest=20)


@pytest.fixture(scope="module")
def plain(texts) -> list[list[int]]:
    return run(engine_with(tiny_decoder(), Speculation("none"), ROOMY), texts, LONG)


def watch_depths(engine, requests) -> dict:
    """Runs to the end. Returns for each request its (length, allowed depth) after every step."""
    depths = {request: [] for request in requests}
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
        for request in requests:
            if not request.finished:
                depths[request].append((len(request.tokens), engine.controller.guard.depth(request)))
    return depths


def check_drift(depths: dict, drifting, counts, limit: int) -> None:
    for request, seen in depths.items():
        if request is not drifting:
            assert {depth for _, depth in seen} == {limit}
    before = {depth for length, depth in depths[drifting] if length <= BAD.start}
    late = {depth for length, depth in depths[drifting] if BAD.start + 60 <= length <= BAD.stop}
    assert before == {limit}
    assert late == {1}
    assert depths[drifting][-1][1] == limit, "the depth must recover"
    assert counts.requests == counts.recoveries == 1
    assert counts.shortenings["acceptance"] >= 2
    assert counts.shortened == 0
    assert counts.short_steps > 20


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_request_with_bad_drafts_gets_a_lower_depth_and_recovers(texts, plain, tree):
    answers = {tuple(text): answer for text, answer in zip(texts, plain, strict=True)}
    oracle = DriftingOracle(answers, texts[1], tree=tree)
    control = SpeculationController(DEPTH, guard=True)
    control.guard = DriftGuard(DEPTH, calibration_steps=60)
    engine = eager_engine(tiny_decoder(), oracle, control, ROOMY)
    requests = [engine.add_request(text, LONG) for text in texts]
    depths = watch_depths(engine, requests)
    assert [request.answer for request in requests] == plain
    check_drift(depths, requests[1], control.guard.counts, DEPTH)
    assert not control.guard.watched


def test_the_guard_lowers_the_depth_of_captured_cycles(texts, plain):
    """All rows of a captured cycle share one depth, so it is lowered only when the shortened request runs alone."""
    engine = device_engine(tiny_decoder(), Speculation(drafter(), DEPTH), max_model_len=480, kv_cache_tokens=8192)
    engine.controller.guard = DriftGuard(DEPTH, calibration_steps=60)
    truth = {tuple(text): answer for text, answer in zip(texts, plain, strict=True)}
    cycles: list[tuple[int, int]] = []

    def oracle(pages: torch.Tensor, depth: int, *, sampled: bool) -> Drafted:
        slots = engine.executor.batch.state
        state, drafts = slots.rows, slots.drafts
        cycles.append((int(state.active.sum()), depth))
        for request, row in engine.executor.row_of.items():
            num_answered = int(state.answered[row])
            right = 0 if request is requests[1] and len(request.prompt) + num_answered in BAD else usual_reach(num_answered)
            coming = truth[tuple(request.prompt)][num_answered : num_answered + depth]
            for place, token in enumerate(coming):
                drafts[row, place] = token if place < right else (token + 1) % 128
        return Drafted()

    engine.executor.batch.method.draft = oracle
    others = [replace(LONG, max_tokens=90), LONG, replace(LONG, max_tokens=120), replace(LONG, max_tokens=130)]
    requests = [engine.add_request(text, params) for text, params in zip(texts, others, strict=True)]
    depths = watch_depths(engine, requests)
    assert [request.answer for request in requests] == [plain[0][:90], plain[1], plain[2][:120], plain[3][:130]]
    check_drift(depths, requests[1], engine.controller.guard.counts, DEPTH)
    assert {depth for rows, depth in cycles if rows > 1} == {DEPTH}
    assert {depth for rows, depth in cycles if rows == 1} == {1, 2, DEPTH}


# Depth by load, with a clock that only passes advance


class Costs:
    """A simulated clock: a pass takes `fixed` seconds plus `each` for every row beyond `free`; a draft step takes 0.1."""

    def __init__(self, fixed: float = 1.0, each: float = 0.5, free: int = 6) -> None:
        self.now, self.fixed, self.each, self.free = 0.0, fixed, each, free

    def __call__(self) -> float:
        return self.now

    def attach(self, engine: Engine) -> None:
        verify, draft = engine.executor.run_target, engine.drafter.draft

        def timed_verify(batch):
            rows = sum(item.num_rows for item in batch)
            self.now += self.fixed + self.each * max(0, rows - self.free)
            return verify(batch)

        def timed_draft(settled, taps):
            drafts = draft(settled, taps)
            self.now += 0.1 * max([draft.depth for draft in drafts], default=0)
            return drafts

        engine.executor.run_target, engine.drafter.draft = timed_verify, timed_draft


def adaptive_engine(oracle, costs: Costs, config=CPU) -> Engine:
    engine = eager_engine(tiny_decoder(), oracle, SpeculationController(oracle.depth.limit, adaptive=True), config, clock=costs)
    costs.attach(engine)
    return engine


def test_prefill_times_inform_verification_costs():
    """A prefill pass costs as much as verifying the same number of rows, so this cost is known before a high load comes."""
    known, unknown = (RowCosts(AcceptanceModel(4)) for _ in range(2))
    for costs in (known, unknown):
        for rows in range(1, 9):
            costs.verify.record(rows, 1.0)
        costs.draft[4].record(1, 0.1)
    known.prefill.record(40, 18.0)
    assert known.seconds(1, 1, 4) == unknown.seconds(1, 1, 4), "measured costs are used as they are"
    assert unknown.seconds(16, 16, 4) < 2
    assert known.seconds(16, 16, 4) > 15


def test_drafting_resumes_only_if_it_gains_more_than_syncing_costs():
    control, costs = adaptive_controller()
    for _ in range(100):
        for rows in range(1, 9):
            costs.verify.record(rows, 1.0 + 0.1 * rows)
        costs.prefill.record(100, 10.0)
        costs.prefill.record(500, 50.0)
        costs.draft[1].record(1, 0.2)
    request = Request("one", [1, 2, 3], LONG, frozenset())
    for pending, drafts in ((0, True), (100, True), (10_000, False)):
        control.pending_tokens = lambda _, pending=pending: pending
        control._kept = None  # forget the last choice
        assert bool(control.choose([request])) == drafts


def test_draft_costs_of_unmeasured_depths_are_extrapolated():
    """Syncing is a fixed part of the cost: scaled in proportion from depth 1, deeper drafts would never be tried."""
    costs = RowCosts(AcceptanceModel(6))
    costs.verify.record(1, 10.0)
    for _ in range(1000):
        costs.draft[1].record(1, 4.0)
        costs.draft[3].record(1, 6.0)
    assert costs.draft_seconds(1, 2) == pytest.approx(5.0, rel=1e-2)
    assert costs.draft_seconds(1, 5) == pytest.approx(8.0, rel=1e-2)
    deep = RowCosts(AcceptanceModel(6))
    deep.verify.record(1, 10.0)
    deep.draft[4].record(1, 8.0)
    assert deep.draft_seconds(1, 6) == deep.draft_seconds(1, 4) > 2 * deep.draft_seconds(1, 1)


def adaptive_controller(limit: int = 4) -> tuple[SpeculationController, RowCosts]:
    control = SpeculationController(limit, adaptive=True)
    costs = RowCosts(control.acceptance)
    control.use_costs(costs)
    return control, costs


def test_a_request_without_speculation_does_not_affect_the_next_one():
    """Regression: the depth of 0 was kept for up to 16 steps; alternating requests lost a sixth of their drafted steps."""
    control, costs = adaptive_controller()
    costs.verify.record(1, 1.0)
    drafted = Request("drafted", [1, 2, 3], LONG, frozenset())
    plain = Request("plain", [1, 2, 3], LONG, frozenset(), speculate=False)
    assert control.choose([drafted]) == control.limit
    assert control.choose([plain]) == 0
    assert control.choose([drafted]) == control.limit


@pytest.mark.parametrize(("drafting", "every"), [(0.05, PLAIN_EVERY), (1.3, PLAIN_EVERY_IF_CLOSE)])
def test_a_plain_step_is_measured_regularly(drafting: float, every: int):
    """The known time of a plain step may be an outlier. It is measured again, more often if speculation gains little."""
    control, costs = adaptive_controller()
    for _ in range(20):
        for rows in range(1, 13):
            costs.verify.record(rows, 1.0)
        for depth in costs.draft:
            costs.draft[depth].record(2, drafting)
    pair = [Request(str(number), [1, 2, 3], LONG, frozenset()) for number in range(2)]
    chosen = [control.choose(pair) for _ in range(5 * every)]
    assert (control.acceptance.gain > CLOSE) == (every == PLAIN_EVERY)
    plain = [step for step, depth in enumerate(chosen) if not depth]
    assert len(plain) == 4, plain
    assert all(later - earlier == every + 1 for earlier, later in pairwise(plain))


def test_a_batch_never_costs_more_than_a_larger_one():
    table = CostTable()
    for _ in range(20):
        table.record(8, 40.0)
        table.record(20, 35.0)
    assert table.seconds(8) == table.seconds(14) == table.seconds(20)
    for _ in range(5):
        table.record(8, 16.0)
    assert table.seconds(8) < 25, "a lower measurement weighs more than a higher one"


def test_old_costs_decay():
    table = CostTable()
    for _ in range(50):
        table.record(4, 1.0)
    known = table.seconds(4)
    for _ in range(6):
        table.decay()
    assert table.seconds(4) < 0.9 < known
    table.record(4, 0.6)
    assert table.costs[4].seconds <= 0.8, "the next measurement must weigh more than usual"


def test_depth_falls_to_0_at_high_load_and_returns_afterwards():
    prompts = random_prompts(13, longest=20)
    short, long = (SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (60, 200))
    wanted = run(engine_with(tiny_decoder(), Speculation("none")), prompts, long)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, wanted, strict=True)}
    costs = Costs()
    engine = adaptive_engine(OracleSpeculator(answers, 4, reach=usual_reach), costs)

    def steps(count: int) -> list[int]:
        seen = []
        for _ in range(count):
            if engine.has_unfinished():
                engine.step()
                seen.append(engine.controller.depth)
        return seen

    first = engine.add_request(prompts[0], long)
    engine.step()  # prefill
    alone = steps(12)
    assert alone[0] == 0, "the cost of a plain step is measured first"
    assert alone.count(0) <= 2
    assert min(alone[2:]) >= 3
    concurrent = [engine.add_request(prompt, short) for prompt in prompts[1:]]
    under_load = steps(40)
    assert under_load.count(0) >= 0.8 * len(under_load)
    assert set(under_load[20:]) == {0}
    while any(not request.finished for request in concurrent):
        engine.step()
    after = steps(10)
    assert after[-3:] == [4, 4, 4], "speculation must resume"
    before = first.stats.steps
    while not first.finished:
        engine.step()
    assert first.stats.steps > before
    assert [request.answer for request in (first, *concurrent)] == [wanted[0], *(answer[:60] for answer in wanted[1:])]


def test_drafting_is_tried_again_after_a_stretch_of_bad_drafts(monkeypatch):
    """Nothing is accepted at first, so nothing is drafted; an occasional draft finds out when that changes."""
    look_again = 128
    monkeypatch.setattr(controller_module, "EXPLORE_EVERY", look_again)
    prompt = random_prompts(1, longest=20)[0]
    params = replace(LONG, max_tokens=440)
    wanted = run(engine_with(tiny_decoder(), Speculation("none"), ROOMY), [prompt], params)[0]
    oracle = OracleSpeculator({tuple(prompt): wanted}, 4, reach=lambda length: 0 if length < 150 else 4)
    engine = adaptive_engine(oracle, Costs(each=0.5, free=1), ROOMY)
    engine.controller.acceptance.record(4, 0, times=3000)
    request = engine.add_request(prompt, params)
    recorded = record_drafts(engine)
    while not request.finished:
        engine.step()
    drafts = [(len(tokens), draft.depth) for _, tokens, draft in recorded]
    assert request.answer == wanted
    early = [depth for length, depth in drafts if length < 150]
    assert 1 <= sum(depth > 0 for depth in early) <= 1 + 2 * len(early) // look_again + 4
    assert any(depth == 4 for length, depth in drafts if length >= 150)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("tree", [None, TreeShape(2, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("num_states", [4096, 150])
def test_drafts_after_catching_up_equal_drafts_from_scratch(num_states, tree, prefix_caching, monkeypatch):
    """The depth changes between 0 and 3. After syncing, drafts equal those of a drafter that reads the whole text; with
    too many queued states a request continues without drafts."""
    decoder = tiny_decoder()
    limit_queue(monkeypatch, num_states)
    network = tiny_drafter(tiny_drafter_config(fc_norm=True, norm_output=True)).share(decoder.embed_tokens, decoder.lm_head)
    prompts = random_prompts(6, longest=40)
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    wanted = run(engine_with(decoder, Speculation("none")), prompts, params)
    config = replace(CPU, kv_cache_tokens=320, max_batched_tokens=32, page_size=8, prefix_caching=prefix_caching)
    engine = build_engine(decoder, Speculation(network, 3, tree, drift_guard=False), config)
    control, count = engine.controller, 0
    engine.executor.costs.verify.record(1, 1.0)

    def choose(running):
        nonlocal count
        count += 1
        control.depth = 3 if count % 40 < 8 else (1 if count % 40 == 20 else 0)
        return control.depth

    control.choose = choose
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    recorded = record_drafts(engine)
    while engine.has_unfinished():
        engine.step()
        engine.check_integrity()
    checked, plain_steps = 0, sum(not len(draft) for _, _, draft in recorded)
    for _, tokens, draft in recorded:
        if len(draft) and tree is None:
            assert draft.tokens == drafted_from_scratch(decoder, network, tokens, len(draft))
            checked += 1
    assert [request.answer for request in requests] == wanted
    assert engine.scheduler.num_preemptions > 0
    assert plain_steps > 50
    assert checked > 20 or tree is not None
    assert_queue_is_empty(engine)


def limit_queue(monkeypatch, num_states: int) -> None:
    """Limits the sync queue to `num_states` hidden states of the tiny decoder."""
    width = len(tiny_drafter_config().aux_layer_ids) * tiny_decoder().config.hidden_size
    monkeypatch.setattr(sync_queue, "MAX_BYTES", 4 * width * num_states)


def assert_queue_is_empty(engine: Engine) -> None:
    queue = engine.executor.queue
    assert not any((queue.pending, queue.ends, engine.executor.spans))
    assert queue.num_bytes == 0


def hold(control: SpeculationController, depth: int) -> None:
    """Makes the controller choose `depth` from now on."""

    def choose(running):
        control.depth = depth
        return depth

    control.choose = choose


def lagging_engine(monkeypatch, num_states: int) -> Engine:
    """An engine that drafts nothing until `hold` sets a depth."""
    limit_queue(monkeypatch, num_states)
    engine = build_engine(tiny_decoder(), Speculation(tiny_drafter(), 3), CPU)
    hold(engine.controller, 0)
    return engine


def test_a_request_with_too_many_queued_states_continues_without_drafts(monkeypatch):
    engine = lagging_engine(monkeypatch, 5)
    control = engine.controller
    request = engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, temperature=0, ignore_eos=True))
    for _ in range(5):
        engine.step()
    assert engine.executor.queue.num_tokens(request) == 3, "the drafter processes the prompt at once"
    for _ in range(4):
        engine.step()
    assert request.drafter_stale
    hold(control, 3)
    drafts = record_drafts(engine)
    while not request.finished:
        engine.step()
    assert not any(len(draft) for _, _, draft in drafts)
    assert_queue_is_empty(engine)


def test_at_the_memory_limit_states_of_finished_requests_are_freed(monkeypatch):
    """All states of a pass are kept while any request has rows of it queued. At the limit each request copies its own rows."""
    engine = lagging_engine(monkeypatch, 40)
    control = engine.controller
    brief, long = (SamplingParams(max_tokens=count, temperature=0, ignore_eos=True) for count in (6, 40))
    stays = engine.add_request([1, 2, 3], long)
    for prompt in random_prompts(5, longest=6):
        engine.add_request(prompt, brief)
    while len(engine.requests) > 1:
        engine.step()
    queue = engine.executor.queue
    states = queue.num_bytes // (sync_queue.MAX_BYTES // 40)
    assert states > queue.num_tokens(stays), "rows of finished requests are kept with the pass"
    while queue.num_tokens(stays) < 30:
        engine.step()
        assert queue.num_bytes <= sync_queue.MAX_BYTES
    hold(control, 3)
    drafts = record_drafts(engine)
    engine.step()
    _, tokens, draft = drafts[-1]
    assert draft.tokens == drafted_from_scratch(tiny_decoder(), engine.drafter.network, tokens, 3)
    while engine.has_unfinished():
        engine.step()
    assert_queue_is_empty(engine)


def loaded_engine(prefix_caching: bool = True, num_rows: int = 512) -> Engine:
    """An engine whose measured costs make speculation unprofitable, until `hold` sets a depth."""
    config = replace(CPU, page_size=8, prefix_caching=prefix_caching, max_batched_tokens=num_rows)
    engine = build_engine(tiny_decoder(), Speculation(tiny_drafter(), 3, drift_guard=False), config)
    executor = engine.executor
    for rows in range(1, 9):
        executor.costs.verify.record(rows, float(rows**3))
    hold(engine.controller, 0)
    executor._record_costs = lambda *_: None
    executor._expects_load = lambda num_requests: not engine.controller.pays_with(8)
    return engine


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("num_rows", [512, 7], ids=["whole", "in chunks"])
def test_under_load_the_drafter_processes_a_prompt_only_when_drafting_resumes(prefix_caching, num_rows):
    engine, prompt = loaded_engine(prefix_caching, num_rows), random_prompts(1, longest=30)[0]
    control, queue, reads = engine.controller, engine.executor.queue, []
    make_drafts = engine.drafter.draft
    engine.drafter.draft = lambda spans, taps: reads.append(spans) or make_drafts(spans, taps)
    request = engine.add_request(prompt, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))
    while request.num_answer < 4:
        engine.step()
    assert not reads
    assert queue.num_tokens(request) == len(prompt) + 2
    hold(control, 3)
    drafts = record_drafts(engine)
    engine.step()
    assert [(item.start, len(item.rows)) for item in reads[0]] == [(0, len(prompt) + 3)]
    _, tokens, draft = drafts[-1]
    assert draft.tokens == drafted_from_scratch(tiny_decoder(), engine.drafter.network, tokens, 3)
    while not request.finished:
        engine.step()
    assert request.stats.steps > 0
    assert_queue_is_empty(engine)


def test_the_drafter_processes_prompts_at_once_while_drafting():
    engine = loaded_engine(prefix_caching=False, num_rows=7)
    hold(engine.controller, 3)
    request = engine.add_request(list(range(1, 31)), SamplingParams(max_tokens=10, temperature=0.9, ignore_eos=True))
    while engine.has_unfinished():
        engine.step()
        assert not engine.executor.queue.pending
    assert request.stats.steps > 0


def test_pages_the_drafter_has_not_processed_are_shared_under_load():
    """A later request that finds such pages either continues without drafts or computes them again for the drafter."""
    prompt, params = list(range(1, 41)), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    wanted = run(engine_with(tiny_decoder(), Speculation("none")), [prompt], params)[0]
    engine = loaded_engine()
    executor, network = engine.executor, engine.drafter.network
    drafts = record_drafts(engine)

    def answered(depth: int):
        hold(engine.controller, depth)
        request = engine.add_request(prompt, params)
        while not request.finished:
            engine.step()
            engine.check_integrity()
        for _, tokens, draft in drafts:
            assert draft.tokens == (drafted_from_scratch(tiny_decoder(), network, tokens, len(draft)) if len(draft) else [])
        drafts.clear()
        assert request.answer == wanted
        return request

    assert answered(0).num_cached == 0
    assert answered(0).num_cached == 32, "pages without the drafter's keys are found"
    stale = answered(3)
    assert (stale.num_cached, stale.stats.steps) == (32, 0)
    expects_load, executor._expects_load = executor._expects_load, lambda num_requests: False
    alone = answered(3)
    assert alone.num_cached == 0
    assert alone.stats.steps > 0
    again = answered(3)
    assert again.num_cached == 32
    assert again.stats.steps > 0
    executor._expects_load = expects_load
    with_load = answered(3)
    assert with_load.num_cached == 32
    assert with_load.stats.steps > 0, "pages that the drafter has processed are preferred"
    assert_queue_is_empty(engine)


def test_a_seeded_answer_does_not_depend_on_load_or_guard():
    prompts, network = random_prompts(4), tiny_drafter()
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True)
    results = []
    for adaptive in (False, True):
        engine = build_engine(tiny_decoder(), Speculation(network, 3, None, adaptive, adaptive), CPU)
        hold(engine.controller, 0 if adaptive else 3)
        results.append(run(engine, prompts, params))
    assert results[0] == results[1]
