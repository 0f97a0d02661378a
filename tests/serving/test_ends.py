"""Parts of the server fail: waiting requests get an error with the reason at once, and other requests are not affected."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from fledge.serving.channel import Channel
from fledge.serving.errors import ApiError
from fledge.serving.http_limits import limited_protocol
from fledge.serving.limits import Limits
from fledge.serving.messages import Failed, Prepared, Taken, ToApiServer, ToEngine
from fledge.serving.request_guard import RequestGuard
from fledge.serving.service import Service
from fledge.serving.streaming import ExposeSocket
from fledge.tokenizer import Tokenizer
from tests.serving.conftest import TINY_FLAGS
from tests.serving.test_api import CHAT, HELLO, TEXT, run
from tests.serving.test_engine_process import wait_for
from tests.serving.thread_server import ThreadServer

ENDLESS = {"messages": HELLO, "max_tokens": 480, "ignore_eos": True}


def test_requests_fail_before_the_reason_of_the_engines_exit_is_known(tiny_folder: Path) -> None:
    """A process that writes a core dump takes seconds to exit after its connection has closed."""
    with ThreadServer([str(tiny_folder), *TINY_FLAGS]) as server, ThreadPoolExecutor(2) as threads:
        engine, may_end = server.service.engine, threading.Event()
        engine.host.why_ended = lambda: may_end.wait(60) and "it was slow to end"
        step = engine.host.loop.engine.step
        engine.host.loop.engine.step = lambda: (time.sleep(0.02), step())[1]

        def ask(stream: bool) -> httpx.Response:
            return httpx.post(server.url + CHAT, json=ENDLESS | {"stream": stream}, timeout=30)

        asked = [threads.submit(ask, stream) for stream in (True, False)]
        wait_for(lambda: engine.num_in_flight == 2)
        engine.host.loop._main.close()
        assert "not running" in asked[0].result(30).text
        assert asked[1].result(30).status_code == 503
        assert httpx.get(f"{server.url}/health", timeout=30).status_code == 503
        engine.fail("a consequence of the exit")
        assert engine.failure is None
        may_end.set()
        server.thread.join(30)
        assert str(engine.failure) == "it was slow to end"


def test_a_failed_step_fails_only_the_requests_in_it(in_process) -> None:
    async def test(client: httpx.AsyncClient, service: Service) -> None:
        loop = service.engine.host.loop
        step, may_fail = loop.engine.step, threading.Event()

        def failing() -> Any:
            if not may_fail.is_set():  # no step before all requests have arrived
                return time.sleep(0.01) or []
            loop.engine.step = step
            raise ZeroDivisionError

        loop.engine.step = failing
        body = {"prompt": "the cat", "max_tokens": 20, "ignore_eos": True}
        asked = [asyncio.create_task(client.post(TEXT, json=body)) for _ in range(20)]
        async with asyncio.timeout(60):
            while len(loop._tracked) + len(loop._waiting) < 20:
                await asyncio.sleep(0.01)
        may_fail.set()
        codes = [(await one).status_code for one in asked]
        assert codes.count(500) == 9  # --max-num-seqs, and one that was admitted ahead
        assert codes.count(200) == 11

    run(in_process, test)


def test_received_messages_are_read_after_the_other_side_has_closed() -> None:
    ours, theirs = socket.socketpair()
    api_server, engine = Channel[ToApiServer](ours, ToApiServer), Channel[ToEngine](theirs, ToEngine)
    engine.send(Taken(7))
    engine.send(Failed("no memory"))
    engine.close()
    api_server.send(Prepared())
    api_server.send(Prepared())
    assert not api_server.has_unsent
    assert api_server.receive() == [Taken(7), Failed("no memory")]
    assert not api_server.is_closed
    assert api_server.receive() == []
    assert api_server.is_closed
    api_server.close()


WORKERS = {
    "dies with the job": "",
    "dies late": "time.sleep(0.5)\n",
    "cannot fork": "from fledge.serving.grammar_worker import UNTRIED, send\n"
    "send(socket.socket(fileno=job[1][0]), UNTRIED)\ntime.sleep(60)\n",
}


@pytest.mark.parametrize("name", WORKERS)
def test_a_failed_grammar_worker_is_a_503_and_not_the_grammars_error(tiny_folder: Path, name: str) -> None:
    pytest.importorskip("xgrammar")
    from fledge.serving.structured import GrammarCompiler

    tokenizer = Tokenizer(tiny_folder)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [2], Limits(max_grammar_seconds=0.1))
    ours, theirs = socket.socketpair()
    take = "import socket, sys, time\njob = socket.recv_fds(socket.socket(fileno=int(sys.argv[1])), 1, 1)\n"
    command = [sys.executable, "-c", take + WORKERS[name], str(theirs.fileno())]
    with subprocess.Popen(command, pass_fds=[theirs.fileno()]) as worker, theirs:
        compiler._process._worker = worker, ours
        with pytest.raises(ApiError, match="try again") as refused:
            compiler.regex("[a-f]{3}")
        assert refused.value.status == 503
        worker.kill()
    compiler._process.limits = Limits(max_grammar_seconds=60)
    assert compiler.regex("[a-f]{3}").compiled is not None
    compiler.close()


UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/tokenize", {"prompt": "the cat " * 20_000, "return_token_strs": True}),
    "streamed": (
        TEXT,
        {"prompt": "the cat", "n": 8, "max_tokens": 200, "ignore_eos": True, "logprobs": 5, "stream": True},
    ),
}


SMALL = 4096  # bytes of socket buffers, so that unread data stays in the server


def small_server(folder: Path, write_timeout: float) -> ThreadServer:
    server = ThreadServer([str(folder), *TINY_FLAGS, "--write-timeout", str(write_timeout)])
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL)  # accepted connections inherit it
    return server


@pytest.mark.parametrize("last", ["close", "keep-alive"])
@pytest.mark.parametrize("name", UNREAD)
def test_a_client_that_does_not_read_is_disconnected(tiny_folder: Path, name: str, last: str) -> None:
    """The connection is aborted: closing would wait for the client to read, which it may never do."""
    with small_server(tiny_folder, 0.5) as server, server.post(*UNREAD[name], last, SMALL):
        connections = server.server.server_state.connections
        wait_for(lambda: bool(connections))
        wait_for(lambda: not connections, 20)
        assert not server.service.engine.num_in_flight
        assert not any("without completing" in line for line in server.log.lines)


def test_a_client_that_reads_slowly_keeps_its_connection(tiny_folder: Path) -> None:
    with small_server(tiny_folder, 2) as server, server.post(*UNREAD["whole"], "close", SMALL) as caller:
        whole, began = b"", time.monotonic()
        while part := caller.recv(SMALL):
            whole += part
            time.sleep(0.05 if time.monotonic() - began < 5 else 0)  # 5 s: more than twice the limit
        assert time.monotonic() - began > 4
    text = whole.partition(b"\r\n\r\n")[2]
    assert json.loads(text)["count"] > 20_000


class Timers:
    """Replaces the event loop's timers: they fire when the test calls `fire`."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, ...]] = []

    def call_later(self, _: float, *work: Any) -> SimpleNamespace:
        self.waiting.append(work)
        return SimpleNamespace(cancel=lambda: self.waiting.remove(work))

    def fire(self) -> None:
        waiting, self.waiting = self.waiting, []
        for callback, *given in waiting:
            callback(*given)


