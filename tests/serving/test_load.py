"""A load test: many clients, some of which disconnect early or send invalid requests.

FLEDGE_LOAD_SECONDS=120 runs it longer, FLEDGE_LOAD_MODEL=smollm2-135m runs it on a real model with its drafter, and
FLEDGE_LOAD_REPORT=FILE writes the figures to a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from fledge.bench.provenance import provenance, write_json
from tests.serving.conftest import TINY_FLAGS
from tests.serving.processes import ServerProcess

SECONDS = float(os.environ.get("FLEDGE_LOAD_SECONDS", "6"))
MODEL = os.environ.get("FLEDGE_LOAD_MODEL")
REPORT = os.environ.get("FLEDGE_LOAD_REPORT")
CLIENTS = 64
# A KV cache that the load nearly fills.
SMALL_CACHE = ["--max-model-len", "2048", "--kv-cache-tokens", "8192"]
QUIET = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]
BAD = [
    {"messages": []},
    {"messages": [{"role": "user", "content": "hi"}], "temperature": -3},
    {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 10**7},
    {"messages": [{"role": "user", "content": "hi"}], "structured_outputs": {"json": {"type": "nonsense"}}},
]  # fmt: skip


@pytest.fixture(scope="module")
def arguments(request: pytest.FixtureRequest) -> list[str]:
    """The server's arguments: for the tiny model, or for FLEDGE_LOAD_MODEL with its own drafter."""
    return [MODEL, *SMALL_CACHE, *QUIET] if MODEL else [str(request.getfixturevalue("tiny_folder")), *TINY_FLAGS, *QUIET]


@pytest.fixture(scope="module")
def server(arguments: list[str]) -> Iterator[ServerProcess]:
    with ServerProcess(arguments) as process:
        yield process


async def one_request(client: httpx.AsyncClient, chance: random.Random, seen: Counter) -> None:
    kind = chance.random()
    if kind < 0.05:
        response = await client.post("/v1/chat/completions", json=chance.choice(BAD))
        seen[f"bad {response.status_code}"] += 1
        return
    words = " ".join(chance.choice(["the", "cat", "weather", "fox", "dog"]) for _ in range(chance.randint(1, 40)))
    body = {"messages": [{"role": "user", "content": words}], "max_tokens": chance.randint(1, 60), "ignore_eos": True}
    body["temperature"] = chance.choice([0, 1])
    if chance.random() < 0.1:
        body |= {"response_format": {"type": "json_object"}, "ignore_eos": False}
    if kind < 0.15:  # disconnects early
        leave_after = chance.randint(0, 4)
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            async for _ in response.aiter_lines():
                leave_after -= 1
                if leave_after < 0:
                    break
        seen["left"] += 1
    elif kind < 0.55:
        response = await client.post("/v1/chat/completions", json=body)
        seen[f"whole {response.status_code}"] += 1
        if body["ignore_eos"]:
            assert response.status_code == 200, f"{response.status_code}: {response.text}"
            num_tokens = response.json()["usage"]["completion_tokens"]
            assert num_tokens == body["max_tokens"], f"{num_tokens} of {body['max_tokens']} tokens"
    else:
        lines = []
        async with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines, f"{response.status_code}, an empty stream"
        assert lines[-1] == "data: [DONE]", f"{response.status_code}, ends with {lines[-1]}"
        errors = [line for line in lines if '"error"' in line]
        assert not errors, f"{errors}, {body}"
        seen[f"stream {response.status_code}"] += 1


