"""A request takes tokens the same way whether or not anybody asks for text."""

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
def test_without_text_the_same_tokens_are_taken(seed):
    rng = random.Random(seed)
    params = SamplingParams(
        max_tokens=rng.randint(6, 40),
        temperature=0,
        min_tokens=rng.choice([0, 0, 5]),
        ignore_eos=rng.random() < 0.3,
        stop_token_ids=rng.sample(range(12), rng.randint(0, 2)),
    )
    max_len = rng.choice([16, 64])
    quiet, heard = (Request("r", [1, 2, 3], params, frozenset({0, 5}), decoder) for decoder in (None, Letters()))
    while not quiet.finished:
        tokens = [rng.randrange(30) for _ in range(rng.randint(1, 6))]
        drafted = [rng.random() < 0.5 for _ in tokens]
        one, two = (request.append(list(tokens), list(drafted), max_len) for request in (quiet, heard))
        assert (one.tokens, one.drafted, one.finished) == (two.tokens, two.drafted, two.finished)
    assert quiet.tokens == heard.tokens
    assert (quiet.finish_reason, quiet.stop_reason) == (heard.finish_reason, heard.stop_reason)
    assert not quiet.text
    assert len(heard.text) in (heard.num_answer, heard.num_answer - 1)  # an end token has none
