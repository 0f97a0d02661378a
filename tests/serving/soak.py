"""`make soak`: an hour of ordinary, aborted and hostile requests; records memory, open files, threads and event-loop lag.

    python -m tests.serving.soak --minutes 60 [--model smollm2-135m] [--report soak.json]

Prints a line of progress every ten seconds and exits with code 1 if one of the bounds below is exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from fledge.bench.provenance import provenance, write_json
from tests.serving.conftest import TINY_FLAGS
from tests.serving.model_folder import make_model
from tests.serving.processes import ServerProcess
from tests.serving.test_hostile import (
    BASE,
    CHAT,
    FIELD_CASES,
    GRAMMARS,
    HUGE,
    RAW_BODIES,
    SHAPES,
    TEXT,
    WIRE,
    WRONG,
)
from tests.serving.test_load import free_at_the_end, one_request

SAMPLE_SECONDS = 10.0
WARM_UP = 0.2  # fraction of the run before the baseline is taken
# Allowed growth from the baseline to the end. Memory includes requests that are running when a sample is taken.
MAX_GROWTH_MIB, MAX_MORE_DESCRIPTORS, MAX_MORE_THREADS = 96, 40, 8
# An event-loop timer that is this late is a stall; at most this fraction of timers may stall.
STALL_SECONDS, MAX_STALLS = 1.0, 1 / 1000
MAX_WAITING = 0.05  # fraction of time the server waited for a CPU core; above it, stalls are blamed on the machine
# The longest that the background stream may wait for its first or next event. Measured: 0.4 s.
MAX_PAUSE_SECONDS = 1.0
ORDINARY, HOSTILE = 12, 4
HOSTILE_ADDRESS = "127.0.0.2"  # a different caller to the server, so that its queues do not block ordinary ones
PROGRESS = (
    "{seconds:7.0f} s  {requests:8,} requests  {memory_mib:6,} MiB  {descriptors:4} files  {threads:3} threads  "
    "lag {loop_lag_max_s:.2f} s, {stalls} stalls  pause {longest_pause_s:.2f} s  waited for a core {core_wait_s:.1f} s"
)
LIMITS = ["--max-grammar-seconds", "1", "--max-grammar-memory", "256M", "--header-timeout", "2", "--body-timeout", "2"]
QUIET = ["--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]


def process_tree(pid: int) -> list[int]:
    """The ids of a process and all its descendants."""
    found = [pid]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += [int(child) for child in task.read_text().split()]
            except OSError:  # it ended meanwhile
                continue
    return found


def figures_of(pids: list[int]) -> dict[str, int]:
    """The total memory, open files and threads of processes."""
    total = Counter[str]()
    for pid in pids:
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            total["descriptors"] += len(os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue
        words = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith(("VmRSS", "Threads"))}
        total["memory_mib"] += int(words.get("VmRSS", 0)) >> 10
        total["threads"] += int(words["Threads"])
        total["processes"] += 1
    return dict(total)


def core_wait_seconds(pid: int) -> float:
    """How long the process's first thread, which runs the event loop, was runnable without a CPU core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


