"""Sends answers as server-sent events, and aborts a request when its client disconnects.

Each event goes from the engine's message to the socket in one call stack. The ASGI task sleeps until the stream ends or the
socket's buffer is full. Through `send`, an event costs a task switch, two async generators and four layers of middleware.
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
SOCKET = "fledge.socket"  # in the scope: the connection, if it can be written to without `send`
encode_json = msgspec.json.Encoder().encode


def event(data: dict[str, Any], name: str | None = None) -> bytes:
    return (f"event: {name}\n" if name else "").encode() + b"data: " + encode_json(data) + b"\n\n"


class TextEvents:
    """Makes events that differ only in their text: the rest is encoded once for each choice."""

    MARK = "\ue000fledge\ue000"  # private-use characters, which occur nowhere else in an event

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
    """A prepared request, ready for the engine."""

    @property
    def works(self) -> list[Work]: ...

    @property
    def options(self) -> CallOptions: ...


class EventWriter(Protocol):
    """Writes the stream of one API. Each method returns whole events, or nothing."""

    def begin(self) -> bytes: ...

    def push(self, progress: Progress) -> bytes: ...

    def end(self) -> bytes: ...


class ExposeSocket:
    """The outermost ASGI layer: puts uvicorn's connection into the scope."""

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
    """Aborts the connection and drops unsent data. Marks it as disconnected first, or uvicorn logs an incomplete response."""
    cycle.disconnected = True
    cycle.transport.abort()


class ChunkedSocket:
    """Writes chunks (RFC 9112, 7.1) to a uvicorn response whose headers have been sent."""

    def __init__(self, cycle: Any) -> None:
        self.cycle, self.flow, self.transport = cycle, cycle.flow, cycle.transport

    def write(self, data: bytes) -> bool:
        """Writes a part of the body. Returns False if the connection accepts no more now, and nothing was written."""
        cycle = self.cycle
        if self.flow.write_paused or not cycle.chunked_encoding or cycle.disconnected:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True


class EventStream(Response):
    """Streams one generation as server-sent events, and closes it at the end or when the client disconnects."""

    def __init__(self, generation: Generation, writer: EventWriter, done: bytes = DONE) -> None:
        self.generation, self.writer, self.done = generation, writer, done
        self.background = None
        self._unsent: list[bytes] = []
        self._last: bytes | None = None  # the stream's last events, once the generation has ended
        self._is_gone = False  # whether the client has disconnected
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
                    self._socket = None  # keeps the order: data that arrives during `send` is queued behind it
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
        """Prepares the stream's last events. The status was sent already, so an error becomes an event."""
        try:
            last = self.writer.end() if error is None else event(as_api_error(error).body())
        except Exception as failure:
            last = event(as_api_error(failure).body())
        self._last = last + self.done
        self._wake.set()

    def _leave(self, _: object) -> None:
        self._is_gone = True
        self._wake.set()


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, or cancels it if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError("the client has disconnected", 499)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()


async def begin(engine: AsyncEngine, request: Request, preparing: Coroutine[Any, Any, CallT]) -> tuple[CallT, Generation]:
    """Prepares a call and submits it to the engine. One deadline covers tokenisation, the grammar and the answer."""
    deadline = engine.new_deadline()

    async def in_time() -> CallT:
        async with asyncio.timeout_at(deadline):
            return await preparing

    try:
        call = await unless_disconnected(request, in_time())
    except TimeoutError:
        raise engine.late() from None
    return call, await engine.submit(call.works, call.options, deadline)


async def json_response(request: Request, generation: Generation, work: Coroutine[Any, Any, dict[str, Any]]) -> Any:
    """Returns the response that `work` gives. If the client disconnects first, closes the generation at once."""
    try:
        return Response(encode_json(await unless_disconnected(request, work)), media_type="application/json")
    finally:
        generation.close()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue
