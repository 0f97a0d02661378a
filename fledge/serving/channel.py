"""Non-blocking messages over a socket.

A frame is a length followed by a msgpack message. Data that the socket does not accept is buffered and sent later. The buffer
needs no limit of its own: the engine sends only answers and replies, and an HTTP process has a bounded number of requests in
flight, each with an answer of bounded length.
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
    """One end of a connection. `kinds`: the message types that the other end sends."""

    def __init__(self, connection: socket.socket, kinds: Any) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.is_closed = False  # closed by the other end, and all that it sent has been read
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
        """Sends as much as the socket accepts now."""
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
        except OSError:  # the other end closed; its last messages may be unread, so `receive` sets `is_closed`
            unsent.clear()
            self._is_broken = True

    def receive(self) -> list[Received]:
        """Returns all messages that have arrived."""
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
