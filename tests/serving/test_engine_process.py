"""The engine in its own process behind several HTTP processes: the same answers, and a clean exit whichever process dies."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.serving.conftest import PATIENT, TINY_FLAGS
from tests.serving.processes import ServerProcess
from tests.serving.test_api import CHAT, HELLO, TEXT
from tests.serving.test_audit import SLOW

SEPARATE = [*TINY_FLAGS, *PATIENT, "--engine-process", "--disable-uvicorn-access-log"]
MAX_DELAY = 20  # seconds, for a busy machine; on an idle one it takes milliseconds
ENDLESS = {"messages": HELLO, "max_tokens": 480, "ignore_eos": True, "stream": True}
GREEDY = {"messages": HELLO, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, GREEDY),
    (CHAT, GREEDY | {"n": 3, "temperature": 1, "seed": 7}),
    (CHAT, GREEDY | {"logprobs": True, "top_logprobs": 3}),
    (CHAT, GREEDY | {"stop": ["a", "e"], "ignore_eos": False}),
    (CHAT, GREEDY | {"logit_bias": {"40": 50}}),
    (CHAT, {"messages": HELLO, "temperature": 0, "max_tokens": 30, "structured_outputs": {"regex": "[a-f]{10}"}}),
    (TEXT, {"prompt": ["the cat", "a dog"], "echo": True, "max_tokens": 12, "temperature": 0}),
    (TEXT, {"prompt": [5, 6, 7], "logprobs": 2, "max_tokens": 12, "temperature": 0}),
]


def start(folder: Path, *more: str) -> ServerProcess:
    return ServerProcess([str(folder), *SEPARATE, *more])


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def children(server: ServerProcess) -> dict[str, list[psutil.Process]]:
    """The server's child processes by role: the engine and the HTTP workers."""
    found: dict[str, list[psutil.Process]] = {"engine": [], "worker": []}
    for child in psutil.Process(server.process.pid).children():
        words = " ".join(child.cmdline())
        if "engine_host" in words:
            found["engine"].append(child)
        elif "fledge.serving.server" in words:
            found["worker"].append(child)
    return found


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[ServerProcess]:
    with start(tiny_folder, "--api-workers", "2") as process:
        yield process


def num_requests(server: ServerProcess) -> float:
    """The number of requests in the engine, running or waiting."""
    lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(names))


def answer(url: str, path: str, body: dict[str, Any]) -> Any:
    response = httpx.post(url + path, json=body, timeout=60)
    assert response.status_code == 200, response.text
    return [choice | {"index": 0} for choice in response.json()["choices"]], response.json()["usage"]["completion_tokens"]


