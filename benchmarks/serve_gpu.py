"""Measures the server on a GPU: how much of the engine's speed reaches clients, and vLLM's server under the same load.

    python benchmarks/serve_gpu.py --model FOLDER --drafter FOLDER --prompts humaneval.jsonl --json serving-h200.json
    PYTHONPATH=vllm-site python benchmarks/serve_gpu.py … --vllm plain,eagle

Stages, each in its own processes, one after the other:
  engine   the engine that the server would build, in a closed loop with as many running requests as there are users
  http     the server, and the client of `fledge bench-serve` in several processes: the same prompts, lengths and users
  vllm     vLLM's server with the same client (`--vllm`: plain, eagle or both)

Answers have `--tokens` tokens; end tokens are ignored. The median of `--rounds` rounds counts. The time of every stage is
printed; no level begins after `--seconds`. The JSON file is written after each level.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

from fledge import sources  # noqa: E402
from fledge.bench.load import LoadReport, LoadSettings, run_level  # noqa: E402
from fledge.bench.load_report import read_conversations  # noqa: E402

TICKS = os.sysconf("SC_CLK_TCK")
QUIET_SECONDS = 4.0  # two seconds until the server counts as idle, and time to capture graphs


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="folder of the target, or a built-in name")
    parser.add_argument("--drafter", default="auto", help="folder or name")
    parser.add_argument("--prompts", default="builtin", help="JSONL file with `turns`, or builtin")
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--stages", default="engine,http,vllm")
    parser.add_argument("--server-flags", default="", help="more flags for `fledge serve`, such as '--api-workers 8'")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--processes", type=int, default=0, help="client processes; 0: by users and cores")
    parser.add_argument("--vllm", default="", help="plain, eagle, or both with a comma; empty: not measured")
    parser.add_argument("--vllm-depth", type=int, default=3)
    parser.add_argument("--vllm-drafter", help="folder of the drafter in vLLM's format; for --vllm eagle")
    parser.add_argument("--seconds", type=float, default=600, help="no level begins after this time")
    parser.add_argument("--commit", help="commit of the code, if there is no git")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--as-engine", help=argparse.SUPPRESS)  # set in the engine stage's process: the file for its figures
    return parser.parse_args()


def num_requests(users: int) -> int:
    """Requests per round, as in `gpu.py`: many at low load too, because at the end some users have none left."""
    return max(32, min(64, 16 * users), 8 * users)


def serve_words(args: argparse.Namespace) -> list[str]:
    """Flags for both the engine stage and the server. No prefix caching, because every round has the same prompts."""
    words = [args.model, "--served-model-name", "model", "--drafter", args.drafter, "--device", args.device]
    words += ["--max-model-len", str(args.max_model_len), "--max-num-seqs", str(max(args.concurrency))]
    return [*words, "--no-enable-prefix-caching", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log"]


def repeated(items: list[Any], count: int) -> list[Any]:
    return [items[index % len(items)] for index in range(count)]


# The engine alone


def engine_stage(args: argparse.Namespace) -> None:
    """Measures the engine alone, in its own process; writes the figures after each number of users."""
    sys.path[:0] = [str(ROOT / "benchmarks")]
    from gpu_loop import closed_loop

    from fledge.sampling import SamplingParams
    from fledge.serving import flags
    from fledge.serving.build import build
    from fledge.serving.metrics import Metrics

    engine, _ = build(flags.parse(serve_words(args)), Metrics("model"))
    prompts = [engine.tokenizer.apply_chat_template(list(one)) for one in read_conversations(args.prompts)]
    engine.tokenizer = None  # as in the server, whose engine returns tokens; HTTP processes make text
    params = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
    found: dict[str, dict[str, float]] = {}
    for users in args.concurrency:

        def run(count: int, users: int = users) -> Any:
            return closed_loop(engine, repeated(prompts, count), [params] * count, users)

        run(max(2 * users, 16))
        while engine.idle():  # captures graphs that were used again and not captured ahead
            pass
        loops = [run(num_requests(users)) for _ in range(args.rounds)]
        total = statistics.median(loop.tokens_per_s for loop in loops)
        own = statistics.median(loop.own_tokens_per_s for loop in loops)
        found[str(users)] = {"tokens_per_s": total, "answering_tokens_per_s_per_user": own}
        print(f"  engine, {users:3} users: {total:10,.0f} tokens/s", flush=True)
        Path(args.as_engine).write_text(json.dumps(found))


def measure_engine(args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "engine.json")
        out.write_text("{}")
        try:
            subprocess.run([sys.executable, *sys.argv, "--as-engine", str(out)], timeout=max(seconds, 1), check=True)
        except subprocess.SubprocessError as error:
            print(f"  the engine stage ended early: {error}")
        return json.loads(out.read_text())


# Servers


@contextmanager
def server(command: list[str], environment: dict[str, str], seconds: float) -> Iterator[tuple[str, int]]:
    """Starts a server and yields its URL and process id; at the end kills it and all its child processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
        )
        try:
            url, began = f"http://127.0.0.1:{port}", time.monotonic()
            while not _is_healthy(url):
                if process.poll() is not None or time.monotonic() - began > seconds:
                    log.seek(0)
                    raise RuntimeError("the server did not become ready:\n" + log.read()[-3000:])
                time.sleep(0.25)
            print(f"  ready after {time.monotonic() - began:.0f} s", flush=True)
            yield url, process.pid
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(15)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            log.seek(0)  # after the kill: an unreadable log must not leave the server running
            print("".join(f"  log: {one}" for one in log if "while requests waited" in one), end="", flush=True)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


