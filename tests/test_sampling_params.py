"""Parameters that make no sense are refused by name; those that nearly do are safe."""

from __future__ import annotations

import pytest

from fledge import SamplingParams
from fledge.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 99),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 5e-324),
        ("presence_penalty", 3.0),
        ("frequency_penalty", -3.0),
        ("logit_bias", {3: float("inf")}),
        ("logprobs", 21),
        ("stop", ["", "x"]),
        ("stop_token_ids", [3, -1]),
        ("stop_token_ids", ["x"]),
        ("bad_words", "one text"),
        ("bad_words", ["x", " "]),
        ("bad_words", [3]),
        ("bad_word_ids", [[3], []]),
        ("bad_word_ids", [[3.0]]),
    ],
)
def test_refused_by_name(name, value):
    with pytest.raises(RequestError, match=name.split("_token")[0]):
        SamplingParams(**{name: value})


def test_a_vanishing_temperature_is_greedy():
    assert SamplingParams(temperature=1e-300).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_a_single_stop_string_is_a_list_of_one():
    assert SamplingParams(stop="END").stop == ("END",)
