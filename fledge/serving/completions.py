"""`/v1/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from fledge.serving.answers import completion_logprobs, spans, usage, visible_logprobs
from fledge.serving.async_engine import Generation, Progress, Work
from fledge.serving.errors import ApiError
from fledge.serving.gate import caller_of
from fledge.serving.protocol import CompletionRequest
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, event, unless_gone


@dataclass(frozen=True)
class CompletionCall:
    """One call, made ready. Choice i answers prompt i // n."""

    service: Service
    payload: CompletionRequest
    model: str
    prompts: list[list[int]]
    works: list[Work]
    echoes: list[str]  # per prompt: what precedes the answer
    id: str
    created: int

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    def envelope(self) -> dict[str, Any]:
        return {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}

    def echo(self, index: int) -> str:
        return self.echoes[index // self.payload.n]

    def logprobs(self, progress: Progress, offset: int) -> dict[str, Any] | None:
        if self.payload.logprobs is None:
            return None
        return completion_logprobs(self.service.tokenizer, visible_logprobs(progress), offset)


async def create(service: Service, payload: CompletionRequest, request: Request) -> Any:
    caller = caller_of(request)
    call = await prepare(service, payload, caller)
    generation = await service.engine.submit(call.works, caller)
    if payload.stream:
        return EventStream(generation, stream(call, generation))
    return await unless_gone(request, generation, collect(call, generation))


async def prepare(service: Service, payload: CompletionRequest, caller: str = "") -> CompletionCall:
    model = service.check_model(payload.model)
    given = payload.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        given = [given]
    if not given:
        raise ApiError("the prompt is empty; give at least one token", param="prompt")
    service.check_limits(payload, len(given))
    # One by one, so that other callers' prompts come in between.
    prompts = [await _tokens(service, payload, one) for one in given]
    longest = max(prompts, key=len)
    shared = service.sampling_params(payload, service.max_tokens(longest, payload.max_tokens), payload.logprobs)
    by_length = {len(longest): shared}
    grammar = await service.grammar(payload, caller)
    works = []
    for prompt in prompts:
        if len(prompt) not in by_length:
            max_tokens = service.max_tokens(prompt, payload.max_tokens)
            by_length[len(prompt)] = service.sampling_params(payload, max_tokens, payload.logprobs)
        for choice in range(payload.n):
            processors = [service.grammars.processor(grammar)] if grammar is not None else []
            params = service.answer_params(by_length[len(prompt)], payload.seed, choice, processors)
            works.append(Work(prompt, params, payload.speculate, payload.learn))
    echoes = [""] * len(prompts)
    if payload.echo:
        echoes = await service.tokenize(lambda tokenizer: [tokenizer.decode(prompt) for prompt in prompts])
    return CompletionCall(service, payload, model, prompts, works, echoes, f"cmpl-{secrets.token_hex(16)}", int(time.time()))


async def _tokens(service: Service, payload: CompletionRequest, given: str | list[int]) -> list[int]:
    if not isinstance(given, str):
        service.max_tokens(given, None)  # refused now, rather than after all others were tokenised
        return given
    return await service.tokenize(lambda tokenizer: service.encode(tokenizer, given, payload.add_special_tokens), len(given))


async def collect(call: CompletionCall, generation: Generation) -> dict[str, Any]:
    texts = [call.echo(index) for index in range(len(call.works))]
    logprobs: list[dict[str, Any] | None] = [None] * len(call.works)
    last: dict[int, Progress] = {}
    async for progress in generation:
        index = progress.index
        before = logprobs[index]
        offset = before["text_offset"][-1] + len(before["tokens"][-1]) if before and before["tokens"] else len(call.echo(index))
        new = call.logprobs(progress, offset)
        logprobs[index] = new if before is None else {name: before[name] + new[name] for name in new}
        texts[index] += progress.text
        last[index] = progress
    choices = [
        {
            "index": index,
            "text": text,
            "logprobs": logprobs[index],
            "finish_reason": last[index].request.finish_reason,
            "stop_reason": last[index].request.stop_reason,
        }
        for index, text in enumerate(texts)
    ]
    requests = [progress.request for progress in last.values()]
    figures = usage(call.num_prompt_tokens, requests, call.payload.include_speculation)
    return call.envelope() | {"choices": choices, "usage": figures}


async def stream(call: CompletionCall, generation: Generation) -> AsyncIterator[bytes]:
    payload, options = call.payload, call.payload.stream_options
    requests: dict[int, Any] = {}
    offsets = [len(call.echo(index)) for index in range(len(call.works))]

    def chunk(index: int, text: str, **extra: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None} | extra
        data = call.envelope() | {"choices": [choice]}
        if options is not None and options.continuous_usage_stats:
            data["usage"] = usage(call.num_prompt_tokens, requests.values())
        elif options is not None and options.include_usage:
            data["usage"] = None
        return event(data)

    if payload.echo:
        for index in range(len(call.works)):
            yield chunk(index, call.echo(index))
    async for progress in generation:
        index, request = progress.index, progress.request
        requests[index] = request
        logprobs = call.logprobs(progress, offsets[index])
        offsets[index] += sum(map(len, logprobs["tokens"])) if logprobs else 0
        extra: dict[str, Any] = {"logprobs": logprobs}
        if payload.include_speculation:
            extra["speculation"] = spans(progress)
        if progress.finish_reason is not None:
            extra |= {"finish_reason": progress.finish_reason, "stop_reason": request.stop_reason}
        if progress.text or logprobs or progress.finish_reason is not None or payload.include_speculation:
            yield chunk(index, progress.text, **extra)
    if payload.include_speculation or (options is not None and options.include_usage):
        figures = usage(call.num_prompt_tokens, requests.values(), payload.include_speculation)
        yield event(call.envelope() | {"choices": [], "usage": figures})
