"""The fixed set: the target's answers to prompts that are not traffic. Half is replayed in training, half judges candidates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fledge.drift.metrics import Count
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.learning.samples import LEAST_ANSWER, Sample
from fledge.sampling import SamplingParams


@dataclass
class FixedSet:
    """Texts that new generations must not get worse on: one half is replayed in training, the other judges."""

    replay: list[Sample] = field(default_factory=list)
    judged: list[Sample] = field(default_factory=list)
    first_counts: dict[Sample, Count] = field(default_factory=dict)  # of the first generation

    @classmethod
    def of(cls, texts: Sequence[Sample]) -> FixedSet:
        return cls(list(texts[::2]), list(texts[1::2]))


def answer(engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Sample]:
    """The target's greedy answers, by the engine itself; before it serves."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    hook, engine.hook = engine.hook, None
    requests: list[Request] = []
    try:
        for prompt in prompts:
            requests.append(engine.add_request(prompt, params, learn=False))
        while engine.has_unfinished():
            engine.step()
    finally:
        engine.hook = hook
        for request in requests:
            engine.abort(request)  # those that a failure left
    return [Sample(request.tokens, len(request.prompt)) for request in requests if request.num_answer >= LEAST_ANSWER]
