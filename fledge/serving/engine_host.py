"""Runs the engine loop in a process of its own, or in a thread of the only HTTP process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fledge.serving.flags import ServeFlags

if TYPE_CHECKING:
    from fledge.serving.engine_loop import EngineLoop

PR_SET_PDEATHSIG = 1


class EngineThread:
    """Runs the engine loop in a daemon thread, so that the process can exit while a model is loaded."""

    def __init__(self, flags: ServeFlags, connections: Sequence[socket.socket], build: Any = None) -> None:
        self.flags, self.connections, self.build = flags, connections, build
        self.loop: EngineLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        from fledge.serving.build import build
        from fledge.serving.engine_loop import EngineLoop

        self.loop = EngineLoop(self.flags, self.connections, self.build or build)
        self._thread.start()

    def _run(self) -> None:
        assert self.loop is not None
        self.loop.run()

    def join(self, timeout: float) -> bool:
        """Waits for the thread to end, after its connection was closed. Returns False if it still runs."""
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive() and not (self.loop is not None and self.loop.has_masks_left)

    def why_ended(self) -> str:
        """Returns the reason to report if the engine ended without sending one."""
        return "the engine's thread ended"


class EngineProcess:
    """Runs the engine loop in a new interpreter, which shares no threads or device state with this one and ends with it."""

    def __init__(self, flags: ServeFlags, connections: Sequence[socket.socket]) -> None:
        self.flags, self.connections = flags, connections
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        self.process = start_child("fledge.serving.engine_host", self.flags, self.connections)
        for connection in self.connections:
            connection.close()

    def join(self, timeout: float) -> bool:
        """Waits for the process to end, and kills it after `timeout` seconds."""
        assert self.process is not None
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        return True

    def why_ended(self) -> str:
        assert self.process is not None
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            return "the engine's process closed its connection"
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"the engine's process {how}"


EngineHost = EngineThread | EngineProcess


def start_child(module: str, flags: ServeFlags, connections: Sequence[socket.socket]) -> subprocess.Popen:
    """Starts `python -m MODULE PID DESCRIPTOR…`, which reads the flags from its standard input."""
    descriptors = [connection.fileno() for connection in connections]
    process = subprocess.Popen(
        [sys.executable, "-m", module, str(os.getpid()), *map(str, descriptors)], pass_fds=descriptors, stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    with process.stdin as pipe:
        pickle.dump(flags, pipe)
    return process


def begin_child(arguments: Sequence[str]) -> tuple[ServeFlags, list[socket.socket]]:
    """Reads what `start_child` passed to this process. From here on this process is killed when its parent dies."""
    parent, *descriptors = map(int, arguments)
    with contextlib.suppress(OSError, AttributeError):  # not Linux: there the closed connection ends the loop
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before prctl
        os._exit(1)
    flags = pickle.load(sys.stdin.buffer)
    return flags, [socket.socket(fileno=descriptor) for descriptor in descriptors]


def main() -> None:
    """Runs the engine process. It ignores SIGINT and SIGTERM: HTTP processes handle them, finish requests, then disconnect."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    flags, connections = begin_child(sys.argv[1:])
    from fledge.serving.logs import give_back_large_blocks, log_to_stderr

    log_to_stderr(flags.uvicorn_log_level)
    give_back_large_blocks()
    from fledge.serving.build import build
    from fledge.serving.engine_loop import EngineLoop

    failure = EngineLoop(flags, connections, build).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if failure is None else 1)  # does not wait for threads that compile grammars


if __name__ == "__main__":
    main()
