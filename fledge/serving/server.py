"""Runs the app: binds, serves, and shuts down in an orderly way."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import signal
import socket
import sys

import uvicorn

from fledge.errors import UserError, printable
from fledge.serving.app import create_app
from fledge.serving.flags import ServeFlags
from fledge.serving.http_limits import limited_protocol
from fledge.serving.service import Service

# How long after our own limit connections are cut: by then everyone has been told.
BACKSTOP_SECONDS = 5
M_MMAP_THRESHOLD, LARGE_BYTES = -3, 4 << 20  # glibc's mallopt


class _Server(uvicorn.Server):
    """Waits for running requests as uvicorn does; those that outlast the limit get an answer that says so."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.engine.draining = True
        limit = asyncio.create_task(self._stop_late())
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    async def _stop_late(self) -> None:
        await self.service.engine.stop_after(self.service.flags.shutdown_timeout)
        self.service.close()


def build(flags: ServeFlags) -> _Server:
    """The server, not started yet; it ends when its engine does."""
    service = Service(flags)
    config = uvicorn.Config(
        create_app(service),
        uds=flags.uds,
        root_path=flags.root_path,
        log_level=flags.uvicorn_log_level,
        access_log=not flags.disable_uvicorn_access_log,
        ssl_keyfile=flags.ssl_keyfile,
        ssl_certfile=flags.ssl_certfile,
        http=limited_protocol(flags.limits),
        timeout_keep_alive=math.ceil(flags.limits.idle_timeout),
        timeout_graceful_shutdown=math.ceil(flags.shutdown_timeout) + BACKSTOP_SECONDS,
    )
    server = _Server(config, service)
    service.engine.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def run(flags: ServeFlags) -> None:
    _log_to_stderr(flags.uvicorn_log_level)
    _give_back_large_blocks()
    server = build(flags)
    # The server waits for running requests and then raises the signal again: by then it has been followed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    sockets = None if flags.uds else [_bind(flags)]
    scheme = "https" if flags.ssl_certfile else "http"
    where = flags.uds or f"{scheme}://{'localhost' if flags.host in ('0.0.0.0', '::') else flags.host}:{flags.port}"
    log = logging.getLogger("fledge.serving")
    log.info("serving %s at %s", printable(", ".join(flags.names)), where)
    if flags.host in ("127.0.0.1", "::1", "localhost") and not flags.uds:
        log.info("open to this machine alone; --host 0.0.0.0 opens it to the network (give an --api-key then)")
    elif not flags.api_key and not flags.uds:
        log.warning("open to whoever reaches %s:%s: give an --api-key", flags.host, flags.port)
    server.run(sockets=sockets)
    if server.service.engine.failure is not None:
        raise server.service.engine.failure


def _give_back_large_blocks() -> None:
    """Logits of a crowded step are tens of megabytes. Left alone, glibc comes to keep such blocks, in pieces, once they were
    freed, and a server's memory grows with the most crowded step so far."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)


def _bind(flags: ServeFlags) -> socket.socket:
    """Before the model is loaded: a taken port shows at once."""
    family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((flags.host, flags.port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"cannot listen on {flags.host}:{flags.port} ({error}); choose another --port or --host") from None
    bound.set_inheritable(True)
    return bound


def _log_to_stderr(level: str) -> None:
    log = logging.getLogger("fledge")
    log.setLevel({"trace": "DEBUG"}.get(level, level.upper()))
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
