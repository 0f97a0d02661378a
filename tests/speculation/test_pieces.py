"""Unit tests of drafts, depth, statistics, n-grams and the sampling distribution."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fledge.errors import UserError
from fledge.sampling import SamplingParams
from fledge.speculation.depth import DepthPolicy, TreeShape
from fledge.speculation.methods.base import AcceptedSpan
from fledge.speculation.methods.ngram import NgramSpeculator
from fledge.speculation.stats import AcceptanceStats, macro_acceptance_length
from fledge.speculation.verification import Draft, verify
from tests.oracle import probabilities

#        root ─ 10 ─ 20 ─ 30
#             └ 11 ─ 21
TREE = Draft(tokens=[10, 11, 20, 21, 30], parents=[-1, -1, 0, 1, 2], confidences=[0.5] * 5)


def test_depths_children_and_mask_of_a_tree():
    assert TREE.depths() == [1, 1, 2, 2, 3]
    assert TREE.children(-1) == [0, 1]
    assert not TREE.is_chain
    assert Draft([1, 2], [-1, 0], [1, 1]).is_chain
    assert TREE.tail_mask().int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 0, 1, 0, 1, 0],
        [1, 1, 0, 1, 0, 1],
    ]


@pytest.mark.parametrize(
    ("best", "accepted", "following"),
    [
        ([10, 20, 0, 30, 0, 99], [0, 2, 4], 99),
        ([11, 0, 21, 0, 98, 0], [1, 3], 98),
        ([10, 77, 0, 0, 0, 0], [0], 77),
        ([55, 0, 0, 0, 0, 0], [], 55),
    ],
)
def test_greedy_verification_follows_the_tree(best, accepted, following):
    assert verify(best, TREE) == (accepted, following)


def test_acceptance_statistics():
    first, second = AcceptanceStats(), AcceptanceStats()
    first.add_step(nodes=3, depth=3, accepted=3, emitted=4)
    first.add_step(nodes=3, depth=3, accepted=1, emitted=2)
    second.add_step(nodes=3, depth=3, accepted=0, emitted=1)
    whole = AcceptanceStats.total([first, second])
    assert whole.acceptance_length == pytest.approx(1 + 4 / 3)
    assert macro_acceptance_length([first, second]) == pytest.approx((3 + 1) / 2)
    assert whole.unconditional_rates == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert whole.conditional_rates == pytest.approx([2 / 3, 1 / 2, 1.0])
    assert (whole.drafted, whole.emitted) == (9, 7)


def test_depth_is_a_number_or_auto():
    assert DepthPolicy.parse("5") == DepthPolicy(5)
    auto = DepthPolicy.parse("auto")
    assert auto.goes_on(1, 0.9)
    assert not auto.goes_on(1, 0.05)
    assert not auto.goes_on(auto.limit, 1.0)
    for wrong in ("0", "65", "deep", "-1"):
        with pytest.raises(UserError, match="depth"):
            DepthPolicy.parse(wrong)
    with pytest.raises(UserError, match="tree"):
        TreeShape(0, 5)


def test_ngrams_draft_the_latest_continuation():
    drafter = NgramSpeculator(DepthPolicy(3), longest=3, shortest=2)
    sequence = SimpleNamespace(tokens=[1, 2, 3, 4, 5, 9, 2, 3], pages=[], params=SamplingParams(), seed=0)
    draft = drafter.draft([AcceptedSpan(sequence, 0, [0], 10)], [])[0]
    assert draft.tokens == [4, 5, 9]
    assert draft.is_chain
    sequence.tokens += [7, 9, 2, 3]  # the most recent occurrence wins
    assert drafter.draft([AcceptedSpan(sequence, 0, [0], 2)], [])[0].tokens == [7, 9]
    sequence.tokens += [100]
    assert len(drafter.draft([AcceptedSpan(sequence, 0, [0], 10)], [])[0]) == 0
    assert len(drafter.draft([AcceptedSpan(sequence, 0, [0], 0)], [])[0]) == 0
    drafter.forget(sequence)
    assert not drafter.indexes


@pytest.mark.parametrize("top_p", [5e-239, 1e-30, 1e-6])
def test_a_tiny_top_p_keeps_the_most_likely_token(top_p):
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.5, 2.4]])
    found = probabilities(logits, SamplingParams(temperature=1.0, top_p=top_p))
    assert found.tolist() == [[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
