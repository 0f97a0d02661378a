"""Detects answers that loop. Small models fall into repetition, and drafters look better than they are on such text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NGRAM = 4
# A passage is a loop if verbatim copies follow it: at least two, with at least this many tokens.
# A Markdown table rule (`| --- | --- |`) or a row of zeros in code repeats about 20 tokens and is not a loop.
MIN_REPEATED_TOKENS = 32
MIN_REPEATS = 2
# Loops with small changes (counters, names) have few distinct 4-grams. The ratio of prose is > 0.9, of code and lists > 0.65.
MIN_DISTINCT_RATIO = 0.5
MIN_TOKENS_FOR_RATIO = 64

_MIXER = np.uint64(0x9E3779B97F4A7C15)


def is_looping(token_ids: Sequence[int] | np.ndarray) -> bool:
    """Whether the answer repeats itself, verbatim or nearly. Costs one sort of its 4-grams."""
    return loop_start(token_ids) is not None


def loop_start(token_ids: Sequence[int] | np.ndarray) -> int | None:
    """Returns the index of the first token that belongs to a repetition loop; 0 if the whole answer loops; None if it does
    not loop."""
    tokens = np.asarray(token_ids, np.uint64)
    if len(tokens) < MIN_REPEATED_TOKENS + NGRAM:
        return None
    keys = _ngram_keys(tokens)
    # Most answers return here: a loop of either kind has at least this many repeated 4-grams.
    ordered = np.sort(keys)
    if np.count_nonzero(ordered[1:] == ordered[:-1]) < MIN_REPEATED_TOKENS - NGRAM + 1:
        return None
    distance = _distance_to_previous(keys)
    # In a loop of period p, the last occurrence of every 4-gram is p tokens back: find long runs of one distance.
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
    """The distance of each key to its previous occurrence; 0 if there is none."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    distance = np.zeros(len(keys), np.int64)
    distance[order[1:][same]] = (order[1:] - order[:-1])[same]
    return distance
