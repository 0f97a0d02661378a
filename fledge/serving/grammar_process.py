"""Starts the process that compiles grammars, and sends it jobs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict

from fledge.errors import RequestError
from fledge.serving.errors import overloaded
from fledge.serving.grammar_worker import DONE, UNTRIED, receive, send
from fledge.serving.limits import Limits

MAX_REMEMBERED, REMEMBERED_SECONDS = 1024, 300.0
TOO_MUCH = "it takes too long or too much memory to compile; make it simpler"


class GrammarProcess:
    """Compiles grammars in another process, which starts at the first call. Safe to call from several threads."""

    def __init__(self, vocabulary: str, limits: Limits) -> None:
        self.vocabulary, self.limits = vocabulary, limits
        self._lock = threading.Lock()
        self._worker: tuple[subprocess.Popen[bytes], socket.socket] | None = None  # and this end of its control socket
        self._closed = False
        # Grammars that failed are not tried again for a while: the reason, and until when.
        self._refused: OrderedDict[str, tuple[str, float]] = OrderedDict()

    def compile(self, kind: str, text: str) -> str:
        """Returns the compiled grammar as the library's JSON. RequestError: it cannot be compiled."""
        key = hashlib.sha256(f"{kind} {text}".encode()).hexdigest()
        reason, until = self._refused.get(key, ("", 0.0))
        if time.monotonic() < until:
            raise RequestError(f"the {kind} cannot be used: {reason}")
        limits = self.limits
        job = {"kind": kind, "text": text, "seconds": limits.max_grammar_seconds, "bytes": limits.max_grammar_memory}
        connection, worker = self._open()
        with connection:
            # The fork has its own time limit; this timeout is for a worker that has died or hangs.
            connection.settimeout(limits.max_grammar_seconds + 30)
            try:
                send(connection, json.dumps(job | {"mask_seconds": limits.max_mask_seconds}).encode())
                answer = receive(connection)
            except OSError:
                answer = None
        if self._closed:
            raise RequestError("the server is shutting down")
        if answer == UNTRIED or (answer is None and _has_ended(worker)):
            # The grammar is not at fault, so it is not remembered as failed.
            raise overloaded("the process that compiles grammars failed; try again", 1)
        if answer is None or answer[:1] != DONE:
            reason = TOO_MUCH if answer is None else _without_place(answer[1:].decode(errors="replace"))
            self._remember(key, reason)
            raise RequestError(f"the {kind} cannot be used: {reason}")
        return answer[1:].decode()

    def _remember(self, key: str, reason: str) -> None:
        with self._lock:
            self._refused[key] = reason, time.monotonic() + REMEMBERED_SECONDS
            if len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)

    def _open(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        """Returns a new job's socket, whose other end was sent to the worker, and the worker's process."""
        ours, theirs = socket.socketpair()
        with theirs, self._lock:
            for attempt in (1, 2):
                if self._worker is None or self._worker[0].poll() is not None:
                    self._worker = self._start()
                process, control = self._worker
                try:
                    socket.send_fds(control, [b"j"], [theirs.fileno()])
                    return ours, process
                except OSError:  # the worker died after the check
                    process.kill()
                    process.wait()
                    if attempt == 2:
                        ours.close()
                        raise
        raise AssertionError

    def _start(self) -> tuple[subprocess.Popen[bytes], socket.socket]:
        if self._closed:
            raise RequestError("the server is shutting down")
        if self._worker is not None:
            self._worker[1].close()
        ours, theirs = socket.socketpair()
        # The vocabulary goes through a file: sending it over the socket would block until the worker has started, some seconds.
        with theirs, tempfile.TemporaryFile() as vocabulary:
            vocabulary.write(self.vocabulary.encode())
            vocabulary.seek(0)
            command = [sys.executable, "-m", "fledge.serving.grammar_worker", str(theirs.fileno())]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=vocabulary, stdout=subprocess.DEVNULL, env=environment
            )
        return process, ours

    def close(self) -> None:
        """Ends the worker and its compilations. Threads that wait in `compile` get an error at once."""
        self._closed = True
        with self._lock:
            if self._worker is None:
                return
            process, control = self._worker
            control.close()
            deadline = time.monotonic() + 2
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            if process.poll() is None:
                process.kill()
                process.wait()


def _has_ended(worker: subprocess.Popen[bytes]) -> bool:
    """Whether the worker has ended. Waits 0.5 s, because its sockets close a moment before its exit status is available."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        worker.wait(0.5)
        return True
    return False


def _without_place(reason: str) -> str:
    """Removes the time and source line with which the library's messages begin: `[12:00:00] /path/file.cc:12: …`."""
    last = reason.splitlines()[-1] if reason.strip() else reason
    if last.startswith("[") and "] " in last:
        place, _, rest = last.partition("] ")[2].partition(": ")
        return rest if rest and "/" in place else last
    return last
