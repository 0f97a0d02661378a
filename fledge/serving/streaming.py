"""Answers over HTTP: server-sent events, and letting go of a request when its caller has gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from fledge.serving.async_engine import Generation
from fledge.serving.errors import as_api_error

DONE = b"data: [DONE]\n\n"


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}\n" if name else "").encode() + b"data: " + text.encode() + b"\n\n"


class EventStream(StreamingResponse):
    """Server-sent events of one generation, which ends with the stream: also when the caller hangs up."""

    def __init__(self, generation: Generation, events: AsyncIterator[bytes], done: bytes = DONE) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._guarded(events, done), media_type="text/event-stream", headers=headers)
        self.generation = generation

    @staticmethod
    async def _guarded(events: AsyncIterator[bytes], done: bytes) -> AsyncIterator[bytes]:
        """The status has been sent when an error comes: it is told as an event."""
        try:
            async for one in events:
                yield one
        except Exception as error:
            yield event(as_api_error(error).body())
        yield done

    async def __call__(self, scope, receive, send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self.generation.close()


async def unless_gone(request: Request, generation: Generation, work: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    """The answer of `work`; if the caller hangs up first, the generation is freed at once."""
    answering = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if answering.done():
            return answering.result()
        return Response(status_code=499)  # nobody reads it
    finally:
        generation.close()
        for task in (answering, leaving):
            task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        continue
