"""Runs the server: binds, starts the engine and other HTTP processes, serves, and shuts down gracefully.

    main process ── HTTP ──┐                        with --no-engine-process the engine is a thread of the main process
       │ starts            ├── sockets ── engine    each has a socket to the engine; all listen on the same port
       ├── api worker ─────┤
       └── api worker ─────┘

The main process handles signals and ends the others: the engine by closing its socket, API workers by SIGTERM. The system kills
all of them if the main process dies.
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

# uvicorn closes connections this long after `shutdown_timeout`, at which every open request has got an error.
BACKSTOP_SECONDS = 5
WATCH_SECONDS = 0.05
MAX_SOCKET_PATH = 107  # bytes: Linux's sun_path has 108, with the zero at the end

log = logging.getLogger("fledge.serving")


class Server(uvicorn.Server):
    """A uvicorn server whose shutdown waits for running requests, and answers those that exceed the limit with an error."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service
        self.service.engine.before_stop = self._wait_for_workers
        self.workers: list[subprocess.Popen] = []
        self.interrupted = False
        self.ready_line = ""  # logged once, when requests are accepted

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn raises the signal again after shutdown; whether it then arrives as an exception depends on the timing.
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
        """Checks workers and logs the ready line. uvicorn calls it ten times a second."""
        if any(worker.poll() is not None for worker in self.workers) and not self.should_exit:
            self.service.engine.fail("an HTTP process of the server ended")
        if self.ready_line and self.service.engine.status == "ready":
            log.info(self.ready_line)
            self.ready_line = ""
        return await super().on_tick(counter)


def build(flags: ServeFlags, connection: socket.socket | None = None) -> Server:
    """Returns the server of an HTTP process, not started yet. It shuts down if the engine fails."""
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
        # Clients are told apart by address, and anyone can send X-Forwarded-For, so only trusted proxies' headers count.
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
    """Adds the IPv4-mapped form of each address, such as ::ffff:127.0.0.1, which a socket listening on `::` reports."""
    networks = [ipaddress.ip_network(one) for one in addresses]
    mapped = [f"::ffff:{one.network_address}/{96 + one.prefixlen}" for one in networks if one.version == 4]
    return [*addresses, *mapped]


def run(flags: ServeFlags) -> None:
    log_to_stderr(flags.uvicorn_log_level)
    give_back_large_blocks()
    check_files(flags)
    sockets = [] if flags.uds else bind(flags)
    server = build(flags)
    # uvicorn raises the signal again after its graceful shutdown, which has handled it: ignore it then.
    signal.signal(signal.SIGTERM, lambda *_: None)
    scheme = "https" if flags.ssl_certfile else "http"
    where = flags.uds or f"{scheme}://{'localhost' if flags.host in ('0.0.0.0', '::') else flags.host}:{flags.port}"
    names = printable(", ".join(flags.names))
    log.info("loading %s; it will be served at %s", names, where)
    server.ready_line = f"ready: {names} at {where}"
    for note in flags.notes:
        log.warning(printable(note))
    if flags.host in ("127.0.0.1", "::1", "localhost") and not flags.uds:
        log.info("reachable from this machine only; to serve a network use --host 0.0.0.0 and --api-key")
    elif not flags.api_key and not flags.uds:
        log.warning("anyone who can reach %s:%s can use this server; set --api-key", flags.host, flags.port)
    if flags.engine_process:
        log.info("the engine runs in its own process; HTTP processes: %d", flags.api_workers)
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
            # Interrupted while a model is loaded, or while a mask takes minutes. A normal exit would unwind that thread inside
            # C++, which aborts the process.
            code = _exit_code(sys.exception(), server.interrupted)
            sys.stderr.flush()
            os._exit(code)
    if server.service.engine.failure is not None:
        raise server.service.engine.failure
    if server.interrupted:
        raise KeyboardInterrupt


def _exit_code(error: BaseException | None, interrupted: bool) -> int:
    """Returns the exit code for `os._exit`. `error`: the exception that ended the server."""
    if interrupted or isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, SystemExit):  # from uvicorn, which has logged the reason
        return error.code if isinstance(error.code, int) else 1
    if error is not None:
        log.error("the server could not start", exc_info=error)
        return 1
    return 0


def check_files(flags: ServeFlags) -> None:
    """Raises UserError if certificates or the socket's path are unusable, before a model is loaded."""
    if flags.ssl_keyfile and not flags.ssl_certfile:
        raise UserError("--ssl-keyfile needs --ssl-certfile")
    if flags.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(flags.ssl_certfile, flags.ssl_keyfile, lambda: "")
        except OSError as error:  # includes ssl.SSLError
            files = " and ".join(filter(None, (flags.ssl_certfile, flags.ssl_keyfile)))
            raise UserError(f"{files}: cannot be used as certificate and key ({error})") from None
    if flags.uds:
        path = Path(flags.uds)
        if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
            raise UserError(f"--uds {path}: {path.parent} is not a writable folder")
        if path.exists() and not path.is_socket():
            raise UserError(f"--uds {path}: the path exists and is not a socket")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH:
            raise UserError(f"--uds {path}: the path is longer than {MAX_SOCKET_PATH} bytes, the maximum for a socket")


def _end(worker: subprocess.Popen, seconds: float) -> None:
    worker.terminate()
    try:
        worker.wait(seconds)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()


def bind(flags: ServeFlags) -> list[socket.socket]:
    """Returns a listening socket for each HTTP process. Runs before the model is loaded, so that a port in use fails at once.

    The system spreads connections over several sockets. They share the port with each other (SO_REUSEPORT), but must not share
    it with another server: binding once without sharing checks that.
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
    """Runs an API worker. It ignores SIGINT, which reaches the whole process group: the main process ends it by SIGTERM."""
    flags, (connection, listening) = begin_child(sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log_to_stderr(flags.uvicorn_log_level)
    server = build(flags, connection)
    signal.signal(signal.SIGTERM, lambda *_: None)
    server.run(sockets=[listening])
    sys.exit(0 if server.service.engine.failure is None else 1)


if __name__ == "__main__":
    main()
