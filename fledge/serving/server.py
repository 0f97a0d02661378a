"""Runs the app: binds, starts the engine and other HTTP processes, serves, and shuts down in an orderly way.

    main process ── HTTP ──┐                        with --no-engine-process the engine is a thread of the main process
       │ starts            ├── sockets ── engine    each has a socket to the engine; all listen on the same port
       ├── api worker ─────┤
       └── api worker ─────┘

The main process has the signals. The others end with it: the engine when its socket closes, workers on SIGTERM; all of them
are killed by the system when it dies.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from fledge.errors import UserError, printable
from fledge.serving.app import create_app
from fledge.serving.engine_host import EngineThread, begin_child, start_child
from fledge.serving.flags import ServeFlags
from fledge.serving.http_limits import limited_protocol
from fledge.serving.logs import give_back_large_blocks, log_to_stderr
from fledge.serving.service import Service
from fledge.serving.streaming import ExposeSocket

# How long after our own limit connections are cut: by then everyone has been told.
BACKSTOP_SECONDS = 5
WATCH_SECONDS = 0.05
MAX_SOCKET_PATH = 107  # Linux's sun_path, with its zero at the end

log = logging.getLogger("fledge.serving")


class Server(uvicorn.Server):
    """Waits for running requests as uvicorn does; those that outlast the limit get an answer that says so."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.engine.before_stop = self._wait_for_workers
        self.workers: list[subprocess.Popen] = []
        self.interrupted = False
        self.ready_line = ""  # logged once, when requests are taken

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal again when it has ended; whether that reaches us as an exception depends on the moment.
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.engine.draining = True
        for worker in self.workers:
            worker.terminate()
        limit = asyncio.create_task(self.service.engine.stop_after(self.service.flags.shutdown_timeout))
        try:
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    async def _wait_for_workers(self) -> None:
        deadline = time.monotonic() + self.service.flags.shutdown_timeout + BACKSTOP_SECONDS
        while any(worker.poll() is None for worker in self.workers) and time.monotonic() < deadline:
            await asyncio.sleep(WATCH_SECONDS)

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's, ten times a second."""
        if any(worker.poll() is not None for worker in self.workers) and not self.should_exit:
            self.service.engine.fail("an HTTP process of the server ended")
        if self.ready_line and self.service.engine.status == "ready":
            log.info(self.ready_line)
            self.ready_line = ""
        return await super().on_tick(counter)


def build(flags: ServeFlags, connection: socket.socket | None = None) -> Server:
    """The server, not started yet; it ends when its engine does."""
    service = Service(flags, connection)
    config = uvicorn.Config(
        ExposeSocket(create_app(service)),
        uds=flags.uds,
        root_path=flags.root_path,
        log_config=None,  # `log_to_stderr` has set the format
        log_level=flags.uvicorn_log_level,
        access_log=not flags.disable_uvicorn_access_log,
        ssl_keyfile=flags.ssl_keyfile,
        ssl_certfile=flags.ssl_certfile,
        # Anyone can write X-Forwarded-For, and callers are told apart by address.
        proxy_headers=bool(flags.trusted_proxies),
        forwarded_allow_ips=with_mapped(flags.trusted_proxies),
        http=limited_protocol(flags.limits),
        timeout_keep_alive=math.ceil(flags.limits.idle_timeout),
        timeout_graceful_shutdown=math.ceil(flags.shutdown_timeout) + BACKSTOP_SECONDS,
    )
    server = Server(config, service)
    service.engine.on_failure = lambda: setattr(server, "should_exit", True)
    return server


def with_mapped(addresses: Sequence[str]) -> list[str]:
    """Adds the form in which a socket that listens on `::` shows IPv4 peers: ::ffff:127.0.0.1."""
    networks = [ipaddress.ip_network(one) for one in addresses]
    mapped = [f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in networks if one.version == 4]
    return [*addresses, *mapped]


