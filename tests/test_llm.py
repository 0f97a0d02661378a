"""`LLM`: several streams at once, and requests that fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from fledge import LLM, SamplingParams
from tests.interop.tiny_models import save_target
from tests.tiny import tiny_decoder

PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[3, 4, 5], [9, 8, 7]]


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    folder = save_target(tiny_decoder(), tmp_path_factory.mktemp("target"))
    return LLM(str(folder), "ngram", device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, threads=1)


def test_interleaved_streams_get_their_full_text(llm):
    wanted = llm.generate(PROMPTS, PARAMS)
    streams = [llm.stream(prompt, PARAMS) for prompt in PROMPTS]
    found: list[list[int]] = [[], []]
    is_open = [True, True]
    while any(is_open):
        for number, stream in enumerate(streams):
            delta = next(stream, None)
            is_open[number] = delta is not None
            found[number] += delta.tokens if delta is not None else []
    assert found == [answer.token_ids for answer in wanted]
    assert not llm.engine.has_unfinished()


def test_callback_gets_only_deltas_of_its_own_call(llm):
    other, seen = llm.stream(PROMPTS[0], PARAMS), []
    next(other)
    answer = llm.generate([PROMPTS[1]], PARAMS, on_delta=seen.append)[0]
    assert [token for delta in seen for token in delta.tokens] == answer.token_ids
    assert sum(len(delta.tokens) for delta in other) < PARAMS.max_tokens
    assert not llm.engine.has_unfinished()


def broken(tokens: Sequence[int], logits: Tensor) -> Tensor:
    if len(tokens) >= 3:
        raise ValueError("a broken processor")
    return logits


def test_failed_request_reports_its_error(llm):
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, logits_processors=[broken])
    failed, whole = llm.generate(PROMPTS, [params, PARAMS])
    assert (failed.finish_reason, failed.error) == ("error", "ValueError: a broken processor")
    assert "error" in failed.to_dict()
    assert (len(whole.token_ids), whole.error) == (24, None)
    with pytest.raises(ValueError, match="a broken processor"):
        list(llm.stream(PROMPTS[0], params))
