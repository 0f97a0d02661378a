"""Limits on connections: their number, and the time for headers and for reading answers. Slow clients are disconnected."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fledge.serving.limits import Limits

TURNED_AWAY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
    b'{"error":{"message":"too many connections; try again later","type":"overloaded_error","param":null,"code":"overloaded"}}'
)


def limited_protocol(limits: Limits) -> type[asyncio.Protocol]:
    """Returns uvicorn's HTTP protocol (httptools or h11, whichever is installed) with limits added."""
    if TYPE_CHECKING:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as AutoHTTPProtocol
    else:
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class LimitedProtocol(AutoHTTPProtocol):
        _header_timer: asyncio.TimerHandle | None = None
        _unread_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.max_connections:
                transport.write(TURNED_AWAY)
                transport.close()
                return
            self._expect_headers()

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before = self.cycle
            super().data_received(data)
            if self.cycle is not before and self.cycle is not None:
                self._cancel_timer()  # a request has begun
            elif self._is_between_requests() and self._header_timer is None:
                self._expect_headers()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._cancel_unread_timer()  # the timer of the previous answer, which may have had as many bytes unsent
            self._watch_unread(None)

        def _watch_unread(self, before: int | None) -> None:
            """Aborts a connection if none of the `before` unsent bytes were read. Closing it would wait for them to be read."""
            self._unread_timer = None
            left = self.transport.get_write_buffer_size()
            if not left:
                return
            if left == before:
                self.transport.abort()
            else:
                self._unread_timer = self.loop.call_later(limits.write_timeout, self._watch_unread, left)

        def connection_lost(self, exc: Exception | None) -> None:
            self._cancel_timer()
            self._cancel_unread_timer()
            super().connection_lost(exc)

        def _is_between_requests(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def _expect_headers(self) -> None:
            self._header_timer = self.loop.call_later(limits.header_timeout, self._headers_are_late)

        def _headers_are_late(self) -> None:
            self._header_timer = None
            if self._is_between_requests() and not self.transport.is_closing():
                self.transport.close()

        def _cancel_timer(self) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def _cancel_unread_timer(self) -> None:
            if self._unread_timer is not None:
                self._unread_timer.cancel()
                self._unread_timer = None

    return LimitedProtocol
