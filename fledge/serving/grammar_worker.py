"""The process that compiles clients' grammars, each in its own fork with a limit on time and memory.

    server                          worker                         fork
    ------                          ------                         ----
    vocabulary   ---- stdin ---->   reads it once
    job socket   --- control --->   forks, hands it the socket --> reads the job, compiles, answers on the socket

A fork that exceeds a limit is ended by the system, and its socket closes without an answer. When the server ends, the control
socket closes, and the worker ends with all its forks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from typing import Any

LENGTH = struct.Struct("!Q")
DONE, REFUSED, UNTRIED = b"+", b"-", b"!"
# Limit on a compiled grammar, which the server receives and keeps in memory.
MAX_RESULT_BYTES = 16 << 20


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)) + data)


def receive(connection: socket.socket) -> bytes | None:
    """Receives one message; None: the other side closed the connection."""
    header = _exactly(connection, LENGTH.size)
    return _exactly(connection, LENGTH.unpack(header)[0]) if header is not None else None


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)


def compile_grammar(compiler: Any, kind: str, text: str) -> Any:
    if kind == "JSON schema":
        # `strict_mode` forbids properties that the schema does not name, as OpenAI's structured output does. With free
        # whitespace a small model may write nothing else until `max_tokens`.
        return compiler.compile_json_schema(text, strict_mode=True, any_whitespace=False)
    if kind == "regular expression":
        return compiler.compile_regex(text)
    return compiler.compile_grammar(text)


def serve(control: socket.socket) -> None:
    import xgrammar

    info = xgrammar.TokenizerInfo.deserialize_json(sys.stdin.read())
    forks: set[int] = set()
    while True:
        ready, _, _ = select.select([control], [], [], 1.0)
        for pid in list(forks):
            if os.waitpid(pid, os.WNOHANG)[0]:
                forks.discard(pid)
        if not ready:
            continue
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            break
        job = socket.socket(fileno=descriptors[0])
        try:
            pid = os.fork()
        except OSError:  # no processes or memory left
            with job, contextlib.suppress(OSError):
                send(job, UNTRIED)
            continue
        if not pid:
            with contextlib.suppress(BaseException):
                control.close()
                _work(job, info)
            os._exit(0)
        job.close()
        forks.add(pid)
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


def _work(connection: socket.socket, info: Any) -> None:
    import xgrammar

    if (message := receive(connection)) is None:
        return None
    job = json.loads(message)
    os.nice(5)
    # Python's signal handlers do not run inside library code; the default action ends the process anywhere.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, job["seconds"])
    with open("/proc/self/statm") as file:
        taken = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (taken + job["bytes"],) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        compiled = compile_grammar(compiler, job["kind"], job["text"])
        began = time.thread_time()
        xgrammar.GrammarMatcher(compiled).fill_next_token_bitmask(xgrammar.allocate_token_bitmask(1, info.vocab_size))
        if time.thread_time() - began > job["mask_seconds"]:
            return send(connection, REFUSED + b"its token masks take too long to compute; make it simpler")
        result = compiled.serialize_json().encode()
    except MemoryError:
        return None  # no answer, as after a kill: the server sends the reason
    except Exception as error:
        if "bad_alloc" in str(error):
            return None
        return send(connection, REFUSED + (str(error).strip() or type(error).__name__).encode())
    if len(result) > MAX_RESULT_BYTES:
        return send(connection, REFUSED + b"its compiled form is too large; make it simpler")
    return send(connection, DONE + result)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the server ends this process
    # The library's log quotes clients' text, so it is dropped.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    serve(socket.socket(fileno=int(sys.argv[1])))
