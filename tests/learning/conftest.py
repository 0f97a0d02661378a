"""A toy target for an artificial language, streams of prompts for it, and an engine that learns from them."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fledge.engine.build import Speculation
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.request import Request
from fledge.kernels.linear.packed import PackedLinear
from fledge.learning.config import LearnConfig
from fledge.learning.setup import build_learning_engine
from fledge.learning.target import linear_weight
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.training.targets import toy

DEPTH = 4
GREEDY = SamplingParams(max_tokens=48, temperature=0)
ENGINE = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "kv_cache_tokens": 4096, "threads": 1}
LEARN = {
    "budget": 100.0,
    "memory_mb": 4,
    "learning_rate": 2e-3,
    "batch_tokens": 384,
    "steps_per_candidate": 8,
    "held_out_texts": 12,
    "min_held_out": 5,
    "samples_per_second": 1000.0,
}


@pytest.fixture(scope="session")
def target() -> Decoder:
    return toy.learned_target(100)


def toy_prompts(count: int, seed: int, kind: str = "tell") -> list[list[int]]:
    """Prompts for the toy target. `kind`: the first word: tell (a story), count or spell."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        prompt, _ = toy.conversation(draw)
        if toy.WORDS[prompt[1]] == kind:
            found.append(prompt)
    return found


class Ticks:
    """A clock that advances 1 ms per reading, so that training does not depend on the machine's speed."""

    def __init__(self) -> None:
        self.readings = 0

    def __call__(self) -> float:
        self.readings += 1
        return self.readings / 1000


@pytest.fixture(scope="session")
def learning_engine(target: Decoder) -> Callable[..., Engine]:
    def build(
        drafter: EagleDrafter | None = None,
        *,
        capture: bool | None = None,
        engine: dict | None = None,
        drift_guard: bool = False,
        slice_seconds: float = 0.0,
        model: Decoder | None = None,
        **learn: Any,
    ) -> Engine:
        """`drafter`: None starts without a trained drafter (day 0). `slice_seconds`: 0 runs one micro-step at a time."""
        torch.manual_seed(0)
        speculation = Speculation(copy.deepcopy(drafter), DEPTH, adaptive=False, drift_guard=drift_guard)
        built = build_learning_engine(
            copy.deepcopy(model or target),
            speculation,
            EngineConfig(**{**ENGINE, **(engine or {})}),
            LearnConfig(**{**LEARN, **learn}),
            fixed_prompts=toy_prompts(12, seed=99),
            capture=capture,
            clock=Ticks(),
        )
        if built.hook is not None:  # None if memory ran out
            built.hook.slice_seconds = slice_seconds
        built.warm_up()
        return built

    return build


def serve(engine: Engine, prompts: Sequence[Sequence[int]], concurrency: int = 8, **fields: Any) -> list[Request]:
    """Serves all prompts and returns their requests, in order."""
    requests: list[Request] = []
    left = list(prompts)
    while left or engine.has_unfinished():
        while left and len(engine.requests) < concurrency:
            requests.append(engine.add_request(left.pop(0), GREEDY, **fields))
        engine.step()
    return requests


@pytest.fixture(scope="session")
def learnt(target: Decoder, learning_engine: Callable[..., Engine]) -> tuple[Engine, list, list]:
    """An engine that learnt from a stream of stories from day 0, all its requests, and further ones without learning."""
    engine = learning_engine(slice_seconds=0.01)
    engine.drafter.fallback = None  # the drafter alone, from the start
    # 240 requests to learn from; the 32 after them are only measured.
    requests = serve(engine, toy_prompts(240, seed=1))
    for _ in range(200):
        if not engine.idle():
            break
    return engine, requests, serve(engine, toy_prompts(32, seed=2), learn=False)


@pytest.fixture(scope="session")
def drafter(learnt: tuple[Engine, list, list]) -> EagleDrafter:
    hook = learnt[0].hook
    copied = copy.deepcopy(hook.learner.candidate.master).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            parameter.copy_(hook.served.weights[name])
    return copied


def finished(work: Generator[Any, None, Any]) -> Any:
    """Runs the generator to its end and returns its return value."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


def served_weights(network: EagleDrafter) -> dict[str, Tensor]:
    """The weights as served; packed ones are unpacked."""
    found = {name: value.detach().clone() for name, value in network.named_parameters()}
    for name, module in network.named_modules():
        if isinstance(module, PackedLinear):
            found[f"{name}.weight"] = linear_weight(module).clone()
    return found


def same(weights: dict[str, Tensor], others: dict[str, Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in weights.items())


def acceptance(requests: Sequence[Request]) -> float:
    steps, accepted = (sum(getattr(request.stats, name) for request in requests) for name in ("steps", "accepted"))
    return 1 + accepted / max(steps, 1)
