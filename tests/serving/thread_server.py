"""A server with real sockets in a thread of this process: tests can access its objects, and no process has to start."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Sequence

import httpx

from fledge.serving import flags
from fledge.serving.server import build


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.tracebacks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if record.exc_info:
            self.tracebacks.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class ThreadServer:
    """Use as `with ThreadServer([model, …]) as server:`; has `url`, `service` and `log`. `host`: `::` is for IPv6 and IPv4."""

    def __init__(self, arguments: Sequence[str], host: str = "127.0.0.1") -> None:
        self.socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self.socket.bind((host, 0))
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = build(flags.parse([*arguments, "--shutdown-timeout", "5", "--disable-uvicorn-access-log"]))
        self.service = self.server.service
        self.log = _Records()
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]}, daemon=True)

    def __enter__(self) -> ThreadServer:
        for name in ("fledge", "uvicorn", "uvicorn.error", "asyncio"):
            logging.getLogger(name).addHandler(self.log)
        self.thread.start()
        deadline = time.monotonic() + 60
        while self.service.engine.status == "loading" or not self.server.started:
            assert time.monotonic() < deadline, "the server did not become ready"
            time.sleep(0.02)
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        for name in ("fledge", "uvicorn", "uvicorn.error", "asyncio"):
            logging.getLogger(name).removeHandler(self.log)
        assert not self.thread.is_alive()

    def client(self, timeout: float = 60) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def post(self, path: str, body: object, last: str = "close", receive_buffer: int = 0) -> socket.socket:
        """Sends a request over a new connection and returns its socket without reading the response."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: {last}\r\nContent-Type: application/json\r\n"
        caller = socket.socket()
        if receive_buffer:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)  # must be set before connecting
        caller.connect(("127.0.0.1", self.port))
        caller.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return caller

    def raw(self, data: bytes, timeout: float = 20) -> bytes:
        """Sends raw bytes. Returns the first complete response, or all bytes received until the server closes the connection.

        The sending side stays open meanwhile: uvicorn does not answer a client that has closed it.
        """
        answer = b""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            try:
                connection.sendall(data)
                while part := connection.recv(65536):
                    answer += part
                    head, end, body = answer.partition(b"\r\n\r\n")
                    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", head)
                    if end and length is not None and len(body) >= int(length[1]):
                        break
            except ConnectionError:  # the server closed the connection while we were still sending
                pass
        return answer
