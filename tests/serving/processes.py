"""Server processes for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import httpx

# Set FLEDGE_START_SECONDS=1200 on a busy machine.
START_SECONDS = float(os.environ.get("FLEDGE_START_SECONDS", "120"))


class ServerProcess:
    """A server process on a free local port, killed when the block is left."""

    def __init__(
        self, arguments: Sequence[str], wait: bool = True, timeout: float = START_SECONDS, port: int | None = None
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = port or probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed when the block is left)
        command = [sys.executable, "-m", "fledge", "serve", *arguments, "--host", "127.0.0.1", "--port", str(self.port)]
        self.process = subprocess.Popen(command, stdout=self.log, stderr=subprocess.STDOUT, env=dict(os.environ))
        self.wait, self.timeout = wait, timeout

    def __enter__(self) -> ServerProcess:
        if self.wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.__exit__()
                raise
        return self

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"the server ended: {self.output()}"
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(f"the server did not become ready: {self.output()}")

    def output(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def terminate(self, timeout: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def resident_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


async def wait_until_ready(client: httpx.AsyncClient, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        response = await client.get("/health")
        if response.status_code == 200:
            return
        assert response.json()["status"] == "loading", response.text
        await asyncio.sleep(0.02)
    raise AssertionError("the engine did not become ready")
