"""Answers over HTTP: server-sent events, and letting go of a request when its caller has gone.

Tokens are written where they arrive. An event goes from the engine's message to the socket in one call stack; the ASGI task
sleeps until the end, or until the socket takes no more. Through `send` an event costs a task switch, two asynchronous
generators and four layers of middleware.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from fledge.serving.errors import ApiError, as_api_error
from fledge.serving.generation import CallOptions, Generation, Progress, Work
from fledge.serving.request_guard import CUT

if TYPE_CHECKING:
    from fledge.serving.async_engine import AsyncEngine

Result = TypeVar("Result")
CallT = TypeVar("CallT", bound="Call")

DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
SOCKET = "fledge.socket"  # in the scope: the connection, where it can be written to without `send`
encode_json = msgspec.json.Encoder().encode


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + encode_json(data) + b"\n\n"


class TextEvents:
    """Events that differ in their text alone: made once for each choice, then only the text is put in."""

    MARK = "\ue000fledge\ue000"  # private use: nothing else in an event holds it

    def __init__(self, make: Callable[[int, str], bytes]) -> None:
        self.make = make
        self.parts: dict[int, list[bytes]] = {}

    def event(self, index: int, text: str) -> bytes:
        parts = self.parts.get(index)
        if parts is None:
            parts = self.parts[index] = self.make(index, self.MARK).split(encode_json(self.MARK))
            assert len(parts) == 2
        return parts[0] + encode_json(text) + parts[1]


class Call(Protocol):
    """A request that is ready for the engine."""

    @property
    def works(self) -> list[Work]: ...

    @property
    def options(self) -> CallOptions: ...


class EventWriter(Protocol):
    """How an API writes its stream; each gives bytes of whole events, or nothing."""

    def begin(self) -> bytes: ...

    def push(self, progress: Progress) -> bytes: ...

    def end(self) -> bytes: ...


class ExposeSocket:
    """The outermost layer: puts uvicorn's connection into the scope."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Coroutine[Any, Any, None]]) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        cycle: Any = getattr(send, "__self__", None)
        if hasattr(cycle, "transport"):
            scope[CUT] = partial(_cut, cycle)
        if type(cycle).__module__ == "uvicorn.protocols.http.httptools_impl":
            scope[SOCKET] = ChunkedSocket(cycle)
        await self.app(scope, receive, send)


def _cut(cycle: Any) -> None:
    """Drops the connection and what is not sent. uvicorn is told first, or it would log an answer that is not complete."""
    cycle.disconnected = True
    cycle.transport.abort()


class ChunkedSocket:
    """A response of uvicorn's whose head has been sent, chunked (RFC 9112, 7.1)."""

    def __init__(self, cycle: Any) -> None:
        self.cycle, self.flow, self.transport = cycle, cycle.flow, cycle.transport

    def write(self, data: bytes) -> bool:
        """Writes a part of the body; False: it takes no more now, and nothing was written."""
        cycle = self.cycle
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class EventStream(Response):
    """Server-sent events of one generation, which ends with the stream: also when the caller hangs up."""

    def __init__(self, generation: Generation, writer: EventWriter, done: bytes = DONE) -> None:
        self.generation, self.writer, self.done = generation, writer, done
        self.background = None
        self._unsent: list[bytes] = []
        self._last: bytes | None = None  # what ends the stream, once it is known
        self._is_gone = False  # the caller
        self._wake = asyncio.Event()
        self._socket: ChunkedSocket | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(_disconnected(receive))
        leaving.add_done_callback(self._leave)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
            self._socket = socket = scope.get(SOCKET)
            self._put(self.writer.begin())
            self.generation.attach(lambda progress: self._put(self.writer.push(progress)), self._end)
            while not self._is_gone and (self._unsent or self._last is None):
                await self._wake.wait()
                self._wake.clear()
                while self._unsent and not self._is_gone:
                    unsent, self._unsent = b"".join(self._unsent), []
                    self._socket = None  # in order: what comes meanwhile waits behind this
                    await send({"type": "http.response.body", "body": unsent, "more_body": True})
                self._socket = socket
            if not self._is_gone:
                await send({"type": "http.response.body", "body": self._last, "more_body": False})
        finally:
            self.generation.close()
            leaving.cancel()

    def _put(self, data: bytes) -> None:
        if not data:
            return
        if not self._unsent and self._socket is not None and self._socket.write(data):
            return
        self._unsent.append(data)
        self._wake.set()

    def _end(self, error: Exception | None) -> None:
        """The status has been sent when an error comes: it is told as an event."""
        try:
            last = self.writer.end() if error is None else event(as_api_error(error).body())
        except Exception as failure:
            last = event(as_api_error(failure).body())
        self._last = last + self.done
        self._wake.set()

    def _leave(self, _: object) -> None:
        self._is_gone = True
        self._wake.set()


async def while_there(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`; if the caller hangs up first, it is cancelled."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the caller has gone", 499)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def begin(engine: AsyncEngine, request: Request, preparing: Coroutine[Any, Any, CallT]) -> tuple[CallT, Generation]:
    """Prepares a call and hands it to the engine. One deadline is for all of it: the tokenizer, a grammar and the answer."""
    deadline = engine.new_deadline()

    async def in_time() -> CallT:
        async with asyncio.timeout_at(deadline):
            return await preparing

    try:
        call = await while_there(request, in_time())
    except TimeoutError:
        raise engine.late() from None
    return call, await engine.submit(call.works, call.options, deadline)


async def unless_gone(request: Request, generation: Generation, work: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    """The answer of `work`; if the caller hangs up first, the generation is freed at once."""
    try:
        return Response(encode_json(await while_there(request, work)), media_type="application/json")
    finally:
        generation.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
