"""Runs a closed loop of users on an engine, and captures what it needs before it is timed; for `gpu.py`."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple

import torch

from fledge.engine.engine import Engine
from fledge.engine.executors.batch_state import ADJUSTED
from fledge.engine.executors.device_batch import LOGPROBS
from fledge.engine.executors.graphs import size_for
from fledge.engine.executors.prefill import PROMPTS, TOKENS
from fledge.engine.request import Request
from fledge.kernels import compile_ahead
from fledge.sampling import SamplingParams


class Loop(NamedTuple):
    tokens_per_s: float  # all users together, prompts included
    own_tokens_per_s: float  # one request from its first token to its last (median)
    depths: Counter[int]  # number of steps by chosen depth
    requests: list[Request]


def closed_loop(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], users: int) -> Loop:
    """Serves all prompts with `users` requests at a time: the next one enters when one is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    waiting = list(zip(prompts, params, strict=True))[::-1]
    running: list[Request] = []
    done: list[Request] = []
    depths: Counter[int] = Counter()
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < users:
            running.append(engine.add_request(*waiting.pop()))
        engine.step()
        depths[engine.controller.depth] += 1
        done += [request for request in running if request.finished]
        running = [request for request in running if not request.finished]
    total = sum(request.num_answer for request in done) / (time.perf_counter() - started)
    own = [(request.num_answer - 1) / seconds for request in done if (seconds := answering_seconds(request))]
    return Loop(total, statistics.median(own) if own else 0.0, depths, done)


def answering_seconds(request: Request) -> float:
    """Seconds from the first token to the last."""
    assert request.first_token_time is not None
    assert request.finish_time is not None
    return request.finish_time - request.first_token_time


def force_depth(engine: Engine, depth: int | None) -> None:
    """Makes every cycle draft `depth` tokens; None: the controller chooses again."""
    controller = engine.controller
    vars(controller).pop("choose", None)
    if depth is not None:

        def choose(running: Sequence[object]) -> int:
            controller.depth = depth
            return depth

        controller.choose = choose


def record_ahead(engine: Engine, users: int, depths: Iterable[int], modes: Iterable[int], prompts: Sequence[int]) -> None:
    """Captures the cycles and prefill passes of a closed loop, as a server does, so that none is captured while it is timed.

    `prompts`: lengths of the prompts.
    """
    batch, modes = engine.executor.batch, list(modes)
    if not batch.graphs.capture:
        return
    sizes = [size for size in batch.sizes if size <= size_for(batch.sizes, users)][::-1]
    cycles = list(product(sizes, depths, modes))
    least, most = (
        size_for(TOKENS, min(prompts) + 1),
        min(users * max(prompts) + 1, engine.config.max_batched_tokens, TOKENS[-1]),
    )
    tokens = [size for size in TOKENS if least <= size <= size_for(TOKENS, most)]
    counts = [count for count in PROMPTS if count <= size_for(PROMPTS, min(users, PROMPTS[-1]))]
    passes = list(product(tokens[::-1], counts[::-1], modes))

    @torch.inference_mode()
    def record() -> None:
        batch.record(cycles)
        if ADJUSTED in modes:
            batch.state.make_adjustments()
            batch.graphs.record([(size, depth, LOGPROBS) for size, depth, mode in cycles if mode == ADJUSTED])
        batch.prefills.record(passes)

    with compile_ahead.side_by_side():  # compiles kernels on all cores: one after another they take minutes
        record()
    record()