class Soak:
    def __init__(self, server: ServerProcess, seconds: float) -> None:
        self.server, self.began, self.seconds = server, time.monotonic(), seconds
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self.samples: list[dict[str, Any]] = []
        self.longest_pause, self.core_wait = 0.0, core_wait_seconds(server.process.pid)

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    @property
    def is_over(self) -> bool:
        return self.passed > self.seconds

    def problem(self, text: str) -> None:
        if len(self.problems) < 20:
            self.problems.append(text)
            print(f"{self.passed:7.0f} s  PROBLEM {text}", flush=True)

    async def ordinary(self, client: httpx.AsyncClient, seed: int) -> None:
        """Sends whole and streamed chats; some clients disconnect early and some requests are invalid."""
        chance = random.Random(seed)
        while not self.is_over:
            try:
                await one_request(client, chance, self.outcomes)
            except (AssertionError, httpx.TransportError) as error:
                self.problem(f"an ordinary request: {error!r}"[:300])
                if self.server.process.poll() is not None:
                    raise AssertionError("the server ended") from error

    async def background(self, client: httpx.AsyncClient) -> None:
        """Streams one answer after the other, checks that they are equal, and records the longest wait for an event."""
        body = {"prompt": "the quick brown", "max_tokens": 200, "ignore_eos": True, "stream": True, "temperature": 0}
        text: str | None = None
        while not self.is_over:
            then, said = time.monotonic(), []
            async with client.stream("POST", TEXT, json=body) as response:
                async for line in response.aiter_lines():
                    self.longest_pause, then = max(self.longest_pause, time.monotonic() - then), time.monotonic()
                    if line.startswith("data: {"):
                        said += [choice["text"] for choice in json.loads(line[6:]).get("choices", [])]
            text = text if text is not None else "".join(said)
            if response.status_code != 200 or "".join(said) != text:
                self.problem(
                    f"the background stream: {response.status_code}, {len(text)} characters before, now {len(''.join(said))}"
                )
            self.outcomes["background"] += 1

    async def hostile(self, client: httpx.AsyncClient, seed: int) -> None:
        """Sends the requests of the hostile set in a random order."""
        requests: list[tuple[str, str, Any]] = [
            (path, "json", BASE[path] | {name: WRONG[kind]}) for path, name, kind in FIELD_CASES
        ]
        requests += [(CHAT, "content", body) for body in RAW_BODIES.values()]
        requests += [(path, "content", body) for path, body in HUGE.values()]
        requests += [(CHAT, "json", BASE[CHAT] | shape) for shape in SHAPES.values()]
        requests += [(CHAT, "json", BASE[CHAT] | {"max_tokens": 12, "structured_outputs": one}) for one in GRAMMARS.values()]
        requests += [("", "wire", data) for data in WIRE.values()]
        random.Random(seed).shuffle(requests)
        for path, kind, content in itertools.cycle(requests):
            if self.is_over:
                return
            try:
                if kind == "wire":
                    await self._wire(content)
                    self.outcomes["hostile, raw"] += 1
                    continue
                response = await client.post(path, **{kind: content}, headers={"Content-Type": "application/json"})
            except (httpx.TransportError, OSError):
                self.outcomes["hostile, cut off"] += 1
                continue
            self.outcomes[f"hostile {response.status_code}"] += 1
            if response.status_code >= 500 and response.status_code != 503:
                self.problem(f"hostile {response.status_code}: {str(content)[:150]}")

    async def _wire(self, data: bytes) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port, local_addr=(HOSTILE_ADDRESS, 0))
        try:
            writer.write(data)
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()

    async def sample(self, client: httpx.AsyncClient) -> None:
        while not self.is_over:
            await asyncio.sleep(min(SAMPLE_SECONDS, self.seconds / 8))
            families = text_string_to_metric_families((await client.get("/metrics")).text)
            seen = {(one.name, one.labels.get("le")): one.value for family in families for one in family.samples}
            name = "fledge:event_loop_lag"
            timers = seen[f"{name}_seconds_count", None]
            taken = {
                "seconds": round(self.passed, 1),
                **figures_of(process_tree(self.server.process.pid)),
                "loop_lag_max_s": round(seen[f"{name}_max_seconds", None], 3),
                "timers": int(timers),
                "stalls": int(timers - seen[f"{name}_seconds_bucket", str(STALL_SECONDS)]),
                "core_wait_s": round(core_wait_seconds(self.server.process.pid) - self.core_wait, 1),
                "longest_pause_s": round(self.longest_pause, 3),
                "requests": sum(self.outcomes.values()),
            }
            self.samples.append(taken)
            print(PROGRESS.format(**taken), flush=True)
            if self.server.process.poll() is not None:
                raise AssertionError("the server ended")

    async def run(self) -> None:
        limits = httpx.Limits(max_connections=200)
        elsewhere = httpx.AsyncHTTPTransport(limits=limits, local_address=HOSTILE_ADDRESS)
        async with (
            httpx.AsyncClient(base_url=self.server.url, timeout=300, limits=limits) as client,
            httpx.AsyncClient(base_url=self.server.url, timeout=300, transport=elsewhere) as other,
        ):
            callers = [self.ordinary(client, seed) for seed in range(ORDINARY)]
            callers += [self.hostile(other, 1000 + seed) for seed in range(HOSTILE)]
            await asyncio.gather(*callers, self.background(client), self.sample(client))

    def judge(self, output: str) -> list[str]:
        """Returns the problems found and the bounds exceeded."""
        wrong = list(self.problems)
        warm = [one for one in self.samples if one["seconds"] >= WARM_UP * self.seconds] or self.samples
        first, last = warm[0], warm[-1]
        bounds = {"memory_mib": MAX_GROWTH_MIB, "descriptors": MAX_MORE_DESCRIPTORS, "threads": MAX_MORE_THREADS}
        for name, most in bounds.items():
            # The minimum of some samples excludes memory that running requests use for a moment.
            before, after = (min(one[name] for one in some) for some in (warm[:3], warm[-3:]))
            if after > before + most:
                wrong.append(f"{name} grew from {before} to {after}")
        is_ours = last["core_wait_s"] < MAX_WAITING * last["seconds"]
        if is_ours and last["stalls"] > MAX_STALLS * last["timers"]:
            wrong.append(f"the event loop stalled {last['stalls']} times")
        if is_ours and self.longest_pause > MAX_PAUSE_SECONDS:
            wrong.append(f"the background stream waited for {self.longest_pause:.2f} s")
        if first is last:
            wrong.append("too short to compare anything")
        if not all(self.outcomes[kind] for kind in ("background", "hostile 400", "whole 200", "stream 200", "left")):
            wrong.append(f"some kind of request was never sent: {dict(self.outcomes)}")
        if "Traceback" in output:
            wrong.append("the log has a traceback: " + output[output.index("Traceback") :][:600])
        return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--model", help="a model to serve instead of a toy")
    parser.add_argument("--report", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [asked.model, "--max-model-len", "2048", "--kv-cache-tokens", "8192"]
        os.environ["PYTHONFAULTHANDLER"] = "1"  # a crash of the server prints a traceback
        if not asked.model:
            arguments = [str(make_model(Path(folder))), *TINY_FLAGS]
        with ServerProcess([*arguments, *LIMITS, *QUIET], timeout=600) as server:
            soak = Soak(server, asked.minutes * 60)
            try:
                asyncio.run(soak.run())
            except BaseException:
                print(f"the server's code: {server.process.poll()}; its log ends with:\n{server.output()[-6000:]}", flush=True)
                raise
            left = free_at_the_end(server.url)
            code = server.terminate(120)
            wrong = soak.judge(server.output())
            if code:
                wrong.append(f"the server ended with code {code}")
    report = {"minutes": asked.minutes, "model": asked.model or "toy", "outcomes": dict(sorted(soak.outcomes.items()))}
    report |= {"at_the_end": left, "samples": soak.samples, "wrong": wrong, "provenance": provenance()}
    if asked.report:
        write_json(asked.report, report)
    print(json.dumps({name: value for name, value in report.items() if name not in ("samples", "provenance")}, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
