"""Answers that loop: small models fall into repetition, and a drafter trained on it looks better than it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NGRAM = 4
# A passage is a loop when it is followed by verbatim copies of itself: at least two of them, and at least this many tokens.
# A Markdown table rule (`| --- | --- |`) or a row of zeros in code repeats some 20 tokens and is no loop.
MIN_REPEATED_TOKENS = 32
MIN_REPEATS = 2
# Loops with small changes (counters, names) are seen by how few 4-grams are new. Prose has > 0.9, code and lists > 0.65.
MIN_DISTINCT_RATIO = 0.5
MIN_TOKENS_FOR_RATIO = 64

_MIXER = np.uint64(0x9E3779B97F4A7C15)


def is_looping(token_ids: Sequence[int] | np.ndarray) -> bool:
    """Does the answer repeat itself, verbatim or nearly? One sort of its 4-grams: fast on any length."""
    return loop_start(token_ids) is not None


def loop_start(token_ids: Sequence[int] | np.ndarray) -> int | None:
    """Where an answer begins to repeat itself: what stands before is its own text. 0: it repeats itself all over."""
    tokens = np.asarray(token_ids, np.uint64)
    if len(tokens) < MIN_REPEATED_TOKENS + NGRAM:
        return None
    keys = _ngram_keys(tokens)
    # Nearly every answer ends here: a loop of either kind takes that many 4-grams that were seen before.
    ordered = np.sort(keys)
    if np.count_nonzero(ordered[1:] == ordered[:-1]) < MIN_REPEATED_TOKENS - NGRAM + 1:
        return None
    distance = _distance_to_previous(keys)
    # Inside a loop of period p every 4-gram was last seen p tokens before: look for long runs of one distance.
    starts = np.flatnonzero(np.concatenate(([True], distance[1:] != distance[:-1])))
    runs = np.diff(np.concatenate((starts, [len(distance)])))
    periods = distance[starts]
    repeated_tokens = runs + NGRAM - 1
    loops = (periods > 0) & (repeated_tokens >= np.maximum(MIN_REPEATED_TOKENS, MIN_REPEATS * periods))
    if loops.any():
        return int(starts[loops][0])
    near = len(tokens) >= MIN_TOKENS_FOR_RATIO and (distance == 0).mean() < MIN_DISTINCT_RATIO
    return 0 if near else None


def _ngram_keys(tokens: np.ndarray) -> np.ndarray:
    """One 64-bit key per 4-gram (wrapping arithmetic; a collision would need ~2^32 4-grams in one answer)."""
    pairs = (tokens[:-1] << np.uint64(32)) + tokens[1:]
    return pairs[:-2] * _MIXER + pairs[2:]


def _distance_to_previous(keys: np.ndarray) -> np.ndarray:
    """How far back each key was last seen; 0 where it is new."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    distance = np.zeros(len(keys), np.int64)
    distance[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distance
