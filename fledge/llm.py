"""`LLM`: offline generation with a model and its drafter, in the style of vLLM's `LLM`.

llm = LLM("smollm2-135m")
print(llm.chat([{"role": "user", "content": "Why is the sky blue?"}], SamplingParams(temperature=0, max_tokens=64)).text)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from fledge.drift.live import watch_drafts
from fledge.engine.build import DEFAULT_DEPTH, Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.request import Delta, Request, TokenLogprob
from fledge.errors import RequestError
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from fledge.speculation.stats import AcceptanceStats
from fledge.tokenizer import Tokenizer

Prompt = str | Sequence[int]
Message = dict[str, str]


@dataclass(frozen=True)
class Completion:
    """One finished answer.

    Attributes:
        prompt_token_ids: The prompt as token ids.
        token_ids: The answer as token ids.
        text: The answer.
        finish_reason: `stop`, `length`, `abort`, or `error`: see `error`.
        stop_reason: The stop string or token id that ended it, if one did.
        stats: Drafted and accepted tokens; `stats.acceptance_length` is tokens per pass of the target.
        logprobs: One entry a token, where `SamplingParams.logprobs` asked for them.
        seconds: From arrival to the last token.
        first_token_seconds: From arrival to the first token.
        error: What ended it early, for example an exception in a logits processor; None: nothing did.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    stop_reason: str | int | None
    stats: AcceptanceStats
    logprobs: list[TokenLogprob]
    seconds: float
    first_token_seconds: float
    error: str | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: the number of tokens after the first, divided by the time after the first."""
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
            None if request.failure is None else f"{type(request.failure).__name__}: {request.failure}",
        )

    def to_dict(self) -> dict[str, object]:
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
            **({} if self.error is None else {"error": self.error}),
            "prompt_tokens": len(self.prompt_token_ids),
            "completion_tokens": len(self.token_ids),
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "time_to_first_token": self.first_token_seconds,
            **self.stats.to_dict(),
        }


class LLM:
    """A loaded model with its drafter, for offline generation."""

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
        """Loads the model and its drafter.

        Args:
            model: A built-in name, a folder, a GGUF file or a hub id.
            drafter: `auto` (the one shipped for the model, else n-grams), `none`, `ngram`, a name, a folder, a hub id, or a
                loaded drafter.
            depth: Maximum number of tokens drafted per step, or `auto`: up to 7 on a CPU, 6 on a GPU.
            tree: Draft a tree instead of a chain.
            device: `auto`, `cpu` or `cuda`.
            dtype: `auto`, `float32`, `float16` or `bfloat16`.
            quantization: The target's weights: `none`, `fp8` (GPUs from Ada on), `int8`, `int4`, or `gguf` (as in the file).
            deterministic: Use exact kernels on a CPU without a C compiler; all other kernels are exact anyway. Refuses a tree.
            max_model_len: Maximum length of prompt and answer together; 0: the model's.
            max_num_seqs: Maximum number of requests decoded together; 0: 64 on a CPU, 256 on a GPU.
            kv_cache_tokens: KV cache size in tokens; 0: from free memory.
            kv_cache_dtype: Type of keys and values: `auto`, and on a CPU `float32`, `float16` or `q8_0`.
            max_batched_tokens: Max tokens per step; 0: 256 on a CPU, 8192 on a GPU.
            threads: CPU threads; 0: torch's choice, which follows OMP_NUM_THREADS.
            prefix_caching: Reuse KV pages of common prompt prefixes.
            adaptive: Draft less deeply under load.
            drift_guard: Draft less deeply for a request whose drafts are accepted clearly less often than usual.
        """
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
        self._streamed: dict[Request, list[Delta]] = {}  # per open stream: deltas it has not yielded yet

    @property
    def tokenizer(self) -> Tokenizer:
        assert self.engine.tokenizer is not None, "a model with files has one"
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculate: bool = True,
        on_delta: Callable[[Delta], None] | None = None,
    ) -> list[Completion]:
        """Completes prompts (texts or token ids) as one batch. The results are in the order of the prompts."""
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        several = [cast(Prompt, prompts)] if is_one else cast(Sequence[Prompt], prompts)
        each = [params] * len(several) if isinstance(params, SamplingParams | None) else list(params)
        if len(each) != len(several):
            raise RequestError(f"{len(several)} prompts were given and {len(each)} sampling parameters")
        encoded = [self._encode(prompt) for prompt in several]
        requests: list[Request] = []
        try:
            for prompt, one in zip(encoded, each, strict=True):
                requests.append(self.engine.add_request(prompt, one or SamplingParams(), speculate=speculate))
            own = set(requests)
            while any(not request.finished for request in requests):
                for delta in self._step():
                    if on_delta is not None and delta.request in own:
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
        """Answers a conversation, formatted with the model's chat template."""
        prompt = self.chat_prompt(messages)
        return self.generate([prompt], params, speculate=speculate, on_delta=on_delta)[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of the conversation, formatted with the chat template."""
        return self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)

    def stream(self, prompt: Prompt, params: SamplingParams, *, speculate: bool = True) -> Iterator[Delta]:
        """Completes one prompt and yields a `Delta` for each step that gave tokens. Several streams may be open at once."""
        request = self.engine.add_request(self._encode(prompt), params, speculate=speculate)
        unread = self._streamed[request] = []
        try:
            while unread or not request.finished:
                if not unread:
                    self._step()
                while unread:
                    yield unread.pop(0)
            if request.failure is not None:
                raise request.failure
        finally:
            del self._streamed[request]
            self.engine.abort(request)

    def _step(self) -> list[Delta]:
        """Runs one engine step. Deltas of other open streams are kept until those streams are read."""
        deltas = self.engine.step()
        for delta in deltas:
            if (unread := self._streamed.get(delta.request)) is not None:
                unread.append(delta)
        return deltas

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return self.tokenizer.encode(prompt)
        return list(prompt)
