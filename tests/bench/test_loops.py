"""Looping answers are detected, and normal ones are not."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from fledge.bench.loops import is_looping, loop_start


def words(text: str) -> list[int]:
    """Splits a text into tokens: words, punctuation and line ends."""
    pieces = text.replace("\n", " \n ").replace(",", " , ").replace(".", " . ").replace("|", " | ").split(" ")
    return [zlib.crc32(piece.encode()) % 49_999 for piece in pieces if piece]


PROSE = (
    "The heart pumps blood through two loops. The right side sends it to the lungs, where it takes up oxygen, and the left "
    "side sends it to the rest of the body. Valves between the chambers keep the blood from flowing back. A healthy adult "
    "heart beats between sixty and one hundred times a minute at rest, and faster when the body works. Regular exercise, "
    "sleep and a varied diet keep it strong. Smoking, stress and too much salt do the opposite. "
)
CODE = """
def add(a, b):
    return a + b

def subtract(a, b):
    return a - b

def multiply(a, b):
    return a * b

def divide(a, b):
    if b == 0:
        raise ValueError("division by zero")
    return a / b

print(add(1, 2))
print(subtract(5, 3))
print(multiply(4, 6))
print(divide(8, 2))
"""
TABLE = "| name | age | town |\n| --- | --- | --- |\n" + "".join(f"| n{i} | {20 + i} | t{i * 7 % 5} |\n" for i in range(8))
POEM = "".join(f"Verse {i} tells of the sea at {i} o clock with {w}.\nRow, row, row your boat.\n" for i, w in
               enumerate(("gulls", "rain", "stars", "fog")))  # fmt: skip


@pytest.mark.parametrize("text", [PROSE, CODE, TABLE, POEM, PROSE + CODE + PROSE[:60]], ids=range(5))
def test_normal_answers_are_no_loops(text):
    assert not is_looping(words(text))


LOOPS = {
    "one token": PROSE + "no " * 60,
    "a sentence": PROSE + "I am sorry, but I cannot help with that. " * 6,
    "a paragraph": PROSE * 3,
    "ended by an end-of-turn token": PROSE + "and then we go home, " * 12 + "END",
    "a loop in the middle": PROSE + "over and over again " * 15 + CODE,
    "with a counter": "".join(f"Step {i}: Repeat the process until the mixture is smooth.\n" for i in range(20)),
}


@pytest.mark.parametrize("text", LOOPS.values(), ids=LOOPS)
def test_loops(text):
    assert is_looping(words(text))


def test_short_answers_and_random_tokens_never_loop():
    assert not is_looping([])
    assert not is_looping([7])
    assert not is_looping(words("ha ha ha ha ha ha"))
    assert not is_looping(np.random.default_rng(0).integers(0, 49152, 5000))


@pytest.mark.parametrize("period", [1, 2, 7, 40, 150])
def test_any_period(period):
    random = np.random.default_rng(period)
    unit, honest = random.integers(0, 49152, period), random.integers(0, 49152, 600)
    copies = -(-32 // period) + 1 if period < 16 else 3
    assert is_looping(np.concatenate([honest, np.tile(unit, copies)]))
    assert not is_looping(np.concatenate([honest, np.tile(unit, 1 if period > 16 else 16 // period)]))


def test_loop_start_keeps_the_text_before_the_loop():
    rng = np.random.default_rng(5)
    text, passage = rng.integers(0, 5000, 60), rng.integers(0, 5000, 12)
    looping = np.concatenate([text, np.tile(passage, 6)])
    assert loop_start(looping) == len(text) + len(passage)
    assert loop_start(text) is None
    assert loop_start(rng.integers(0, 3, 200)) == 0


@pytest.mark.parametrize("copies", [28, 29])
def test_shortest_loop_is_detected(copies):
    """32 repeated tokens contain 29 4-grams that occurred before."""
    tokens = np.concatenate([np.arange(100, 140), np.full(4 + copies, 7), np.arange(200, 240)])
    assert loop_start(tokens) == (None if copies == 28 else 41)