async def load(url: str, seconds: float) -> Counter:
    seen: Counter = Counter()
    deadline = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=CLIENTS)

    async def user(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < deadline:
            await one_request(client, chance, seen)

    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        await asyncio.gather(*(user(seed) for seed in range(CLIENTS)))
    return seen


def free_at_the_end(url: str) -> dict[str, float]:
    """Waits until no request runs or waits and the KV cache is empty, and returns these figures."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    deadline, left = time.monotonic() + 30, {}
    while time.monotonic() < deadline:
        lines = [line for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines() if line.startswith(names)]
        left = {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}
        if len(left) == 3 and not any(left.values()):
            return left
        time.sleep(0.05)
    raise AssertionError(left)


async def wait_for_requests(client: httpx.AsyncClient, asked: Sequence[asyncio.Task], count: int) -> None:
    """Waits until the engine has `count` answers to produce."""
    deadline = time.monotonic() + 60
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    present = 0.0
    while present < count:
        assert time.monotonic() < deadline
        assert not any(task.done() for task in asked), "a request ended before all had arrived"
        lines = [line for line in (await client.get("/metrics")).text.splitlines() if line.startswith(names)]
        present = sum(float(line.rpartition(" ")[2]) for line in lines)


def test_load_with_disconnects_and_invalid_requests(server: ServerProcess) -> None:
    asyncio.run(load(server.url, SECONDS / 2))  # warm up: threads, caches, allocator
    before, descriptors = server.resident_bytes(), server.num_descriptors()
    seen = asyncio.run(load(server.url, SECONDS))
    left = free_at_the_end(server.url)
    grown = server.resident_bytes() - before
    if REPORT:
        figures = {"clients": CLIENTS, "seconds": SECONDS, "model": MODEL or "tiny", "outcomes": dict(sorted(seen.items()))}
        figures |= {"memory_mib": before >> 20, "memory_growth_mib": round(grown / 2**20, 1), "at_the_end": left}
        write_json(REPORT, figures | {"provenance": provenance()})
    assert set(seen) <= {"bad 400", "left", "whole 200", "stream 200"}, seen
    assert min(seen[kind] for kind in ("bad 400", "left", "whole 200", "stream 200")) > 0
    assert grown < 64 << 20, f"memory grew by {grown >> 20} MiB over {sum(seen.values())} requests"
    assert server.num_descriptors() <= descriptors + 8
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert "Traceback" not in server.output()


def test_a_disconnect_frees_the_request_at_once(server: ServerProcess) -> None:
    async def main(url: str) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 480, "ignore_eos": True}
        for stream in (True, False):
            async with httpx.AsyncClient(base_url=url, timeout=60) as client:
                asked = [
                    asyncio.create_task(client.post("/v1/chat/completions", json=body | {"stream": stream})) for _ in range(8)
                ]
                await wait_for_requests(client, asked, 8)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            free_at_the_end(url)

    def aborted() -> float:
        lines = httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines()
        return float(next(line for line in lines if 'finished_reason="abort"' in line).rsplit(" ", 1)[1])

    before = aborted()
    asyncio.run(main(server.url))
    assert aborted() >= before + 16  # none was decoded to the end
    assert "Traceback" not in server.output()


def test_sigterm_under_load_loses_no_accepted_request(arguments: list[str]) -> None:
    async def main(server: ServerProcess) -> tuple[list[str], int]:
        outcomes: list[str] = []
        were_accepted: set[int] = set()
        stopping = asyncio.Event()

        async def user(client: httpx.AsyncClient, seed: int) -> None:
            body = {
                "messages": [{"role": "user", "content": f"the cat {seed}"}],
                "max_tokens": 60,
                "ignore_eos": True,
                "stream": True,
            }
            while not stopping.is_set():
                accepted = False
                try:
                    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                        if accepted := response.status_code == 200:
                            were_accepted.add(seed)
                        lines = [line async for line in response.aiter_lines() if line]
                    complete = lines[-1:] == ["data: [DONE]"] and '"finish_reason":"length"' in lines[-2]
                    outcomes.append("complete" if complete else f"cut: {lines[-2:]}")
                except httpx.TransportError as error:
                    outcomes.append(f"lost: {error!r}" if accepted else "refused")
                    return

        async with httpx.AsyncClient(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=32)) as client:
            users = [asyncio.create_task(user(client, seed)) for seed in range(32)]
            async with asyncio.timeout(60):
                while len(were_accepted) < 32:
                    await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            ended = asyncio.create_task(asyncio.to_thread(server.terminate, 180))
            await asyncio.sleep(0.2)
            stopping.set()
            await asyncio.gather(*users)
            return outcomes, await ended

    with ServerProcess([*arguments, "--shutdown-timeout", "150"]) as server:
        outcomes, code = asyncio.run(main(server))
        assert code == 0, server.output()
        assert set(outcomes) <= {"complete", "refused"}, Counter(outcomes)
        assert outcomes.count("complete") >= 32
        assert "Traceback" not in server.output()


def test_shutdown_has_a_time_limit(arguments: list[str]) -> None:
    """Requests that outlast the limit get an error that the server is shutting down, and the process exits."""

    async def main(server: ServerProcess) -> list[str]:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 480, "ignore_eos": True, "stream": True, "n": 8}
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:

            async def ask() -> str:
                try:
                    return (await client.post("/v1/chat/completions", json=body)).text
                except httpx.TransportError as error:
                    return repr(error)

            asked = [asyncio.create_task(ask()) for _ in range(12)]
            await wait_for_requests(client, asked, 12 * 8)
            assert await asyncio.to_thread(server.terminate, 60) == 0
            return await asyncio.gather(*asked)

    with ServerProcess([*arguments, "--shutdown-timeout", "1"]) as server:
        answers = asyncio.run(main(server))
        assert sum("shutting down" in answer for answer in answers) > 0
        assert all("shutting down" in answer or '"finish_reason":"length"' in answer for answer in answers), answers
        assert "Traceback" not in server.output()


def test_a_model_that_cannot_be_loaded_ends_the_server_with_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    with ServerProcess([str(tmp_path)], wait=False) as server:
        assert server.process.wait(60) == 1
        last = server.output().strip().splitlines()[-1]
        assert last.startswith("fledge: ")
        assert "Traceback" not in server.output()