def test_the_write_timeout_starts_again_with_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, aborted, left = limited_protocol(Limits()), [], 1000
    for name in ("on_response_complete", "connection_lost"):
        monkeypatch.setattr(kind.__mro__[1], name, lambda *_: None)
    protocol, timers = kind.__new__(kind), Timers()
    protocol.loop = timers
    protocol.transport = SimpleNamespace(get_write_buffer_size=lambda: left, abort=lambda: aborted.append(left))
    protocol.on_response_complete()
    protocol.on_response_complete()  # the first answer was read, and the second has as many bytes
    assert len(timers.waiting) == 1
    left = 900
    timers.fire()
    assert not aborted
    timers.fire()
    assert aborted == [900]
    protocol.on_response_complete()
    protocol.connection_lost(None)
    assert not timers.waiting


def test_an_aborted_connection_is_marked_as_disconnected_first() -> None:
    """The transport reports it later; with TLS that takes several iterations of the event loop."""

    class Cycle:
        disconnected = False

        def __init__(self) -> None:
            self.seen: list[bool] = []
            self.transport = SimpleNamespace(abort=lambda: self.seen.append(self.disconnected))

        async def send(self, _: Any) -> None:
            await asyncio.sleep(60)

    async def answer(_: Any, __: Any, send: Any) -> None:
        await send({"type": "http.response.body"})

    cycle = Cycle()
    app = ExposeSocket(RequestGuard(answer, (), Limits(write_timeout=0.01)))
    scope = {"type": "http", "path": "/", "headers": []}
    asyncio.run(app(scope, None, cycle.send))
    assert cycle.seen == [True]
