"""The route `/v1/completions`."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from fledge.serving.answers import ChunkStream, CompletionLogprobs, spans, usage, visible_logprobs
from fledge.serving.errors import ApiError
from fledge.serving.generation import CallOptions, Generation, Progress, Work
from fledge.serving.protocol import CompletionRequest
from fledge.serving.request_guard import caller_of
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, TextEvents, begin, json_response
from fledge.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionCall:
    """A prepared request. Choice i answers prompt i // n."""

    service: Service
    payload: CompletionRequest
    model: str
    prompts: list[list[int]]
    works: list[Work]
    options: CallOptions
    echoes: list[str]  # per prompt: the text to return before the answer
    id: str
    created: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def echo(self, index: int) -> str:
        return self.echoes[index // self.payload.n]

    def new_logprobs(self) -> list[CompletionLogprobs] | None:
        """Returns a formatter of log-probabilities for each choice; None if the request wants none."""
        if self.payload.logprobs is None:
            return None
        tokenizer, skips = self.service.tokenizer, self.payload.skip_special_tokens
        return [CompletionLogprobs(tokenizer, skips, len(self.echo(index))) for index in range(len(self.works))]


async def create(service: Service, payload: CompletionRequest, request: Request) -> Any:
    caller = caller_of(request)
    call, generation = await begin(service.engine, request, prepare(service, payload, caller))
    if payload.stream:
        return EventStream(generation, CompletionStream(call))
    return await json_response(request, generation, collect(call, generation))


def _given(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Returns the prompts of a request as a list: the field holds a text, token ids, or a list of either."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [one for one in prompt if isinstance(one, int)]
    return [ids] if ids else [one for one in prompt if not isinstance(one, int)]


async def prepare(service: Service, payload: CompletionRequest, caller: str = "") -> CompletionCall:
    model = service.check_model(payload.model)
    given = _given(payload.prompt)
    if not given:
        raise ApiError("the prompt is empty; give at least one token", param="prompt")
    service.check_limits(payload, len(given), caller)
    # One by one, so that other clients' prompts are tokenised in between.
    prompts = [await _tokens(service, payload, one, caller) for one in given]
    longest = max(prompts, key=len)
    shared = service.sampling_params(payload, service.max_tokens(longest, payload.max_tokens), payload.logprobs)
    by_length = {len(longest): shared}
    works = []
    for prompt in prompts:
        if len(prompt) not in by_length:
            max_tokens = service.max_tokens(prompt, payload.max_tokens)
            by_length[len(prompt)] = service.sampling_params(payload, max_tokens, payload.logprobs)
        for choice in range(payload.n):
            works.append(Work(prompt, by_length[len(prompt)], service.answer_seed(payload.seed, choice)))
    echoes = [""] * len(prompts)
    if payload.echo:
        length = sum(4 * len(one) for one in given if not isinstance(one, str))  # about 4 characters a token
        echoes = await service.tokenize(lambda tokenizer: [_echo(tokenizer, one) for one in given], length, caller)
    grammar = await service.compile_grammar(payload, shared, caller)
    options = CallOptions(caller, payload.speculate, payload.learn, payload.include_speculation, grammar)
    name = f"cmpl-{secrets.token_hex(16)}"
    return CompletionCall(service, payload, model, prompts, works, options, echoes, name, int(time.time()))


def _echo(tokenizer: Tokenizer, given: str | list[int]) -> str:
    """Returns the text of a prompt as it was sent."""
    return given if isinstance(given, str) else tokenizer.decode(given, skip_special_tokens=False)


async def _tokens(service: Service, payload: CompletionRequest, given: str | list[int], caller: str) -> list[int]:
    if not isinstance(given, str):
        service.max_tokens(given, None)  # checks the length now, not after all others were tokenised
        return given
    await asyncio.sleep(0)

    def work(tokenizer: Tokenizer) -> list[int]:
        return service.encode(tokenizer, given, payload.add_special_tokens)

    return await service.tokenize(work, len(given), caller)


async def collect(call: CompletionCall, generation: Generation) -> dict[str, Any]:
    texts = [[call.echo(index)] for index in range(len(call.works))]
    readers = call.new_logprobs()
    logprobs: list[dict[str, list[Any]] | None] = [None] * len(call.works)

    def push(progress: Progress) -> None:
        index = progress.answer.index
        texts[index].append(progress.text)
        if readers is None:
            return
        new, before = readers[index].read(visible_logprobs(progress)), logprobs[index]
        if before is None:
            logprobs[index] = new
        else:
            for name, values in new.items():
                before[name] += values

    await generation.consume(push)
    choices = [
        {
            "index": answer.index,
            "text": "".join(texts[answer.index]),
            "logprobs": logprobs[answer.index],
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        for answer in generation.answers
    ]
    figures = usage(call.num_prompt_tokens, generation.answers, call.payload.include_speculation)
    return call.envelope() | {"choices": choices, "usage": figures}


class CompletionStream(ChunkStream):
    def __init__(self, call: CompletionCall) -> None:
        super().__init__(call.payload, call.envelope(), call.num_prompt_tokens)
        self.call, self.logprobs = call, call.new_logprobs()
        self.has_plain_text &= self.logprobs is None
        self.text_events = TextEvents(self._chunk)

    def begin(self) -> bytes:
        if not self.call.payload.echo:
            return b""
        return b"".join(self._chunk(index, self.call.echo(index)) for index in range(len(self.call.works)))

    def push(self, progress: Progress) -> bytes:
        """Hot path if chunks hold only text: one precomputed event per step."""
        answer, text = progress.answer, progress.text
        index = answer.index
        if self.has_plain_text and progress.finish_reason is None:
            return self.text_events.event(index, text) if text else b""
        self.answers[index] = answer
        logprobs = self.logprobs[index].read(visible_logprobs(progress)) if self.logprobs is not None else None
        extra: dict[str, Any] = {"logprobs": logprobs}
        if self.payload.include_speculation:
            extra["speculation"] = spans(progress)
        if progress.finish_reason is not None:
            extra |= {"finish_reason": progress.finish_reason, "stop_reason": answer.stop_reason}
        if text or logprobs or progress.finish_reason is not None or self.payload.include_speculation:
            return self._chunk(index, text, **extra)
        return b""

    def _chunk(self, index: int, text: str, **extra: Any) -> bytes:
        return self.chunk({"index": index, "text": text, "logprobs": None, "finish_reason": None} | extra)