def run(flags: ServeFlags) -> None:
    log_to_stderr(flags.uvicorn_log_level)
    give_back_large_blocks()
    check_files(flags)
    sockets = [] if flags.uds else bind(flags)
    server = build(flags)
    # The server waits for running requests and then raises the signal again: by then it has been followed.
    signal.signal(signal.SIGTERM, lambda *_: None)
    scheme = "https" if flags.ssl_certfile else "http"
    where = flags.uds or f"{scheme}://{'localhost' if flags.host in ('0.0.0.0', '::') else flags.host}:{flags.port}"
    names = printable(", ".join(flags.names))
    log.info("loading %s; it will be at %s", names, where)
    server.ready_line = f"ready: {names} at {where}"
    for note in flags.notes:
        log.warning(printable(note))
    if flags.host in ("127.0.0.1", "::1", "localhost") and not flags.uds:
        log.info("open to this machine alone; --host 0.0.0.0 opens it to the network (give an --api-key then)")
    elif not flags.api_key and not flags.uds:
        log.warning("open to whoever reaches %s:%s: give an --api-key", flags.host, flags.port)
    if flags.engine_process:
        log.info("the engine has a process of its own; %s HTTP", _count(flags.api_workers))
    for connection, listening in zip(server.service.other_connections, sockets[1:], strict=True):
        server.workers.append(start_child("fledge.serving.server", flags, [connection, listening]))
        connection.close()
        listening.close()
    try:
        server.run(sockets=sockets[:1] or None)
    finally:
        for worker in server.workers:
            _end(worker, flags.shutdown_timeout + BACKSTOP_SECONDS)
        engine = server.service.engine
        if isinstance(engine.host, EngineThread) and not engine.host.join(0) and engine.failure is None:
            # Interrupted while a model is loaded, or while a mask takes minutes. Python's end would unwind that thread inside
            # C++, which aborts the process.
            code = _exit_code(sys.exception(), server.interrupted)
            sys.stderr.flush()
            os._exit(code)
    if server.service.engine.failure is not None:
        raise server.service.engine.failure
    if server.interrupted:
        raise KeyboardInterrupt


def _exit_code(error: BaseException | None, interrupted: bool) -> int:
    """Of a process that cannot end in the usual way; `error`: what ended the server."""
    if interrupted or isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):  # uvicorn's, which has said why
        return error.code if isinstance(error.code, int) else 1
    if error is not None:
        log.error("the server could not start", exc_info=error)
        return 1
    return 0


def check_files(flags: ServeFlags) -> None:
    """What the server could not begin without, before a model is loaded for it."""
    if flags.ssl_keyfile and not flags.ssl_certfile:
        raise UserError("--ssl-keyfile needs --ssl-certfile")
    if flags.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(flags.ssl_certfile, flags.ssl_keyfile, lambda: "")
        except OSError as error:  # ssl's own are OSErrors too
            files = " and ".join(filter(None, (flags.ssl_certfile, flags.ssl_keyfile)))
            raise UserError(f"{files}: no certificate and key that can be used ({error})") from None
    if flags.uds:
        path = Path(flags.uds)
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"--uds {path}: {path.parent} is no folder that can be written to")
        if path.exists() and not path.is_socket():
            raise UserError(f"--uds {path}: there is something else of that name")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise UserError(f"--uds {path}: longer than the {MAX_SOCKET_PATH} bytes that a socket's path may have")


def _count(number: int) -> str:
    return "one process speaks" if number == 1 else f"{number} processes speak"


def _end(worker: subprocess.Popen, seconds: float) -> None:
    worker.terminate()
    try:
        worker.wait(seconds)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def bind(flags: ServeFlags) -> list[socket.socket]:
    """A socket for each HTTP process, before the model is loaded: a taken port shows at once.

    With several, the system spreads connections over them. They may share the port with each other, but not with another
    server: that is tried first.
    """
    first = _listener(flags, shared=False)
    if flags.api_workers == 1:
        return [first]
    port = first.getsockname()[1]
    first.close()
    return [_listener(flags, shared=True, port=port) for _ in range(flags.api_workers)]


def _listener(flags: ServeFlags, shared: bool, port: int | None = None) -> socket.socket:
    family = socket.AF_INET6 if ":" in flags.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((flags.host, flags.port if port is None else port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise UserError(f"cannot listen on {flags.host}:{flags.port} ({error}); choose another --port or --host") from None
    bound.set_inheritable(True)
    return bound


def main() -> None:
    """A further HTTP process. Ctrl-C reaches the whole group; the main process says when to end."""
    flags, (connection, listening) = begin_child(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(flags.uvicorn_log_level)
    server = build(flags, connection)
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listening])
    sys.exit(0 if server.service.engine.failure is None else 1)


if __name__ == "__main__":
    main()
