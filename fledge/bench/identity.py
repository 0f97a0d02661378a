"""Checks that answers do not depend on how they are computed: serves the same requests in several ways and compares tokens.

    alone             one request at a time
    in a batch        as many requests at once as the engine has rows
    changing load     requests arrive at random times, among other requests that are cancelled
    prefix reuse      the engine has served the same prompts before and reuses their cached KV pages
    chunked prefill   prompts are prefilled in small chunks

Each way is run with plain decoding and with speculation. All are compared with plain decoding, one request at a time.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.sampling import SamplingParams

Answers = list[list[int]]
# (speculative, settings of `EngineConfig` to change) -> an engine
Build = Callable[..., Engine]
REFERENCE = "plain, alone"
CHUNK = 64  # tokens per chunk in the chunked-prefill way


@dataclass
class Identity:
    """The answers of each way of serving; `pairs` compares them."""

    answers: dict[str, Answers] = field(default_factory=dict)

    def pairs(self) -> dict[str, dict[str, Any]]:
        """For each way: how many answers equal the reference's, and where the others first differ."""
        wanted = self.answers[REFERENCE]
        found: dict[str, dict[str, Any]] = {}
        for name, given in self.answers.items():
            if name == REFERENCE:
                continue
            places = [first_difference(one, two) for one, two in zip(wanted, given, strict=True)]
            parted = [place for place in places if place is not None]
            found[name] = {"equal": len(places) - len(parted), "of": len(places)}
            if parted:
                found[name]["first_difference"] = {"median": statistics.median(parted), "least": min(parted)}
        return found

    @property
    def holds(self) -> bool:
        return all(pair["equal"] == pair["of"] for pair in self.pairs().values())


def first_difference(one: Sequence[int], two: Sequence[int]) -> int | None:
    """The index of the first token that differs; None if the sequences are equal."""
    for index, (a, b) in enumerate(zip(one, two, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(two) else min(len(one), len(two))


def compare_ways(
    build: Build,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    *,
    users: int = 64,
    speculate: bool = True,
    report: Callable[[str], None] = lambda way: None,
) -> Identity:
    """Serves the requests in every way. `build(speculative, **settings)` makes an engine; `report` is called after each way."""
    found = Identity()

    def note(way: str, answers: Answers) -> None:
        found.answers[way] = answers
        report(way)

    for speculative in (False, True) if speculate else (False,):
        kind = "speculative" if speculative else "plain"
        engine = build(speculative, max_num_seqs=users, prefix_caching=False)
        note(f"{kind}, alone", serve(engine, prompts, params, 1))
        note(f"{kind}, in a batch", serve(engine, prompts, params, users))
        note(f"{kind}, changing load", serve_changing_load(engine, prompts, params))
        del engine
        engine = build(speculative, max_num_seqs=users, prefix_caching=True)
        # With another answer length, so that the cached sequences end elsewhere than the following answers.
        serve(engine, prompts, [replace(one, max_tokens=2) for one in params], users)
        note(f"{kind}, prefix reuse", serve(engine, prompts, params, users))
        del engine
        engine = build(speculative, max_num_seqs=users, prefix_caching=False, max_batched_tokens=max(CHUNK, users))
        note(f"{kind}, chunked prefill", serve(engine, prompts, params, users))
        del engine
    return found


def serve(engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], users: int) -> Answers:
    """Serves all requests in a closed loop of `users`: the next one enters when one is done."""
    requests: list[Request] = []
    while len(requests) < len(prompts) or engine.has_unfinished():
        while len(requests) < len(prompts) and len(engine.requests) < users:
            requests.append(engine.add_request(prompts[len(requests)], params[len(requests)]))
        engine.step()
    return [request.answer for request in requests]


def serve_changing_load(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], seed: int = 0
) -> Answers:
    """Serves the requests in random order and in bursts of random size, among other requests that are cancelled midway."""
    rng = random.Random(seed)
    order = rng.sample(range(len(prompts)), len(prompts))
    requests: dict[int, Request] = {}
    others: list[Request] = []
    while len(requests) < len(prompts) or engine.has_unfinished():
        if len(requests) < len(prompts) and (not engine.requests or rng.random() < 0.1):
            for index in order[len(requests) :][: rng.randint(1, 12)]:
                requests[index] = engine.add_request(prompts[index], params[index])
            text = rng.choice(prompts)
            others.append(engine.add_request(text[len(text) // 2 :], rng.choice(params)))
        if others and rng.random() < 0.05:
            engine.abort(others.pop(rng.randrange(len(others))))
        engine.step()
    return [requests[index].answer for index in range(len(prompts))]
