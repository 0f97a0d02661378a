"""`LLM`: a model and its drafter in a few lines, in vLLM's spirit.

llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0, max_tokens=64)).text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fledge.drift.watching import watch_drafts
from fledge.engine.build import DEFAULT_DEPTH, Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.request import Delta, Request, TokenLogprob
from fledge.errors import RequestError
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from fledge.speculation.stats import AcceptanceStats

Prompt = str | Sequence[int]
Message = dict[str, str]


@dataclass(frozen=True)
class Completion:
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    stats: AcceptanceStats
    logprobs: list[TokenLogprob]
    seconds: float  # from arrival to the last token
    first_token_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first over the time after the first."""
        decode = self.seconds - self.first_token_seconds
        return (len(self.token_ids) - 1) / decode if len(self.token_ids) > 1 and decode > 0 else 0.0

    @classmethod
    def of(cls, request: Request) -> Completion:
        finish, first = request.finish_time or time.perf_counter(), request.first_token_time or request.arrival
        return cls(
            request.prompt,
            request.answer,
            request.text,
            request.finish_reason or "abort",
            request.stop_reason,
            request.stats,
            request.logprobs,
            finish - request.arrival,
            first - request.arrival,
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": len(self.token_ids),
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "time_to_first_token": self.first_token_seconds,
            **self.stats.to_dict(),
        }


class LLM:
    def __init__(
        self,
        model: str = "smollm2-135m",
        drafter: str | EagleDrafter | None = "auto",
        *,
        depth: int | str = DEFAULT_DEPTH,
        tree: TreeShape | bool | None = None,
        device: str = "auto",
        dtype: str = "auto",
        quantization: str = "none",
        deterministic: bool = False,
        max_model_len: int = 0,
        max_num_seqs: int = 0,
        kv_cache_tokens: int = 0,
        kv_cache_dtype: str = "auto",
        max_batched_tokens: int = 0,
        threads: int = 0,
        prefix_caching: bool = True,
        adaptive: bool = True,
        drift_guard: bool = True,
    ) -> None:
        """`adaptive`, `drift_guard`: draft less deeply than `depth` under load, or for a request that fares badly."""
        config = EngineConfig(
            device=device,
            dtype=dtype,
            quantization=quantization,
            deterministic=deterministic,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_dtype=kv_cache_dtype,
            max_batched_tokens=max_batched_tokens,
            threads=threads,
            prefix_caching=prefix_caching,
        )
        shape = TreeShape() if tree is True else (tree or None)
        self.engine = build_engine(model, Speculation(drafter, depth, shape, adaptive, drift_guard), config)
        if self.engine.controller.guard is not None:
            watch_drafts(self.engine)

    @property
    def tokenizer(self):
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Completes prompts (texts or token ids), all together; the results come in the order of the prompts."""
        if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        each = [params] * len(prompts) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(prompts)} prompts were given and {len(each)} sampling parameters")
        encoded = [self._encode(prompt) for prompt in prompts]
        requests: list[Request] = []
        try:
            for prompt, one in zip(encoded, each, strict=True):
                requests.append(self.engine.add_request(prompt, one or SamplingParams(), speculate=speculate))
            while any(not request.finished for request in requests):
                for delta in self.engine.step():
                    if on_delta is not None:
                        on_delta(delta)
        finally:  # a refused prompt or Ctrl-C leaves nothing behind in the engine
            for request in requests:
                self.engine.abort(request)
        return [Completion.of(request) for request in requests]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        speculate: bool = True,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> Completion:
        prompt = self.chat_prompt(messages)
        return self.generate([prompt], params, speculate=speculate, on_delta=on_delta)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)

    def stream(self, prompt: Prompt, params: SamplingParams, *, speculate: bool = True) -> Iterator[Delta]:
        request = self.engine.add_request(self._encode(prompt), params, speculate=speculate)
        try:
            while not request.finished:
                yield from (delta for delta in self.engine.step() if delta.request is request)
        finally:
            self.engine.abort(request)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return self.tokenizer.encode(prompt)
        return list(prompt)
