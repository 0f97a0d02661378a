"""Invalid sampling parameters are refused by name; extreme but valid ones are handled."""

from __future__ import annotations

import pytest

from fledge import SamplingParams
from fledge.errors import RequestError
from fledge.sampling import check_params


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


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"stop_token_ids": [2_000_000_000], "min_tokens": 1}, "2000000000"),
        ({"stop_token_ids": [-1]}, "-1"),
        ({"logit_bias": {50: 1.0}}, "50"),
        ({"stop_token_ids": list(range(50)), "min_tokens": 1, "temperature": 0.8}, "every token"),
        ({"stop_token_ids": list(range(49)), "min_tokens": 1}, "every token"),  # together with the end token, 49
    ],
)
def test_settings_that_do_not_fit_the_vocabulary_are_refused(given, word):
    with pytest.raises(RequestError, match=word):
        check_params(SamplingParams(max_tokens=4, **given), 50, [49])


def test_settings_that_fit_the_vocabulary_are_accepted():
    check_params(SamplingParams(max_tokens=4, min_tokens=1, stop_token_ids=list(range(49)), ignore_eos=True), 50, [49])
    check_params(SamplingParams(stop_token_ids=list(range(50))), 50)


@pytest.mark.parametrize(
    "given",
    [
        {"temperature": "hot"},
        {"max_tokens": 1.5},
        {"top_k": True},
        {"stop": [3]},
        {"logprobs": True},
        {"logprobs": 2.5},
        {"seed": "x"},
        {"seed": 1.5},
        {"logit_bias": [3]},
        {"logit_bias": {3: "a"}},
    ],
)
def test_wrong_types_are_refused(given):
    with pytest.raises(RequestError, match=next(iter(given))):
        SamplingParams(**given)


def test_params_of_each_answer_share_checked_values():
    params = SamplingParams(logit_bias={3: 1.0}, stop=["a"])
    other = params.for_answer(7, ())
    assert (other.seed, params.seed) == (7, None)
    assert other.logit_bias is params.logit_bias
    assert other.stop is params.stop
