"""The route `/v1/responses`, for text: a chat call in OpenAI's newer format. Nothing is stored."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import Request

from fledge.serving import chat, prompts
from fledge.serving.answers import num_last_tokens, usage
from fledge.serving.generation import Answer, Generation, Progress
from fledge.serving.protocol import ChatRequest, ResponsesRequest
from fledge.serving.request_guard import caller_of
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, begin, event, json_response


async def create(service: Service, payload: ResponsesRequest, request: Request) -> Any:
    caller = caller_of(request)
    call, generation = await begin(service.engine, request, chat.prepare(service, as_chat(payload), caller))
    response = Response(payload, call)
    if payload.stream:
        return EventStream(generation, response, done=b"")
    return await json_response(request, generation, response.collect(generation))


def as_chat(payload: ResponsesRequest) -> ChatRequest:
    messages: list[dict[str, Any]] = []
    if payload.instructions:
        messages.append({"role": "system", "content": payload.instructions})
    if isinstance(payload.input, str):
        messages.append({"role": "user", "content": payload.input})
    else:
        for item in payload.input:
            role = "system" if item.role == "developer" else item.role
            messages.append({"role": role, "content": prompts.plain_text(item.content)})
    wanted = payload.text.format if payload.text is not None else None
    response_format: dict[str, Any] | None = None
    if wanted is not None and wanted.type != "text":
        response_format = {"type": wanted.type}
        if wanted.type == "json_schema":
            response_format["json_schema"] = {"name": wanted.name or "schema", "schema": wanted.schema_}
    return ChatRequest.model_validate(
        {
            "model": payload.model,
            "messages": messages,
            "max_completion_tokens": payload.max_output_tokens,
            "temperature": payload.temperature,
            "top_p": payload.top_p,
            "response_format": response_format,
            "speculate": payload.speculate,
            "learn": payload.learn,
        }
    )


class Response:
    """Builds a response, whole or as a stream of events: a reasoning item if the model reasons, then a message item."""

    def __init__(self, payload: ResponsesRequest, call: chat.ChatCall) -> None:
        self.payload, self.call, self.parser = payload, call, call.new_parser()
        name = secrets.token_hex(16)
        self.id, self.thought_id, self.item_id = f"resp_{name}", f"rs_{name}", f"msg_{name}"
        self.answer: Answer | None = None  # set when it is complete
        self.num_thought_tokens = 0
        self.sequence = -1
        self._open: str | None = None  # the kind of the item that is being streamed
        self._next_index = 0

    async def collect(self, generation: Generation) -> dict[str, Any]:
        await generation.consume(self._take)
        return self.body(self.answer)

    def _take(self, progress: Progress) -> list[dict[str, Any]]:
        is_thinking = not self.parser.is_answering
        deltas = self.parser.push(progress.text)
        if progress.finish_reason is not None:
            deltas += self.parser.finish()
            self.answer = progress.answer
        if is_thinking:
            content = sum(len(delta.get("content") or "") for delta in deltas)
            texts = [self.call.service.tokenizer.text_of(token) for token in progress.tokens]
            self.num_thought_tokens += len(texts) - num_last_tokens(texts, content)
        return deltas

    def begin(self) -> bytes:
        return b"".join(self._event(f"response.{kind}", response=self.body(None)) for kind in ("created", "in_progress"))

    def push(self, progress: Progress) -> bytes:
        written = []
        for delta in self._take(progress):
            for kind, name in (("reasoning", "response.reasoning_text.delta"), ("message", "response.output_text.delta")):
                if text := delta.get("content" if kind == "message" else kind):
                    written.append(self._begin_item(kind))
                    written.append(self._event(name, **self._place(), delta=text, **_no_logprobs(kind)))
        return b"".join(written)

    def end(self) -> bytes:
        last = self._begin_item("message") + self._end_item()  # an answer without text has a message item, too
        body = self.body(self.answer)
        return last + self._event(f"response.{body['status']}", response=body)

    def _place(self) -> dict[str, Any]:
        item_id = self.item_id if self._open == "message" else self.thought_id
        return {"item_id": item_id, "output_index": self._next_index - 1, "content_index": 0}

    def _begin_item(self, kind: str) -> bytes:
        """Ends the open item and opens one of this kind, unless it is open already."""
        if self._open == kind:
            return b""
        ended = self._end_item()
        self._open, index = kind, self._next_index
        self._next_index += 1
        opened = self._item(kind) | {"status": "in_progress", "content": []}
        added = self._event("response.output_item.added", output_index=index, item=opened)
        return ended + added + self._event("response.content_part.added", **self._place(), part=_part(kind, ""))

    def _end_item(self) -> bytes:
        if self._open is None:
            return b""
        kind, place = self._open, self._place()
        text = self.parser.content if kind == "message" else self.parser.thought
        name = "output_text" if kind == "message" else "reasoning_text"
        written = self._event(f"response.{name}.done", **place, text=text, **_no_logprobs(kind))
        written += self._event("response.content_part.done", **place, part=_part(kind, text))
        item = self._item(kind)
        self._open = None
        return written + self._event("response.output_item.done", output_index=place["output_index"], item=item)

    def _item(self, kind: str) -> dict[str, Any]:
        """Returns an item with the text so far."""
        is_cut = self.answer is not None and self.answer.finish_reason == "length"
        if kind == "reasoning":
            item = {"type": "reasoning", "id": self.thought_id, "summary": [], "content": [_part(kind, self.parser.thought)]}
            return item | {"status": "incomplete" if is_cut and not self.parser.content else "completed"}
        item = {"type": "message", "id": self.item_id, "role": "assistant", "content": [_part(kind, self.parser.content)]}
        return item | {"status": "incomplete" if is_cut else "completed"}

    def body(self, answer: Answer | None) -> dict[str, Any]:
        """Returns the response object. `answer`: None while it is being generated."""
        payload = self.payload
        status = "in_progress" if answer is None else "incomplete" if answer.finish_reason == "length" else "completed"
        output: list[dict[str, Any]] = []
        if answer is not None:
            output = [self._item(kind) for kind in ("reasoning", "message") if kind == "message" or self.parser.thought]
        wanted = payload.text.format if payload.text is not None else None
        params = self.call.works[0].params
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.call.created,
            "model": self.call.model,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": payload.instructions,
            "max_output_tokens": payload.max_output_tokens,
            "metadata": payload.metadata or {},
            "output": output,
            "parallel_tool_calls": False,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted is not None else {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "usage": self._usage(answer) if answer is not None else None,
        }

    def _usage(self, answer: Answer) -> dict[str, Any]:
        counts = usage(len(self.call.prompt), [answer])
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": counts.get("prompt_tokens_details", {"cached_tokens": 0}),
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_thought_tokens if self.parser.thought else 0},
            "total_tokens": counts["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.sequence += 1
        return event({"type": kind, "sequence_number": self.sequence} | fields, name=kind)


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _no_logprobs(kind: str) -> dict[str, Any]:
    return {"logprobs": []} if kind == "message" else {}