def cpu_seconds(root: int) -> dict[int, float]:
    """CPU seconds so far of a process and all its descendants, by process id."""
    parents: dict[int, tuple[int, float]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS
    found: dict[int, float] = {}
    todo = [root]
    while todo:
        pid = todo.pop()
        if pid in parents and pid not in found:
            found[pid] = parents[pid][1]
            todo += [child for child, (parent, _) in parents.items() if parent == pid]
    return found


def one_round(settings: LoadSettings, conversations: list[Any], users: int, pid: int) -> tuple[LoadReport, list[float]]:
    """Runs one round; returns the report and how many cores each of the server's processes used."""
    before = cpu_seconds(pid)
    report = asyncio.run(run_level(settings, conversations, users))
    after = cpu_seconds(pid)
    if report.errors:
        raise RuntimeError(f"{len(report.errors)} of {len(report.samples)} requests failed: {report.errors[0]}")
    return report, sorted((round((after[one] - before.get(one, 0.0)) / report.seconds, 2) for one in after), reverse=True)


def measure_level(
    args: argparse.Namespace, url: str, pid: int, model: str, users: int, count: int, rounds: int
) -> dict[str, Any]:
    conversations = read_conversations(args.prompts)
    settings = LoadSettings(url, model=model, max_tokens=args.tokens, ignore_eos=True, timeout=120, processes=args.processes)
    one_round(settings, repeated(conversations, min(count, max(2 * users, 16))), users, pid)
    time.sleep(QUIET_SECONDS)  # while idle, Fledge's server captures graphs that were used again
    found = [one_round(settings, repeated(conversations, count), users, pid) for _ in range(rounds)]
    report, cores = sorted(found, key=lambda pair: pair[0].tokens_per_second)[(rounds - 1) // 2]
    reads = sum(len(sample.gaps) + 1 for sample in report.samples)
    return report.to_dict() | {
        "rounds": [one.tokens_per_second for one, _ in found],
        "longest_waits_ms": [longest_waits(one) for one, _ in found],
        "tokens_per_read": report.output_tokens / reads,
        "cores_by_process": [share for share in cores if share >= 0.01],
    }


def longest_waits(report: LoadReport) -> dict[str, float]:
    """The longest waits for a first and for a next token; they explain a round that is much slower than the others."""
    first = max((one.first_token_seconds or 0.0 for one in report.samples), default=0.0)
    return {"first": 1e3 * first, "next": 1e3 * max((gap for one in report.samples for gap in one.gaps), default=0.0)}


def line(name: str, users: int, found: dict[str, Any], engine: float | None) -> str:
    ttft, itl = found["ttft_ms"], found["itl_ms"]
    share = f"{found['tokens_per_second'] / engine:6.1%}" if engine else "     –"
    return (
        f"  {name:12} {users:5} {found['tokens_per_second']:10,.0f} {share} {found['per_user_tokens_per_second']:10,.0f} "
        f"{ttft.get('p50', 0):7.1f} / {ttft.get('p99', 0):7.1f} {itl.get('p50', 0):6.2f} / {itl.get('p99', 0):6.2f} "
        f"{found['tokens_per_read']:6.2f}   {found['cores_by_process']}   rounds: "
        + ", ".join(
            f"{rate:,.0f} ({waits['first']:.0f}, {waits['next']:.0f} ms)"
            for rate, waits in zip(found["rounds"], found["longest_waits_ms"], strict=True)
        )
    )


HEADING = (
    "  server       users   tokens/s of engine   per user   TTFT p50 /     p99 ITL p50 /    p99 tok/read   cores by process"
)


def vllm_command(args: argparse.Namespace, way: str) -> list[str]:
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(sources.resolve(args.model))]
    words += ["--served-model-name", "model"]
    words += ["--max-model-len", str(args.max_model_len), "--max-num-seqs", str(max(args.concurrency))]
    words += ["--no-enable-prefix-caching", "--gpu-memory-utilization", "0.6", "--disable-uvicorn-access-log"]
    if way == "eagle":
        if not args.vllm_drafter:
            raise SystemExit("--vllm eagle needs --vllm-drafter, the drafter in vLLM's format (`fledge export`)")
        config = {"method": "eagle3", "model": args.vllm_drafter, "num_speculative_tokens": args.vllm_depth}
        words += ["--speculative-config", json.dumps(config)]
    return words


def main() -> None:
    args = arguments()
    if args.as_engine:
        return engine_stage(args)
    began = time.monotonic()
    results: dict[str, Any] = {"settings": {name: value for name, value in vars(args).items() if name != "as_engine"}}

    def left() -> float:
        return args.seconds - (time.monotonic() - began)

    def save() -> None:
        if args.json:
            partial = Path(args.json + ".partial")
            partial.write_text(json.dumps(results, indent=1) + "\n")
            os.replace(partial, args.json)

    def measure(name: str, command: list[str], environment: dict[str, str], few: bool) -> None:
        engine, found = results.get("engine", {}), results.setdefault(name, {})
        try:
            with server(command, environment, left()) as (url, pid):
                print(HEADING)
                for users in args.concurrency:
                    if left() < 0:
                        print(f"  {users} users: skipped, --seconds is over")
                        continue
                    # A slower server gets fewer requests, and one round.
                    count, rounds = (max(16, 2 * users), 1) if few else (num_requests(users), args.rounds)
                    found[str(users)] = measure_level(args, url, pid, "model", users, count, rounds)
                    own = engine.get(str(users), {}).get("tokens_per_s")
                    if own:
                        found[str(users)]["share_of_engine"] = found[str(users)]["tokens_per_second"] / own
                    print(line(name, users, found[str(users)], own), flush=True)
                    save()
        except (RuntimeError, OSError) as error:
            found["failed"] = str(error)
            print(f"  {name}: {error}", flush=True)

    stages = args.stages.split(",")
    work: list[tuple[str, Any]] = []
    if "engine" in stages:
        work.append(("engine", lambda: results.update(engine=measure_engine(args, left()))))
    if "http" in stages:
        command = [sys.executable, "-m", "fledge", "serve", *serve_words(args), *args.server_flags.split()]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        work.append(("http", lambda: measure("fledge", command, {"PYTHONPATH": path}, few=False)))
    if "vllm" in stages:
        environment = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        for way in filter(None, args.vllm.split(",")):
            vllm = vllm_command(args, way)
            work.append((f"vllm {way}", lambda vllm=vllm, way=way: measure(f"vLLM {way}", vllm, environment, few=True)))
    for name, stage in work:
        started = time.monotonic()
        print(f"\n== {name}", flush=True)
        stage()
        results.setdefault("seconds", {})[name] = time.monotonic() - started
        print(f"   ({name}: {time.monotonic() - started:.0f} s)", flush=True)
        save()
    from fledge.bench.provenance import provenance

    results["provenance"] = provenance(read_conversations(args.prompts)) | ({"commit": args.commit} if args.commit else {})
    save()
    print(f"\n{time.monotonic() - began:.0f} s in all")


if __name__ == "__main__":
    main()