def streamed(url: str, path: str, body: dict[str, Any]) -> list[str]:
    texts: dict[int, str] = {}
    with httpx.stream("POST", url + path, json=body | {"stream": True}, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + piece
    return [texts[index] for index in sorted(texts)]


@pytest.mark.parametrize("number", range(len(REQUESTS)))
def test_answers_equal_those_of_an_engine_in_a_thread(server: ServerProcess, tiny_server: ServerProcess, number: int) -> None:
    path, body = REQUESTS[number]
    choices, count = answer(server.url, path, body)
    assert (choices, count) == answer(tiny_server.url, path, body)
    whole = [choice.get("text") or choice["message"]["content"] for choice in choices]
    assert streamed(server.url, path, body) == whole


def test_every_http_process_reports_the_same_totals(server: ServerProcess) -> None:
    def tokens() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return float(next(line for line in lines if line.startswith("vllm:generation_tokens_total")).rsplit(" ", 1)[1])

    before = tokens()
    for _ in range(8):  # over new connections, which the system distributes over the processes
        answer(server.url, CHAT, GREEDY)
    assert [tokens() for _ in range(8)] == [before + 8 * 24] * 8


def connect(server: ServerProcess, process: psutil.Process) -> http.client.HTTPConnection:
    """Opens connections until this process of the server accepts one; the system distributes them over the processes."""
    for _ in range(200):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.connect()
        port = connection.sock.getsockname()[1]
        for _ in range(20):
            if any(one.raddr and one.raddr.port == port for one in process.net_connections("tcp")):
                return connection
            time.sleep(0.005)
        connection.close()
    raise AssertionError("no connection reached the process")


def test_http_processes_learn_when_others_free_capacity(tiny_folder: Path) -> None:
    """An HTTP process without running requests must be told, too, or it would report a full server for ever."""

    def ask(connection: http.client.HTTPConnection, **body: Any) -> int:
        connection.request("POST", TEXT, json.dumps({"prompt": "the cat"} | body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status

    def is_ready(connection: http.client.HTTPConnection) -> bool:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        response.read()
        return response.status == 200

    with start(tiny_folder, "--api-workers", "2", "--max-num-seqs", "4", "--max-queue", "4") as server:
        main, worker = psutil.Process(server.process.pid), children(server)["worker"][0]
        here, there, beside = connect(server, main), connect(server, worker), connect(server, worker)
        with ThreadPoolExecutor(1) as thread:
            busy = thread.submit(ask, there, n=8, max_tokens=480, ignore_eos=True)
            deadline = time.monotonic() + 30
            while is_ready(here) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_ready(here), "the other process uses the whole capacity"
            assert not busy.done()
            assert ask(here, max_tokens=2, n=4) == 503
            assert busy.result() == 200
        deadline = time.monotonic() + 10
        while not (is_ready(here) and is_ready(beside)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert is_ready(here)
        assert is_ready(beside)
        assert ask(here, max_tokens=2, n=8) == 200


def test_learning_runs_in_the_engine_process(tiny_folder: Path, tmp_path: Path) -> None:
    """Opt-outs reach the engine, /metrics has its learning figures, and the drafter is on disk after the engine has exited."""

    def figures() -> dict[str, float]:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines if line.startswith("fledge:learn_")}

    learn = ["--learn", "--learn-budget", "50", "--learn-memory", "8", "--learn-dir", str(tmp_path / "learnt")]
    with start(tiny_folder, "--api-workers", "2", *learn) as server:
        for number in range(8):
            answer(server.url, CHAT, GREEDY | {"messages": [{"role": "user", "content": "a" * number}]})
        answer(server.url, CHAT, GREEDY | {"learn": False})
        answer(server.url, TEXT, {"prompt": "a b", "max_tokens": 12, "ignore_eos": True, "learn": False})
        found = figures()
        assert found["fledge:learn_requests_total"] == 8
        assert found["fledge:learn_opted_out_total"] == 2
        assert found["fledge:learn_stopped"] == 0
        # Figures are updated while it trains between requests; it may have finished training before the last answer.
        wait_for(lambda: figures()["fledge:learn_steps_total"] > 0)
        wait_for(lambda: figures()["fledge:learn_idle_seconds_total"] > 0)
        process = next(iter(children(server)["engine"]))
    wait_for(lambda: ended(process.pid))
    assert (tmp_path / "learnt" / "current.json").is_file()


def test_http_processes_do_not_load_torch(server: ServerProcess) -> None:
    found = children(server)
    assert len(found["engine"]) == len(found["worker"]) == 1
    for process in (psutil.Process(server.process.pid), *found["worker"]):
        assert not [one.path for one in process.memory_maps() if "libtorch" in one.path]
    assert [one.path for one in found["engine"][0].memory_maps() if "libtorch" in one.path]


def test_a_port_is_not_shared_with_another_server(server: ServerProcess, tiny_folder: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "fledge",
        "serve",
        str(tiny_folder),
        *SEPARATE,
        "--api-workers",
        "2",
        "--port",
        str(server.port),
    ]
    second = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1
    assert "cannot listen" in second.stderr


def test_a_killed_engine_ends_the_server_with_a_reason(tiny_folder: Path) -> None:
    with (
        start(tiny_folder, "--api-workers", "2") as server,
        ThreadPoolExecutor(16) as threads,
    ):
        found = children(server)

        def ask(stream: bool) -> tuple[int, str, float]:
            try:
                response = httpx.post(server.url + CHAT, json=ENDLESS | {"stream": stream}, timeout=60)
                return response.status_code, response.text, time.monotonic()
            except httpx.TransportError as error:
                return 0, repr(error), time.monotonic()

        asked = [threads.submit(ask, stream) for stream in (True, False) * 6]
        wait_for(lambda: num_requests(server) + sum(one.done() for one in asked) >= 12)  # all have arrived
        found["engine"][0].kill()
        killed = time.monotonic()
        late = [threads.submit(ask, False) for _ in range(4)]
        for status, text, at in [one.result() for one in asked]:
            assert at - killed < MAX_DELAY
            # Whole answers get the status, streams an error event; some were complete before.
            assert status == 503 or "not running" in text or "[DONE]" in text or '"finish_reason":"length"' in text, (
                status,
                text,
            )
        assert any("not running" in one.result()[1] for one in asked)
        for status, text, at in [one.result() for one in late]:
            assert at - killed < MAX_DELAY
            assert status in (0, 503), text
        assert server.process.wait(60) == 1
        assert "was killed by SIGKILL" in server.output().splitlines()[-1]
        assert "Traceback" not in server.output()
        wait_for(lambda: all(ended(worker.pid) for worker in found["worker"]))


def test_all_processes_exit_when_the_main_one_is_killed(tiny_folder: Path) -> None:
    with start(tiny_folder, "--api-workers", "2") as server:
        found = [one.pid for kind in children(server).values() for one in kind]
        assert len(found) == 2
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(httpx.post, server.url + CHAT, json=ENDLESS, timeout=60)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGKILL)
            with contextlib.suppress(httpx.TransportError):  # raised unless the answer was complete
                asked.result()
        wait_for(lambda: all(ended(pid) for pid in found))
        port = server.port
    with socket.socket() as again:  # the port is free at once
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


def test_a_killed_http_process_ends_the_server(tiny_folder: Path) -> None:
    with start(tiny_folder, "--api-workers", "2") as server:
        found = children(server)
        found["worker"][0].kill()
        assert server.process.wait(60) == 1
        wait_for(lambda: ended(found["engine"][0].pid))


def test_sigterm_completes_running_requests_in_all_processes(tiny_folder: Path) -> None:
    with (
        start(tiny_folder, "--api-workers", "2") as server,
        ThreadPoolExecutor(12) as threads,
    ):
        found = [one.pid for kind in children(server).values() for one in kind]
        asked = [threads.submit(lambda: httpx.post(server.url + CHAT, json=ENDLESS, timeout=60).text) for _ in range(12)]
        wait_for(lambda: num_requests(server) + sum(one.done() for one in asked) >= 12)  # all have arrived
        assert server.terminate(120) == 0
        assert all('"finish_reason":"length"' in one.result() for one in asked)
        assert all(ended(pid) for pid in found)
        assert "Traceback" not in server.output()


def test_sigterm_while_a_grammar_compiles(tiny_folder: Path) -> None:
    with (
        start(tiny_folder, "--shutdown-timeout", "2") as server,
        ThreadPoolExecutor(1) as threads,
    ):
        found = [one.pid for kind in children(server).values() for one in kind]
        body = {"messages": HELLO, "max_tokens": 4, "structured_outputs": SLOW[0]}
        asked = threads.submit(lambda: httpx.post(server.url + CHAT, json=body, timeout=60))
        time.sleep(2)
        assert not asked.done()
        assert server.terminate(90) == 0
        assert asked.result().status_code == 503
        assert all(ended(pid) for pid in found)
        assert not [one for one in psutil.process_iter(["cmdline"]) if _is_orphaned_grammar_worker(one)]
        assert "Traceback" not in server.output()


def _is_orphaned_grammar_worker(process: psutil.Process) -> bool:
    return process.ppid() == 1 and "fledge.serving.grammar_worker" in (process.info["cmdline"] or ()) and os.getpid() != 1


def test_the_server_is_healthy_when_every_http_process_is(tiny_folder: Path) -> None:
    """A connection may reach any HTTP process: after a 200 from /health, none may answer that the model is loading."""
    with ServerProcess([str(tiny_folder), *SEPARATE, "--api-workers", "2"], wait=False) as server:
        wait_for(lambda: bool(children(server)["worker"]))
        worker = children(server)["worker"][0]
        worker.suspend()  # before it listens: connections reach the main process alone

        def answers() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.post(server.url + CHAT, json=GREEDY, timeout=60).status_code == 200
            return False

        wait_for(answers)
        for path in ("/health", "/ready"):
            response = httpx.get(server.url + path, timeout=60)
            assert (response.status_code, response.json()["status"]) == (503, "loading")
        worker.resume()
        server.wait_until_ready()
        for _ in range(20):
            assert answers()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with ServerProcess([str(tmp_path), "--engine-process", "--api-workers", "2"], wait=False) as server:
        assert server.process.wait(60) == 1
        last = server.output().strip().splitlines()[-1]
        assert last.startswith(f"fledge: {tmp_path}: ")  # the engine's own message, not that it exited
        assert "Traceback" not in server.output()
