"""Faults injected into a running engine: a failed step fails only its requests, a lost engine ends the process."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving.conftest import TINY_FLAGS
from tests.serving.processes import ServerProcess
from tests.serving.test_api import CHAT, HELLO
from tests.serving.test_load import free_at_the_end

FAULTY = Path(__file__).with_name("faulty")
BODY = {"messages": HELLO, "max_tokens": 24, "temperature": 0, "ignore_eos": True}


class FaultyServer(ServerProcess):
    """A server whose engine steps fail on demand."""

    def __init__(self, model: Path, fault_file: Path, port: int | None = None, flags: Sequence[str] = ()) -> None:
        self.fault_file = fault_file
        before = dict(os.environ)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(FAULTY), before.get("PYTHONPATH")]))
        os.environ["FLEDGE_TEST_FAULT"] = str(fault_file)
        try:
            super().__init__([str(model), *TINY_FLAGS, *flags], timeout=300, port=port)
        finally:
            os.environ.clear()
            os.environ.update(before)

    def fail(self, fault: str, num_steps: int = 1, after: int = 0) -> None:
        """Makes steps fail. `after`: the number of good steps before."""
        whole = self.fault_file.with_suffix(".new")  # renamed when complete: the server may read the file at any time
        whole.write_text(f"{after} {num_steps} {fault}")
        whole.rename(self.fault_file)

    def ask(self, **more: Any) -> httpx.Response:
        return httpx.post(self.url + CHAT, json=BODY | more, timeout=300)

    def descendants(self) -> list[int]:
        found, todo = [], [self.process.pid]
        while todo:
            for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
                new = [int(pid) for pid in task.read_text().split()]
                found, todo = found + new, todo + new
        return found


@pytest.fixture
def server(tiny_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[FaultyServer]:
    with FaultyServer(tiny_folder, tmp_path / "fault", flags=getattr(request, "param", ())) as process:
        yield process


@pytest.fixture(scope="module")
def lasting(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyServer]:
    """A shared server, for faults that it survives."""
    with FaultyServer(tiny_folder, tmp_path_factory.mktemp("fault") / "fault") as process:
        yield process


@pytest.mark.parametrize("fault", ["error", "memory", "device memory"])
def test_a_step_that_fails_fails_only_its_requests(lasting: FaultyServer, fault: str) -> None:
    right = lasting.ask().json()["choices"]
    for _ in range(4):  # in a row, fewer would end the server
        lasting.fail(fault)
        failed = lasting.ask()
        assert failed.status_code == 500
        assert "injected" not in failed.text
        assert failed.json()["error"]["message"]
        assert lasting.ask().json()["choices"] == right
    assert httpx.get(f"{lasting.url}/health").status_code == 200
    assert httpx.get(f"{lasting.url}/ready").status_code == 200
    free_at_the_end(lasting.url)
    assert "injected" in lasting.output()  # the operator sees the cause in the log


def test_a_stream_gets_an_error_event_if_its_step_fails(lasting: FaultyServer) -> None:
    lasting.fail("error", after=5)
    with httpx.stream("POST", lasting.url + CHAT, json=BODY | {"stream": True, "max_tokens": 400}, timeout=300) as response:
        first, *rest = [line for line in response.iter_lines() if line]
    assert response.status_code == 200
    assert first.startswith("data: {")
    assert any('"error"' in line for line in rest), rest[-3:]
    assert lasting.ask().status_code == 200


@pytest.mark.parametrize(("fault", "num_steps"), [("error", 3), ("memory", 3), ("device", 1), ("exit", 1)])
def test_an_engine_that_cannot_be_trusted_ends_the_process(server: FaultyServer, fault: str, num_steps: int) -> None:
    server.fail(fault, num_steps)
    for _ in range(num_steps):
        try:
            assert server.ask().status_code in (500, 503)
        except httpx.TransportError:  # the server may have exited already
            assert fault == "exit" or num_steps == 1
    assert server.process.wait(30) not in (0, None), server.output()
    last = server.output().strip().splitlines()[-1]
    assert last.startswith("fledge: the engine"), last


@pytest.mark.parametrize("server", [(), ("--engine-process", "--api-workers", "2")], indirect=True, ids=["thread", "process"])
def test_an_engine_that_is_killed_ends_the_process(server: FaultyServer, tiny_folder: Path, tmp_path: Path) -> None:
    """All streams end, the exit code is not 0, no process is left, and the port can be used again."""
    right = server.ask().json()["choices"]
    server.ask(structured_outputs={"choice": ["yes", "no"]})  # so that there is a grammar process too
    children = server.descendants()

    def stream(_: int) -> str:
        body = BODY | {"stream": True, "max_tokens": 480}
        try:
            last = "data: [DONE]"
            while last == "data: [DONE]":  # until the engine is killed
                with httpx.stream("POST", server.url + CHAT, json=body, timeout=60) as response:
                    last = [line for line in response.iter_lines() if line][-1]
            return f"{response.status_code} {last}"
        except httpx.TransportError as error:
            return repr(error)

    with ThreadPoolExecutor(8) as threads:
        streams = threads.map(stream, range(8))
        time.sleep(0.5)
        server.fail("kill")
        code = server.process.wait(60)
        outcomes = list(streams)
    assert code not in (0, None)
    assert len(outcomes) == 8  # each stream got an error or was cut off; none hangs
    deadline = time.monotonic() + 120  # a process that is still starting notices it later
    while any(_is_running(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in children if _is_running(pid)]
    with FaultyServer(tiny_folder, tmp_path / "fault", port=server.port) as again:
        assert again.ask().json()["choices"] == right


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_liveness_and_readiness_while_a_model_is_loaded(tiny_folder: Path) -> None:
    """`/health` reports the engine's state, `/ready` whether a request would be accepted. Neither waits for the model."""
    with ServerProcess([str(tiny_folder), *TINY_FLAGS], wait=False) as server:
        seen = set()
        deadline = time.monotonic() + 300
        while "ready" not in {status for _, status, _ in seen}:
            assert time.monotonic() < deadline, server.output()
            try:
                health, ready = (httpx.get(server.url + path, timeout=60) for path in ("/health", "/ready"))
            except httpx.TransportError:
                time.sleep(0.05)
                continue
            seen.add((health.status_code, health.json()["status"], ready.status_code))
            if health.json()["status"] == "loading":
                refused = httpx.post(server.url + CHAT, json=BODY, timeout=60)
                assert refused.status_code in (200, 503)
                if refused.status_code == 503:
                    assert int(refused.headers["Retry-After"]) > 0
        assert {(status, code) for code, status, _ in seen} <= {("loading", 503), ("ready", 200)}
        assert json.loads(httpx.get(f"{server.url}/ready").text)["ready"] is True
