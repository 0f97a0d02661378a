"""`/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from fledge.serving import prompts
from fledge.serving.answers import chat_logprobs, spans, usage, visible_logprobs
from fledge.serving.async_engine import Generation, Progress, Work
from fledge.serving.errors import ApiError
from fledge.serving.gate import caller_of
from fledge.serving.message import MessageParser
from fledge.serving.protocol import ChatRequest, NamedTool
from fledge.serving.reasoning import REASONING_PARSERS, ReasoningParser
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, event, unless_gone
from fledge.serving.tool_parsers import TOOL_PARSERS, ToolParser
from fledge.serving.tool_parsers.forced import NamedParser, RequiredParser, required_schema
from fledge.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatCall:
    """One call, made ready: what to generate and how to read it."""

    service: Service
    payload: ChatRequest
    model: str
    prompt: list[int]
    works: list[Work]
    new_parser: Callable[[], MessageParser]
    id: str
    created: int

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def logprobs(self, progress: Progress) -> dict[str, Any] | None:
        if not self.payload.logprobs:
            return None
        return chat_logprobs(self.service.tokenizer, visible_logprobs(progress))


async def create(service: Service, payload: ChatRequest, request: Request) -> Any:
    caller = caller_of(request)
    call = await prepare(service, payload, caller)
    generation = await service.engine.submit(call.works, caller)
    if payload.stream:
        return EventStream(generation, stream(call, generation))
    return await unless_gone(request, generation, collect(call, generation))


async def prepare(service: Service, payload: ChatRequest, caller: str = "") -> ChatCall:
    model = service.check_model(payload.model)
    service.check_limits(payload)
    service.check_chat_limits(payload.messages, payload.tools)
    tools = None if payload.tool_choice == "none" else payload.tools
    new_tool_parser, forced_schema = _tool_parser(service, payload)
    length = prompts.length(payload.messages)
    text, prompt = await service.tokenize(lambda tokenizer: _prompt(service, tokenizer, payload, tools), length)
    max_tokens = service.max_tokens(prompt, payload.max_completion_tokens or payload.max_tokens)
    special = new_tool_parser is not None and new_tool_parser().needs_special_tokens
    logprobs = (payload.top_logprobs or 0) if payload.logprobs else None
    shared = service.sampling_params(payload, max_tokens, logprobs, special)
    reasoning = REASONING_PARSERS.get(service.flags.reasoning_parser)

    def new_reasoning() -> ReasoningParser | None:
        return reasoning(text) if reasoning is not None else None

    if forced_schema is not None:
        grammar = await service.compile(lambda: service.grammars.json_schema(forced_schema), caller)
    else:
        grammar = await service.grammar(payload, caller)
    begin = None
    if grammar is not None:
        begin = await service.tokenize(lambda tokenizer: _after_thought(tokenizer, new_reasoning()))

    def work(choice: int) -> Work:
        processors = [service.grammars.processor(grammar, begin)] if grammar is not None else []
        return Work(prompt, service.answer_params(shared, payload.seed, choice, processors), payload.speculate, payload.learn)

    return ChatCall(
        service,
        payload,
        model,
        prompt,
        [work(choice) for choice in range(payload.n)],
        lambda: MessageParser(
            new_reasoning(),
            new_tool_parser() if new_tool_parser is not None else None,
            parallel=payload.parallel_tool_calls is not False,
            with_reasoning=payload.include_reasoning,
        ),
        f"chatcmpl-{secrets.token_hex(16)}",
        int(time.time()),
    )


def _prompt(service: Service, tokenizer: Tokenizer, payload: ChatRequest, tools: Sequence | None) -> tuple[str, list[int]]:
    text = prompts.render(
        service,
        tokenizer,
        payload.messages,
        tools,
        payload.add_generation_prompt,
        payload.continue_final_message,
        payload.chat_template_kwargs,
    )
    return text, service.encode(tokenizer, text, payload.add_special_tokens)


def _tool_parser(service: Service, payload: ChatRequest) -> tuple[Callable[[], ToolParser] | None, Any]:
    """How calls are read, and the schema that forces them if the request does."""
    choice = payload.tool_choice or "auto"
    if not payload.tools or choice == "none":
        return None, None
    functions = {tool.function.name: tool.function.parameters for tool in payload.tools}
    if choice != "auto" and (payload.response_format or payload.structured_outputs):
        raise ApiError("a forced tool_choice and structured output exclude each other", param="tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return lambda: NamedParser(name), functions[name] or {"type": "object", "properties": {}}
    if choice == "required":
        return RequiredParser, required_schema(list(functions.items()), payload.parallel_tool_calls is not False)
    if not service.flags.enable_auto_tool_choice:
        raise ApiError(
            'tool_choice "auto" needs a server started with --enable-auto-tool-choice and --tool-call-parser; '
            'or set tool_choice to "required" or to a function',
            param="tool_choice",
        )
    return TOOL_PARSERS[service.flags.tool_call_parser], None


def _after_thought(tokenizer: Tokenizer, reasoning: ReasoningParser | None) -> Callable[[Sequence[int]], int] | None:
    """Where in an answer its grammar begins to hold: after the thought, if there is one."""
    if reasoning is None or reasoning.state == "answering":
        return None
    mark = tokenizer.encode(reasoning.end, add_special_tokens=False)

    def begin(tokens: Sequence[int]) -> int:
        at = -1
        while mark[0] in tokens[at + 1 :]:  # in C, unlike a loop over all places
            at = tokens.index(mark[0], at + 1)
            if list(tokens[at : at + len(mark)]) == mark:
                return at + len(mark)
        return -1

    return begin


async def collect(call: ChatCall, generation: Generation) -> dict[str, Any]:
    parsers = [call.new_parser() for _ in call.works]
    logprobs: list[list[Any]] = [[] for _ in call.works]
    last: dict[int, Progress] = {}
    async for progress in generation:
        parsers[progress.index].push(progress.text)
        if (found := call.logprobs(progress)) is not None:
            logprobs[progress.index] += found["content"]
        last[progress.index] = progress
    choices = []
    for index, parser in enumerate(parsers):
        parser.finish()
        request = last[index].request
        choices.append(
            {
                "index": index,
                "message": parser.message(),
                "logprobs": {"content": logprobs[index]} if call.payload.logprobs else None,
                "finish_reason": parser.finish_reason(request.finish_reason),
                "stop_reason": request.stop_reason,
            }
        )
    requests = [progress.request for progress in last.values()]
    figures = usage(len(call.prompt), requests, call.payload.include_speculation)
    return call.envelope("chat.completion") | {"choices": choices, "usage": figures}


async def stream(call: ChatCall, generation: Generation) -> AsyncIterator[bytes]:
    payload, envelope = call.payload, call.envelope("chat.completion.chunk")
    options = payload.stream_options
    parsers = [call.new_parser() for _ in call.works]
    requests: dict[int, Any] = {}

    def chunk(index: int, delta: dict[str, Any], **extra: Any) -> bytes:
        data = envelope | {"choices": [{"index": index, "delta": delta, "finish_reason": None} | extra]}
        if options is not None and options.continuous_usage_stats:
            data["usage"] = usage(len(call.prompt), requests.values())
        elif options is not None and options.include_usage:
            data["usage"] = None
        return event(data)

    for index in range(payload.n):
        yield chunk(index, {"role": "assistant", "content": ""}, logprobs=None)
    async for progress in generation:
        index, parser = progress.index, parsers[progress.index]
        requests[index] = progress.request
        deltas = parser.push(progress.text)
        if progress.finish_reason is not None:
            deltas += parser.finish()
        extra: dict[str, Any] = {"logprobs": call.logprobs(progress)}
        if payload.include_speculation:
            extra["speculation"] = spans(progress)
        if not deltas and (extra["logprobs"] or payload.include_speculation):
            deltas = [{}]
        for delta in deltas:
            yield chunk(index, delta, **extra)
            extra = {"logprobs": None}
        if progress.finish_reason is not None:
            reason, stop = parser.finish_reason(progress.finish_reason), progress.request.stop_reason
            yield chunk(index, {}, finish_reason=reason, stop_reason=stop, logprobs=None)
    if payload.include_speculation or (options is not None and options.include_usage):
        figures = usage(len(call.prompt), requests.values(), payload.include_speculation)
        yield event(envelope | {"choices": [], "usage": figures})
