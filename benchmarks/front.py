"""Measures the throughput of the server's HTTP processes without a model: a stub engine sends tokens at a fixed rate.

    python -m benchmarks.front --users 64 --cycle-us 2000 --tokens-a-cycle 3 --workers 2

Prints the tokens/s that the stub sent and the client received, tokens per event (more than a cycle's tokens if the HTTP process
was behind and merged outputs), TTFT, and the CPU time of each part: `front us an event` is the cost of one event in an HTTP
process, and `tokens/s a core` the throughput of one such process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pickle
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from fledge import sources
from fledge.bench.load import LoadSettings, default_processes, run_level
from fledge.serving import flags as serve_flags
from fledge.serving.channel import Channel
from fledge.serving.engine_host import start_child
from fledge.serving.messages import Abort, Add, AskFigures, Figures, Finish, Output, Ready, Step, Taken, ToEngine
from fledge.serving.server import bind


class Stub:
    """A stub engine: each request gets `tokens` tokens per cycle."""

    def __init__(self, connections: Sequence[socket.socket], tokenizer: str, cycle: float, tokens: int) -> None:
        self.fronts: list[Channel[Any]] = [Channel(connection, ToEngine) for connection in connections]
        self.cycle, self.tokens = cycle, tokens
        self.running: dict[tuple[int, int], int] = {}  # (HTTP process, call) -> tokens left
        chance = random.Random(0)
        self.text = [chance.randrange(1000, 40_000) for _ in range(1 << 14)]
        for front in self.fronts:
            front.send(Ready(49152, 8192, 1024, [2], None, tokenizer, {}))

    def run(self) -> None:
        poll = select.poll()
        for front in self.fronts:
            poll.register(front.fileno(), select.POLLIN)
        due, at = time.perf_counter(), 0
        while not self.fronts[0].is_closed:
            poll.poll(0 if self.running else None)
            for number, front in enumerate(self.fronts):
                front.flush()
                for message in front.receive():
                    self._take(number, message)
            if not self.running:
                due = time.perf_counter()
                continue
            outputs: list[list[Output]] = [[] for _ in self.fronts]
            now = time.perf_counter()
            for (number, call), left in list(self.running.items()):
                count, at = min(self.tokens, left), (at + 7) % (len(self.text) - 64)
                output = Output(call, 0, self.text[at : at + count], num_cached=0)
                if left > count:
                    self.running[number, call] = left - count
                else:
                    del self.running[number, call]
                    output.finish = Finish("length", None, now, now, [0, 0, 0, 0, [], []])
                outputs[number].append(output)
            for front, new in zip(self.fronts, outputs, strict=True):
                if new:
                    front.send(Step(new, 0))
            due += self.cycle
            time.sleep(max(0.0, due - time.perf_counter()))

    def _take(self, number: int, message: Any) -> None:
        front = self.fronts[number]
        match message:
            case Add():
                self.running[number, message.id] = message.params[0].get("max_tokens", 16)
                front.send(Taken(message.id))
            case Abort(call):
                self.running.pop((number, call), None)
            case AskFigures(call):
                front.send(Figures(call, b""))


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def wait_until_ready(url: str, workers: int) -> None:
    import httpx

    for _ in range(8 * workers):
        while True:
            try:
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--requests", type=int, default=0, help="0: four for each user")
    parser.add_argument("--answer-tokens", type=int, default=256)
    parser.add_argument("--cycle-us", type=float, default=2000)
    parser.add_argument("--tokens-a-cycle", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--processes", type=int, default=0, help="client processes; 0: by users and cores")
    parser.add_argument("--model", default="smollm2-135m", help="the model whose tokenizer is used")
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [args.model, "--port", str(port), "--engine-process", "--api-workers", str(args.workers)]
    flags = serve_flags.parse([*words, "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning", "--max-queue", "4096"])
    pairs = [socket.socketpair() for _ in range(args.workers)]
    stub = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.front", "stub", *(str(ours.fileno()) for _, ours in pairs)],
        pass_fds=[ours.fileno() for _, ours in pairs],
        stdin=subprocess.PIPE,
    )
    assert stub.stdin is not None
    with stub.stdin as pipe:
        pickle.dump((str(sources.resolve(args.model)), args.cycle_us / 1e6, args.tokens_a_cycle), pipe)
    listening = bind(flags)
    fronts = [
        start_child("fledge.serving.server", flags, [connection, bound])
        for (connection, _), bound in zip(pairs, listening, strict=True)
    ]
    for one in [*listening, *(side for pair in pairs for side in pair)]:
        one.close()
    try:
        asyncio.run(measure(args, f"http://127.0.0.1:{port}", [front.pid for front in fronts], stub.pid))
    finally:
        for front in fronts:
            front.terminate()
        for process in [*fronts, stub]:
            process.wait(30)


async def measure(args: argparse.Namespace, url: str, fronts: list[int], stub: int) -> None:
    await wait_until_ready(url, args.workers)
    count = args.requests or 4 * args.users
    prompts = [
        [{"role": "user", "content": f"Write a function that adds {number} to a list of numbers."}] for number in range(count)
    ]
    processes = args.processes or default_processes(args.users)
    settings = LoadSettings(url, max_tokens=args.answer_tokens, processes=processes)
    await run_level(settings, prompts[: args.users], args.users)  # warm-up: first requests compile templates
    before = [cpu_seconds(pid) for pid in (*fronts, stub)]
    children = psutil.Process().cpu_times()
    report = await run_level(settings, prompts, args.users)
    spent = [cpu_seconds(pid) - earlier for pid, earlier in zip((*fronts, stub), before, strict=True)]
    now = psutil.Process().cpu_times()
    client = sum(
        getattr(now, name) - getattr(children, name) for name in ("user", "system", "children_user", "children_system")
    )
    if report.errors:
        raise SystemExit(report.errors[0])
    events = sum(len(sample.gaps) + 1 for sample in report.samples)
    cycle_rate = args.users * args.tokens_a_cycle / (args.cycle_us / 1e6)
    front = sum(spent[:-1])
    ttft = report.milliseconds("ttft")
    figures = {
        "users": args.users,
        "tokens/s of the pace": cycle_rate,
        "tokens/s at the client": report.tokens_per_second,
        "tokens an event": report.output_tokens / events,
        "TTFT p50 ms": ttft["p50"],
        "TTFT p99 ms": ttft["p99"],
        "front us an event": 1e6 * front / events,
        "front us a request": 1e6 * front / count,
        "tokens/s a core": report.output_tokens / front,
        "cores: front, stub, client": [round(value / report.seconds, 2) for value in (front, spent[-1], client)],
    }
    for name, value in figures.items():
        print(f"{name:28} {value:,.1f}" if isinstance(value, float) else f"{name:28} {value}")


def run_stub() -> None:
    tokenizer, cycle, tokens = pickle.load(sys.stdin.buffer)
    Stub([socket.socket(fileno=int(one)) for one in sys.argv[2:]], tokenizer, cycle, tokens).run()
    os._exit(0)


if __name__ == "__main__":
    run_stub() if sys.argv[1:2] == ["stub"] else main()
