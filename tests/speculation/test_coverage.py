"""Draft-vocabulary coverage: tokens outside the vocabulary lower the drafter's confidence and must not change answers."""

from __future__ import annotations

import json
import math

import pytest

from fledge.checkpoints.provenance import Provenance
from fledge.engine.build import Speculation, build_engine
from fledge.sampling import SamplingParams
from fledge.speculation.coverage import LEAST, VocabularyCoverage
from fledge.speculation.depth import DepthPolicy, TreeShape
from tests.oracle import CPU, engine_with, record_drafts, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

GREEDY = SamplingParams(max_tokens=40, temperature=0)
PROMPTS = [[5, 9, 23, 4], [100, 3, 7]]


def test_a_full_vocabulary_does_not_change_confidence():
    outside = VocabularyCoverage(None, coverage=0.5)
    outside.record(list(range(1000)))
    assert outside.covered == 1.0
    assert outside.share == 0.0
    assert outside.holds(123456)


def test_the_share_follows_emitted_tokens():
    outside = VocabularyCoverage(range(10), coverage=0.99)
    assert outside.share == pytest.approx(0.01)
    assert outside.covered == pytest.approx(0.99)
    outside.record([1, 2, 3, 50] * 1500)
    assert outside.share == pytest.approx(0.25, abs=0.01)
    assert outside.holds(3)
    assert not outside.holds(50)
    outside.record([1] * 10_000)
    assert outside.share < 1e-3


def test_coverage_has_a_lower_bound():
    outside = VocabularyCoverage([7])
    outside.record([3] * 100_000)
    assert outside.share == pytest.approx(1.0)
    assert outside.covered == LEAST
    assert math.isfinite(math.log(outside.covered))


def speculator(drafter, depth: DepthPolicy, tree: TreeShape | None = None):
    engine = build_engine(tiny_decoder(), Speculation(drafter, depth.limit, tree).fixed_depth(), CPU)
    engine.drafter.depth = depth
    return engine


@pytest.mark.parametrize("tree", [None, TreeShape(3, 8)], ids=["chain", "tree"])
def test_coverage_scales_confidence_and_keeps_drafted_tokens(tree):
    """With a coverage of one half a chain has the same tokens and half the confidences."""
    drafts = []
    for share in (0.0, 0.5):
        engine = speculator(tiny_drafter(tiny_drafter_config(draft_vocab_size=64)), DepthPolicy(3), tree)
        engine.drafter.coverage = VocabularyCoverage(engine.drafter.target_id_list, coverage=1 - share)
        engine.drafter.coverage.record = lambda tokens: None
        temperature = {} if tree else {"temperature": 0.8, "seed": 5}
        engine.add_request(PROMPTS[0], SamplingParams(**{"max_tokens": 8, "temperature": 0} | temperature))
        recorded = record_drafts(engine)
        engine.step()
        engine.step()
        drafts.append(recorded[-1][2])
    whole, half = drafts
    if tree is None:
        assert half.tokens == whole.tokens
        assert half.confidences == pytest.approx([0.5 * sure for sure in whole.confidences])
    else:  # deep nodes become less likely, so other nodes may be kept
        common = [index for index, parent in enumerate(half.parents) if parent < 0]
        first = {whole.tokens[i]: whole.confidences[i] for i, parent in enumerate(whole.parents) if parent < 0}
        assert common
        for index in common:
            assert half.confidences[index] == pytest.approx(0.5 * first[half.tokens[index]])


@pytest.mark.parametrize("tree", [None, TreeShape(3, 8)], ids=["chain", "tree"])
@pytest.mark.parametrize("size", [2, 64, 128], ids=["two tokens", "half", "all"])
def test_any_vocabulary_is_lossless_and_low_coverage_stops_drafts(size, tree):
    plain = run(engine_with(tiny_decoder(), Speculation("none")), PROMPTS, GREEDY)
    engine = speculator(tiny_drafter(tiny_drafter_config(draft_vocab_size=size)), DepthPolicy(4, 0.02), tree)
    assert run(engine, PROMPTS, GREEDY) == plain
    emitted = [token for answer in plain for token in answer]
    inside = set(engine.drafter.target_id_list)
    if size == 128:
        assert engine.drafter.coverage.covered == 1.0
        return
    expected = VocabularyCoverage(inside)
    expected.record(emitted)
    assert engine.drafter.coverage.share == pytest.approx(expected.share, abs=0.02)  # tokens are recorded in another order
    engine.drafter.coverage.record([next(token for token in range(128) if token not in inside)] * 20_000)
    engine.add_request(PROMPTS[0], GREEDY)
    drafts = record_drafts(engine)
    engine.step()
    engine.step()
    assert drafts[-1][2].depth == 1, "drafts of an uncovered text must stop at depth 1, which is kept to measure acceptance"


def test_a_seeded_answer_does_not_depend_on_coverage():
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64))
    answers = []
    for others in (0, 20_000):
        engine = speculator(drafter, DepthPolicy(5, 0.05))
        outsider = next(token for token in range(128) if token not in engine.drafter.target_id_list)
        engine.drafter.coverage.record([outsider] * others)
        answers.append(run(engine, PROMPTS, SamplingParams(max_tokens=30, temperature=1.0, seed=4)))
    assert answers[0] == answers[1]


def test_coverage_is_read_from_a_drafters_provenance(tmp_path):
    assert Provenance.read(tmp_path).coverage is None
    file = tmp_path / "provenance.json"
    for found, wanted in (({"coverage": 0.985}, 0.985), (None, None), (17, None), ({"coverage": "much"}, None)):
        file.write_text(json.dumps({"draft_vocabulary": found}))
        assert Provenance.read(tmp_path).coverage == wanted
    file.write_text("not json")
    assert Provenance.read(tmp_path).coverage is None


def test_the_shipped_drafters_provenance_has_its_coverage():
    from fledge.drafters import default_drafter

    coverage = Provenance.read(default_drafter("smollm2-135m")).coverage
    assert coverage is not None
    assert 0.9 < coverage < 1.0
