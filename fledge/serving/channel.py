"""Messages over a socket that never make their sender wait.

A frame is its length and a msgpack message. What the socket does not take is kept, and sent when it can be. That is bounded
without a limit of its own: an HTTP process has a bounded number of answers under way, each of bounded length, and the engine
sends nothing else.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")
LENGTH_BYTES = 4
READ_BYTES = 1 << 20
_encode = msgspec.msgpack.Encoder().encode


class Channel(Generic[Received]):
    """One end. `kinds`: what the other end sends."""

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_closed = False  # by the other end, and all that it sent has been read
        self._is_broken = False  # nothing can be sent any more
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._unsent: deque[memoryview] = deque()
        self._received = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def send(self, message: object) -> None:
        if self._is_broken:
            return
        data = _encode(message)
        self._unsent.append(memoryview(len(data).to_bytes(LENGTH_BYTES, "little") + data))
        if len(self._unsent) == 1:
            self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        unsent = self._unsent
        try:
            while unsent:
                sent = self.connection.send(unsent[0])
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                else:
                    unsent.popleft()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:  # the other end has gone; its last words may be unread, and reading says when it closed
            unsent.clear()
            self._is_broken = True

    def receive(self) -> list[Received]:
        """All messages that have arrived."""
        messages: list[Received] = []
        if self.is_closed:
            return messages
        try:
            data = self.connection.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return messages
        except OSError:
            data = b""
        if not data:
            self.is_closed = True
            return messages
        received = self._received
        received += data
        at = 0
        while len(received) - at >= LENGTH_BYTES:
            end = at + LENGTH_BYTES + int.from_bytes(received[at : at + LENGTH_BYTES], "little")
            if end > len(received):
                break
            with memoryview(received) as view:
                messages.append(self._decode(view[at + LENGTH_BYTES : end]))
            at = end
        del received[:at]
        return messages

    def close(self) -> None:
        self.is_closed = True
        self.connection.close()
