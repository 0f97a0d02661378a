"""Requests: appending tokens with and without a detokenizer, text deltas, and stop strings."""

from __future__ import annotations

import random

import pytest

from fledge.engine.request import Request
from fledge.sampling import SamplingParams


class Letters:
    """A decoder for which every token is one letter."""

    def feed(self, token: int) -> str:
        return chr(97 + token % 26)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_the_same_with_and_without_text(seed):
    rng = random.Random(seed)
    params = SamplingParams(
        max_tokens=rng.randint(6, 40),
        temperature=0,
        min_tokens=rng.choice([0, 0, 5]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.sample(range(12), rng.randint(0, 2)),
    )
    max_len = rng.choice([16, 64])
    without_text, with_text = (Request("r", [1, 2, 3], params, frozenset({0, 5}), decoder) for decoder in (None, Letters()))
    while not without_text.finished:
        tokens = [rng.randrange(30) for _ in range(rng.randint(1, 6))]
        drafted = [rng.random() < 0.5 for _ in tokens]
        one, two = (request.append(list(tokens), list(drafted), max_len) for request in (without_text, with_text))
        assert (one.tokens, one.drafted, one.finished) == (two.tokens, two.drafted, two.finished)
    assert without_text.tokens == with_text.tokens
    assert (without_text.finish_reason, without_text.stop_reason) == (with_text.finish_reason, with_text.stop_reason)
    assert not without_text.text
    assert len(with_text.text) in (with_text.num_answer, with_text.num_answer - 1)  # a stop token has no text


@pytest.mark.parametrize("stop", ["defg", "dex", "cdefghij", "hi"])
@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_deltas_never_show_text_that_a_stop_string_may_cut_off(stop, step):
    """The text of all deltas adds up to the final text, however many tokens a step brings."""
    params = SamplingParams(max_tokens=12, temperature=0, stop=[stop])
    request, shown = Request("r", [1], params, decoder=Letters()), ""
    while not request.finished:
        first = request.num_answer
        delta = request.append(list(range(first, first + step)), [token % 2 == 0 for token in range(step)], 100)
        assert delta.text == "".join(part for part, _ in delta.spans)
        shown += delta.text
        assert "abcdefghijkl".split(stop)[0].startswith(shown)
    assert shown == request.text == "abcdefghijkl".split(stop)[0]


@pytest.mark.parametrize("included", [False, True])
def test_stop_strings_wait_for_min_tokens(included):
    """As in vLLM: a stop string that ends within the first `min_tokens` tokens does not count; one that ends later does."""
    params = SamplingParams(max_tokens=20, min_tokens=4, temperature=0, stop=["cd", "de"], include_stop_str_in_output=included)
    request = Request("r", [1], params, decoder=Letters())
    request.append(list(range(12)), [False] * 12, 100)
    assert request.stop_reason == "de"
    assert request.text == ("abcde" if included else "abc")
