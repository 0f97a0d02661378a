"""Stop strings: the matcher finds what a search of the whole text finds, in time that does not grow with their number."""

from __future__ import annotations

import random
import time

import pytest

from fledge.engine.request import Request
from fledge.engine.stop_strings import StopMatcher
from fledge.sampling import SamplingParams


def slow_search(stops: tuple[str, ...], text: str, pieces: list[str]) -> tuple[str, int] | None:
    """The reference: after each piece of text, the first stop string of the list that the text contains."""
    so_far = ""
    for piece in pieces:
        so_far += piece
        for stop in stops:
            if (at := so_far.find(stop)) >= 0:
                return stop, at + len(stop)
    return None


@pytest.mark.parametrize("seed", range(40))
def test_the_matcher_finds_what_a_search_finds(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(50):
        stops = tuple("".join(chance.choices("ab", k=chance.randint(1, 6))) for _ in range(chance.randint(1, 6)))
        pieces = ["".join(chance.choices("abc", k=chance.randint(0, 5))) for _ in range(12)]
        matcher, found, text = StopMatcher(stops), None, ""
        for piece in pieces:
            text += piece
            found = matcher.push(piece)
            if found is not None:
                break
            held = max((n for stop in stops for n in range(len(stop)) if n <= len(text) and text.endswith(stop[:n])), default=0)
            assert matcher.num_held == held
        assert (tuple(found) if found else None) == slow_search(stops, text, pieces)


class Letters:
    """A detokenizer whose tokens are characters."""

    def feed(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def seconds_for(num_stops: int) -> float:
    stops = [f"{number:04d}" + "x" * 40 for number in range(num_stops)]
    request = Request("r", [1], SamplingParams(max_tokens=4000, temperature=0, stop=stops), decoder=Letters())
    text = [ord(char) for char in ("0123xxxxxxxx " * 200)[:2000]]
    request.append(text[:1], [False], 10_000)  # builds the automaton
    began = time.thread_time()  # CPU time: on a busy machine either run may wait for a core
    for token in text:
        request.append([token], [False], 10_000)
    return time.thread_time() - began


def test_2000_stop_strings_take_no_longer_than_two() -> None:
    few, many = seconds_for(2), seconds_for(2000)
    assert many < 10 * few + 0.2
