"""The route `/v1/chat/completions`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from fledge.engine.request import TokenLogprob
from fledge.serving import prompts
from fledge.serving.answers import ChunkStream, chat_logprobs, num_last_tokens, spans, usage, visible_logprobs
from fledge.serving.errors import ApiError
from fledge.serving.generation import CallOptions, Generation, Progress, Work
from fledge.serving.message import MessageParser
from fledge.serving.protocol import ChatRequest, NamedTool
from fledge.serving.reasoning import REASONING_PARSERS, ReasoningParser
from fledge.serving.request_guard import caller_of
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, TextEvents, begin, json_response
from fledge.serving.tool_parsers import TOOL_PARSERS, ToolParser
from fledge.serving.tool_parsers.forced import NamedParser, RequiredParser, required_schema
from fledge.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChatCall:
    """A prepared request: what to generate, and how to parse the answers."""

    service: Service
    payload: ChatRequest
    model: str
    prompt: list[int]
    works: list[Work]
    options: CallOptions
    new_parser: Callable[[], MessageParser]
    id: str
    created: int

    def envelope(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def new_readers(self) -> list[ChoiceReader]:
        return [ChoiceReader(self, self.new_parser()) for _ in self.works]


class ChoiceReader:
    """Parses one choice as its text arrives: deltas of its message, and log-probabilities of the part that is shown."""

    def __init__(self, call: ChatCall, parser: MessageParser) -> None:
        self.call, self.parser = call, parser
        self._held: list[TokenLogprob] = []  # of text that is hidden because it is, or may be, reasoning

    def read(self, progress: Progress) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
        parser = self.parser
        is_hidden = not (parser.with_reasoning or parser.is_answering)
        deltas = parser.push(progress.text)
        if progress.finish_reason is not None:
            deltas += parser.finish()
        if not self.call.payload.logprobs:
            return deltas, None
        shown = visible_logprobs(progress)
        if is_hidden:
            self._held += shown
            length = sum(len(delta.get("content") or "") for delta in deltas)
            num_shown = num_last_tokens([self.call.service.tokenizer.text_of(one.token) for one in self._held], length)
            shown, self._held = self._held[len(self._held) - num_shown :], [] if parser.is_answering else self._held
        return deltas, chat_logprobs(self.call.service.tokenizer, shown) if shown or not is_hidden else None


async def create(service: Service, payload: ChatRequest, request: Request) -> Any:
    caller = caller_of(request)
    call, generation = await begin(service.engine, request, prepare(service, payload, caller))
    if payload.stream:
        return EventStream(generation, ChatStream(call))
    return await json_response(request, generation, collect(call, generation))


async def prepare(service: Service, payload: ChatRequest, caller: str = "") -> ChatCall:
    model = service.check_model(payload.model)
    service.check_limits(payload, caller=caller)
    service.check_chat_limits(payload.messages, payload.tools)
    tools = None if payload.tool_choice == "none" else payload.tools
    new_tool_parser, forced_schema = _tool_parser(service, payload)
    length = prompts.length(payload.messages, tools, payload.chat_template_kwargs)

    def tokenized(tokenizer: Tokenizer) -> tuple[str, list[int]]:
        text = prompts.render(service, tokenizer, payload, tools)
        return text, service.encode(tokenizer, text, payload.add_special_tokens)

    text, prompt = await service.tokenize(tokenized, length, caller)
    max_tokens = service.max_tokens(prompt, payload.max_completion_tokens or payload.max_tokens)
    reasoning = REASONING_PARSERS.get(service.flags.reasoning_parser or "")
    special = new_tool_parser is not None and new_tool_parser().needs_special_tokens
    special = special or (reasoning is not None and reasoning.needs_special_tokens)
    logprobs = (payload.top_logprobs or 0) if payload.logprobs else None
    shared = service.sampling_params(payload, max_tokens, logprobs, special)
    works = [Work(prompt, shared, service.answer_seed(payload.seed, choice)) for choice in range(payload.n)]

    def new_reasoning() -> ReasoningParser | None:
        return reasoning(text) if reasoning is not None else None

    def new_parser() -> MessageParser:
        return MessageParser(
            new_reasoning(),
            new_tool_parser() if new_tool_parser is not None else None,
            parallel=payload.parallel_tool_calls is not False,
            with_reasoning=payload.include_reasoning,
        )

    grammar = await service.compile_grammar(payload, shared, caller, forced_schema)
    begin_mark = _end_of_thought(service.tokenizer, new_reasoning()) if grammar is not None else None
    options = CallOptions(caller, payload.speculate, payload.learn, payload.include_speculation, grammar, begin_mark)
    name = f"chatcmpl-{secrets.token_hex(16)}"
    return ChatCall(service, payload, model, prompt, works, options, new_parser, name, int(time.time()))


def _tool_parser(service: Service, payload: ChatRequest) -> tuple[Callable[[], ToolParser] | None, Any]:
    """Returns what makes the parser of tool calls, and the JSON schema that forces a call if the request asks for one."""
    choice = payload.tool_choice or "auto"
    if not payload.tools or choice == "none":
        return None, None
    functions = {tool.function.name: tool.function.parameters for tool in payload.tools}
    wanted = payload.response_format is not None and payload.response_format.type != "text"
    if choice != "auto" and (wanted or payload.structured_outputs):
        raise ApiError("a forced tool_choice and structured output exclude each other; give one", param="tool_choice")
    if isinstance(choice, NamedTool):
        name = choice.function.name
        return lambda: NamedParser(name), functions[name] or {"type": "object", "properties": {}}
    if choice == "required":
        return RequiredParser, required_schema(list(functions.items()), payload.parallel_tool_calls is not False)
    written = service.flags.tool_call_parser
    if written is None or not service.flags.enable_auto_tool_choice:
        raise ApiError(
            'tool_choice "auto" needs a server started with --enable-auto-tool-choice and --tool-call-parser; '
            'or set tool_choice to "required" or to a function',
            param="tool_choice",
        )

    def new_parser() -> ToolParser:
        parser = TOOL_PARSERS[written]()
        parser.functions = functions
        return parser

    return new_parser, None


def _end_of_thought(tokenizer: Tokenizer, reasoning: ReasoningParser | None) -> list[int] | None:
    """Returns the tokens that end the reasoning, after which the grammar applies; None: the answer begins without reasoning."""
    if reasoning is None or reasoning.state == "answering":
        return None
    return tokenizer.encode(reasoning.end, add_special_tokens=False)


async def collect(call: ChatCall, generation: Generation) -> dict[str, Any]:
    readers = call.new_readers()
    logprobs: list[list[Any]] = [[] for _ in call.works]

    def push(progress: Progress) -> None:
        _, found = readers[progress.answer.index].read(progress)
        if found is not None:
            logprobs[progress.answer.index] += found["content"]

    await generation.consume(push)
    choices = []
    for answer, reader in zip(generation.answers, readers, strict=True):
        choices.append(
            {
                "index": answer.index,
                "message": reader.parser.message(),
                "logprobs": {"content": logprobs[answer.index]} if call.payload.logprobs else None,
                "finish_reason": reader.parser.finish_reason(answer.finish_reason),
                "stop_reason": answer.stop_reason,
            }
        )
    figures = usage(len(call.prompt), generation.answers, call.payload.include_speculation)
    return call.envelope("chat.completion") | {"choices": choices, "usage": figures}


class ChatStream(ChunkStream):
    def __init__(self, call: ChatCall) -> None:
        super().__init__(call.payload, call.envelope("chat.completion.chunk"), len(call.prompt))
        self.readers = call.new_readers()
        is_parsed = any(one.parser.reasoning is not None or one.parser.tools is not None for one in self.readers)
        self.has_plain_text &= not (call.payload.logprobs or is_parsed)
        self.text_events = TextEvents(lambda index, text: self._chunk(index, {"content": text}))

    def begin(self) -> bytes:
        return b"".join(self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self.payload.n))

    def push(self, progress: Progress) -> bytes:
        """Hot path if chunks hold only text: one precomputed event per step."""
        index = progress.answer.index
        if self.has_plain_text:
            text = progress.text
            data = self.text_events.event(index, text) if text else b""
            if progress.finish_reason is not None:
                self.answers[index] = progress.answer
                data += self._last(progress)
            return data
        self.answers[index] = progress.answer
        deltas, logprobs = self.readers[index].read(progress)
        extra: dict[str, Any] = {"logprobs": logprobs}
        if self.payload.include_speculation:
            extra["speculation"] = spans(progress)
        if not deltas and (logprobs or self.payload.include_speculation):
            deltas = [{}]
        chunks = []
        for delta in deltas:
            chunks.append(self._chunk(index, delta, **extra))
            extra = {}
        if progress.finish_reason is not None:
            chunks.append(self._last(progress))
        return b"".join(chunks)

    def _last(self, progress: Progress) -> bytes:
        answer = progress.answer
        reason = self.readers[answer.index].parser.finish_reason(progress.finish_reason)
        return self._chunk(answer.index, {}, finish_reason=reason, stop_reason=answer.stop_reason)

    def _chunk(self, index: int, delta: dict[str, Any], **extra: Any) -> bytes:
        return self.chunk({"index": index, "delta": delta, "finish_reason": None, "logprobs": None} | extra)
