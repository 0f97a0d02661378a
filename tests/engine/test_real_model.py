"""The real SmolLM2 with the shipped drafter: plain, chain, tree and n-gram give the same text, and drafts are accepted."""

from __future__ import annotations

import pytest

from fledge import LLM, SamplingParams, TreeShape
from fledge.bench.datasets import load_items
from fledge.engine.build import keeps_blocks
from fledge.engine.config import EngineConfig
from fledge.errors import UserError

pytestmark = pytest.mark.real

TOKENS = 48
PARAMS = SamplingParams(max_tokens=TOKENS, temperature=0)


def answers(llm: LLM) -> list[list[int]]:
    prompts = [llm.chat_prompt([{"role": "user", "content": item.turns[0]}]) for item in load_items("builtin")[:20]]
    return [done.token_ids for done in llm.generate(prompts, PARAMS)]


@pytest.fixture(scope="module", params=["auto", "float32"])
def dtype(request) -> str:
    """On CPU `auto` is the file's own format."""
    return request.param


@pytest.fixture(scope="module")
def plain(smollm2_folder, dtype) -> list[list[int]]:
    return answers(LLM("smollm2-135m", "none", dtype=dtype))


@pytest.mark.parametrize(
    ("drafter", "tree"), [("auto", None), ("auto", TreeShape(4, 10)), ("ngram", None)], ids=["chain", "tree", "ngram"]
)
def test_speculation_does_not_change_answers(plain, dtype, drafter, tree):
    settings = {"depth": 4, "tree": tree, "dtype": dtype, "adaptive": False, "drift_guard": False}
    if tree is not None and keeps_blocks(EngineConfig(device="cpu", dtype=dtype)):
        with pytest.raises(UserError, match="add --dtype float16"):
            LLM("smollm2-135m", drafter, **settings)
        return
    llm = LLM("smollm2-135m", drafter, **settings)
    assert len(plain) == 20
    assert answers(llm) == plain
    if drafter == "auto":
        assert llm.engine.stats.acceptance_length > 2.0
