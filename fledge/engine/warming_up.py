"""What is recorded before the first request comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import product

from fledge.engine.cuda_graphs import size_for
from fledge.engine.device_batch import CUT, GREEDY, SAMPLED, DeviceBatch
from fledge.engine.piece_pass import MIDDLE
from fledge.engine.prompt_pass import LONGEST, OVER_CACHE, TOKENS

FEW_LONG_ROWS = 4  # up to which cycles for rows of any length are recorded too, where others have less reach


def record_ahead(rows: DeviceBatch, depths: Sequence[int], say: Callable[[str], None]) -> None:
    """Cycles of these depths and passes over prompts; the largest first, as `StepGraphs.record` would have it."""
    started = time.perf_counter()
    ways, near, sizes = (CUT, SAMPLED, GREEDY), rows.reach_for(0), rows.sizes[::-1]
    shapes = [(size, depth, how, *near) for size, how, depth in product(sizes, ways, depths[::-1])]
    if near:  # long rows come in small numbers
        few = [size for size in sizes if size <= FEW_LONG_ROWS]
        shapes += [(size, depth, how) for size, how, depth in product(few, ways, depths[::-1])]
    say(f"recording {len(shapes)} cycles and prompt passes")
    rows.graphs.record(shapes)
    longest = [*LONGEST[::-1], *([OVER_CACHE] if rows.config.prefix_caching else [])]
    largest = size_for(TOKENS, min(rows.piece, TOKENS[-1]))
    tokens = [size for size in TOKENS[::-1] if size <= largest]
    rows.prompts.record(product(tokens, (4, 1), longest, ways))
    if rows.config.max_model_len > rows.piece:
        rows.pieces.record([(rows.piece, how) for how in (MIDDLE, *ways)])
    say(f"recorded in {time.perf_counter() - started:.0f} s")
