"""A drafter that fails does not change answers: decoding continues without drafts, and a message is logged."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from fledge.engine.build import Speculation, build_engine
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from tests.oracle import CPU, engine_with, run
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config

PROMPTS = [[1, 2, 3], [7, 8], [3, 1, 4, 1, 5, 9], [2]]
PARAMS = {
    "greedy": SamplingParams(max_tokens=24, temperature=0),
    "sampled": SamplingParams(max_tokens=24, temperature=1.2, seed=5),
    "truncated": SamplingParams(max_tokens=24, temperature=1.0, top_p=0.9, seed=5),
}
SHAPES = [None, TreeShape(3, 8)]


def engine(tree: TreeShape | None, spoil: str | None = None, value: float = math.nan):
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64))
    if spoil is not None:
        with torch.no_grad():
            drafter.get_parameter(spoil).view(-1)[3] = value
    return engine_with(tiny_decoder(), Speculation(drafter, 3, tree))


@pytest.fixture(scope="module")
def plain() -> dict[str, list[list[int]]]:
    return {name: run(engine_with(tiny_decoder(), Speculation("none")), PROMPTS, params) for name, params in PARAMS.items()}


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("tree", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize(("spoil", "value"), [("fc.weight", math.nan), ("fc.weight", math.inf), ("lm_head.weight", math.nan)])
def test_non_finite_drafter_weights(plain, caplog, kind: str, tree: TreeShape | None, spoil: str, value: float) -> None:
    """Weights are spoiled after loading, because files with such weights are refused."""
    spoiled = engine(tree, spoil, value)
    with caplog.at_level(logging.WARNING):
        assert run(spoiled, PROMPTS, PARAMS[kind]) == plain[kind]
    spoiled.check_integrity()
    if spoil == "fc.weight":
        assert [record.message for record in caplog.records] == [
            "the drafter's hidden states are not finite: such requests are decoded without drafts"
        ]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("tree", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("spoil", ["fc.weight", "lm_head.weight"])
def test_non_finite_drafter_weights_in_captured_cycles(plain, kind: str, tree: TreeShape | None, spoil: str) -> None:
    """The GPU's cycle, run without graphs: drafted ids stay inside the vocabulary and are not accepted."""
    drafter = tiny_drafter(tiny_drafter_config(draft_vocab_size=64))
    with torch.no_grad():
        drafter.get_parameter(spoil).view(-1)[3] = math.nan
    spoiled = build_engine(tiny_decoder(), Speculation(drafter, 3, tree), CPU, capture=False)
    assert run(spoiled, PROMPTS, PARAMS[kind]) == plain[kind]
    spoiled.check_integrity()


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("tree", SHAPES, ids=["chain", "tree"])
@pytest.mark.parametrize("error", [ZeroDivisionError("oops"), MemoryError(), torch.OutOfMemoryError("no memory")])
def test_a_drafter_exception_ends_speculation_only(plain, caplog, kind: str, tree: TreeShape | None, error: Exception) -> None:
    """The exception comes in the middle of an answer: running and later requests are decoded without drafts."""
    failing = engine(tree)
    draft, calls = failing.drafter.draft, []

    def fail(spans, taps):
        calls.append(len(spans))
        if len(calls) == 4:
            raise error
        return draft(spans, taps)

    failing.drafter.draft = fail
    with caplog.at_level(logging.ERROR):
        assert run(failing, PROMPTS, PARAMS[kind]) == plain[kind]
        assert run(failing, PROMPTS, PARAMS[kind]) == plain[kind]
    assert len(calls) == 4
    assert [record.message for record in caplog.records] == ["the drafter failed; decoding continues without speculation"]
    failing.check_integrity()
    assert failing.pool.num_free == failing.pool.num_pages
