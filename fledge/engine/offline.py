"""Generates answers for a set of prompts at full throughput: the engine with `OfflineRefill` admission. `fledge regenerate`
uses it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import NamedTuple

import torch

from fledge.engine.admission import OfflineRefill
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.errors import RequestError
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams

# Batch size on a GPU. Beyond about 2,000 rows a step is bound by reading the KV cache; more rows only delay the last answers.
DEVICE_CONCURRENCY = 2048
DEVICE_PREFILL_TOKENS = 32768  # tokens per prefill pass on a GPU

Prompts = Sequence[Sequence[int]] | Iterator[Sequence[int] | None]
# A base seed from which each prompt's is derived, a function from a prompt's index to its seed, or None: a random base seed.
Seed = int | Callable[[int], int] | None


class Answer(NamedTuple):
    index: int  # type: ignore[assignment]  # of the prompt; hides `tuple.index`, which is not used
    tokens: list[int]  # including the stop token, if any
    reason: str  # stop | length


def is_gpu(device: str) -> bool:
    """Whether this device setting selects a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def answer_generator(
    model: str | Decoder,
    *,
    device: str = "auto",
    concurrency: int | None = None,
    dtype: str = "auto",
    max_model_len: int = 0,
    speculation: Speculation | None = None,
) -> AnswerGenerator:
    """Builds an engine for offline use. `max_model_len`: most tokens of prompt and answer together; 0: the model's own limit.
    `speculation`: gives the same answers faster."""
    on_gpu = is_gpu(device)
    config = EngineConfig(
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=concurrency or (DEVICE_CONCURRENCY if on_gpu else 0),
        max_batched_tokens=DEVICE_PREFILL_TOKENS if on_gpu else 0,
        prefix_caching=False,  # prompts of a set differ, and their pages are needed for later prompts
    )
    engine = build_engine(model, speculation or Speculation(drafter=None), config, admission=OfflineRefill())
    engine.executor.compile_kernels()
    return AnswerGenerator(engine)


class AnswerGenerator:
    def __init__(self, engine: Engine) -> None:
        engine.tokenizer = None
        self.engine, self.model, self.max_model_len = engine, engine.model, engine.config.max_model_len
        self.concurrency = engine.config.max_num_seqs  # answers in progress at once

    def generate(
        self,
        prompts: Prompts,
        *,
        max_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: Seed = None,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[Answer]:
        """Yields answers as they finish; raises an answer's failure. `stop_ids`: None: the model's end tokens.

        A sequence is checked before anything runs; an iterator is read as rows become free, so that its later prompts may
        depend on earlier answers. It may yield None if it has no prompt yet: it is asked again while answers are in progress.
        If none are in progress it should block instead, because None then ends the run.
        """
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop_token_ids=tuple(self.model.eos_token_ids if stop_ids is None else stop_ids),
            ignore_eos=True,
        )
        return self._run(checked(prompts, self.model.vocab_size, self.max_model_len), params, seed_function(seed))

    def _run(
        self, prompts: Iterator[Sequence[int] | None], params: SamplingParams, seed_of: Callable[[int], int]
    ) -> Iterator[Answer]:
        index_of: dict[str, int] = {}
        num_taken = 0
        try:
            while True:
                # `prompt` is also None when the iterator is exhausted, and stays None from then on.
                while len(index_of) < 2 * self.concurrency and (prompt := next(prompts, None)) is not None:
                    request = self.engine.add_request(prompt, replace(params, seed=seed_of(num_taken)))
                    index_of[request.id] = num_taken
                    num_taken += 1
                if not index_of:
                    return
                for delta in self.engine.step():
                    if not delta.finished:
                        continue
                    request = delta.request
                    if request.failure is not None:
                        raise request.failure
                    yield Answer(index_of.pop(request.id), request.answer, request.finish_reason or "abort")
        finally:
            for request in list(self.engine.requests.values()):
                if request.id in index_of:
                    self.engine.abort(request)


def checked(prompts: Prompts, vocab_size: int, max_model_len: int) -> Iterator[Sequence[int] | None]:
    """Checks prompts: a sequence completely at once, so that a bad last prompt does not cost an hour; an iterator as read."""

    def check(index: int, prompt: Sequence[int]) -> Sequence[int]:
        if not 0 < len(prompt) < max_model_len:
            raise RequestError(
                f"prompt {index} has {len(prompt)} tokens; it must have at least 1 and fewer than {max_model_len}, "
                "the longest prompt and answer together"
            )
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise RequestError(f"prompt {index} holds a token outside the model's vocabulary of {vocab_size}")
        return prompt

    if isinstance(prompts, Sequence):
        return iter([check(index, prompt) for index, prompt in enumerate(prompts)])
    indexes = count()
    return (prompt if prompt is None else check(next(indexes), prompt) for prompt in prompts)


def seed_function(seed: Seed) -> Callable[[int], int]:
    """A function from a prompt's index to its seed, so that an answer does not depend on the other prompts of the batch."""
    if callable(seed):
        return seed
    base = random.getrandbits(62) if seed is None else seed
    return lambda index: _mixed(base * 0x9E3779B97F4A7C15 + index)


def _mixed(value: int) -> int:
    """SplitMix64's finaliser, shortened to 63 bits to fit an int64."""
    mask = 2**64 - 1
    value &= mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return (value ^ (value >> 31)) >> 1
