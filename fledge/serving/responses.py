"""`/v1/responses`, for text: the newer shape of a chat call. Nothing is stored."""

from __future__ import annotations

import secrets
from typing import Any

from fastapi import Request

from fledge.serving import chat, prompts
from fledge.serving.answers import usage
from fledge.serving.gate import caller_of
from fledge.serving.generation import Answer, Generation, Progress
from fledge.serving.protocol import ChatRequest, ResponsesRequest
from fledge.serving.service import Service
from fledge.serving.streaming import EventStream, begin, event, unless_gone


async def create(service: Service, payload: ResponsesRequest, request: Request) -> Any:
    caller = caller_of(request)
    call, generation = await begin(service.engine, request, chat.prepare(service, as_chat(payload), caller))
    response = Response(payload, call)
    if payload.stream:
        return EventStream(generation, response, done=b"")
    return await unless_gone(request, generation, response.collect(generation))


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
    """A response on its way from `in_progress` to `completed`."""

    def __init__(self, payload: ResponsesRequest, call: chat.ChatCall) -> None:
        self.payload, self.call, self.parser = payload, call, call.new_parser()
        self.id, self.item_id = f"resp_{secrets.token_hex(16)}", f"msg_{secrets.token_hex(16)}"
        self.place = {"item_id": self.item_id, "output_index": 0, "content_index": 0}
        self.item = {"type": "message", "id": self.item_id, "role": "assistant"}
        self.answer: Answer | None = None  # once it is complete
        self.sequence = -1

    async def collect(self, generation: Generation) -> dict[str, Any]:
        await generation.consume(self._take)
        return self.body(self.answer)

    def _take(self, progress: Progress) -> list[dict[str, Any]]:
        deltas = self.parser.push(progress.text)
        if progress.finish_reason is not None:
            deltas += self.parser.finish()
            self.answer = progress.answer
        return deltas

    def begin(self) -> bytes:
        opened = self.item | {"status": "in_progress", "content": []}
        return b"".join(
            (
                self._event("response.created", response=self.body(None)),
                self._event("response.in_progress", response=self.body(None)),
                self._event("response.output_item.added", output_index=0, item=opened),
                self._event("response.content_part.added", **self.place, part=_part("")),
            )
        )

    def push(self, progress: Progress) -> bytes:
        return b"".join(
            self._event("response.output_text.delta", **self.place, delta=delta["content"], logprobs=[])
            for delta in self._take(progress)
            if delta.get("content")
        )

    def end(self) -> bytes:
        text, body = self.parser.content, self.body(self.answer)
        return b"".join(
            (
                self._event("response.output_text.done", **self.place, text=text, logprobs=[]),
                self._event("response.content_part.done", **self.place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=body["output"][-1]),
                self._event(f"response.{body['status']}", response=body),
            )
        )

    def body(self, answer: Answer | None) -> dict[str, Any]:
        """`answer`: None while it is under way."""
        payload = self.payload
        status = "in_progress" if answer is None else "incomplete" if answer.finish_reason == "length" else "completed"
        output: list[dict[str, Any]] = []
        if answer is not None:
            message = {"type": "message", "id": self.item_id, "role": "assistant", "status": status}
            output = [message | {"content": [_part(self.parser.content)]}]
            if self.parser.thought:
                thought = {"type": "reasoning_text", "text": self.parser.thought}
                output.insert(0, {"type": "reasoning", "id": f"rs_{self.id[5:]}", "summary": [], "content": [thought]})
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
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        self.sequence += 1
        return event({"type": kind, "sequence_number": self.sequence} | fields, name=kind)


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
