"""The stages of `gpu.py --shape`: step times, closed loop, prefill and start of a model of a published shape (`gpu_shapes.py`),
compared with vLLM and with the same step on cuBLAS.

Step times are those of replays of captured graphs, with all rows running at the same context length. Keys and values are noise:
the time of a step does not depend on them, and prefilling 256 prompts of a 32B model takes longer than timing it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import event_time
from gpu_linear_forms import on_cublas
from gpu_loop import closed_loop, record_ahead
from gpu_shapes import FORMATS, SHAPES, Work, drafter_config, peak_rates, random_decoder, random_drafter, random_prompts
from gpu_show import brief, shown
from gpu_steps import forget

from fledge.checkpoints.eagle3 import save_drafter
from fledge.checkpoints.hf import config_to_hf
from fledge.config import ModelConfig
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import DEVICE_PAGE_SIZE, EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.executors.batch_state import GREEDY, NewRows, RowInit
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.engine.executors.graphs import size_for
from fledge.engine.memory import memory_plan
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.sampling import SamplingParams

CONTEXT = 200  # tokens before the timed steps
STEPS = 20  # timed replays
PREFILL_PROMPTS, PREFILL_LENGTH = 16, 1900
LOOP_TOKENS = 128
Figures = dict[str, Any]


@dataclass
class ShapeBench:
    name: str
    config: ModelConfig
    args: argparse.Namespace
    device: str = "cuda"
    capture: bool | None = None  # False: run without graphs, on any device
    results: Figures = field(default_factory=dict)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32

    @cached_property
    def decoder(self) -> Decoder:
        return random_decoder(self.config, self.device, self.dtype, FORMATS.get(self.name))

    @cached_property
    def drafter(self) -> EagleDrafter:
        return random_drafter(drafter_config(self.config), self.device, self.dtype)

    @cached_property
    def work(self) -> Work:
        rates = peak_rates(self.device)
        rates.pop("bytes_per_s_by_clock", None)
        bits = {"fp8": 8.0, "awq": 4 + 48 / 128}.get(FORMATS.get(self.name, ""))
        return Work(self.config, drafter_config(self.config), self.dtype.itemsize, bits, **rates)

    def build(self, rows: int, cache_tokens: int, depth: int = 0, **more: Any) -> Engine:
        config = EngineConfig(
            device=self.device,
            dtype="bfloat16" if self.device == "cuda" else "float32",
            page_size=DEVICE_PAGE_SIZE,
            max_num_seqs=rows,
            max_model_len=min(2048, self.config.max_positions),
            kv_cache_tokens=cache_tokens,
            prefix_caching=False,
            **more,
        )
        speculation = Speculation(self.drafter, depth).fixed_depth() if depth else Speculation(None)
        return build_engine(self.decoder, speculation, config, capture=self.capture)

    def free(self) -> None:
        """Frees the device's memory, before another process needs it."""
        for name in ("decoder", "drafter"):
            vars(self).pop(name, None)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


# steps


@torch.inference_mode()
def place_rows(batch: DeviceBatch, count: int, context: int, tokens: int) -> None:
    """Sets up `count` rows as after a prefill of `context` tokens, with pages for `tokens` more."""
    each = pages_a_row(batch.lookahead, context, tokens)
    inits = [RowInit(row, range(context), range(row * each, (row + 1) * each), tokens) for row in range(count)]
    batch.state.rows.active.zero_()
    new = NewRows(*map(batch.state.upload, batch.new_rows(inits)))
    dtype = batch.decoder.dtype
    batch.choose_first(new, torch.randn(count, batch.decoder.config.hidden_size, device=batch.device, dtype=dtype), GREEDY)
    if batch.method is not None:
        for state in batch.method.row_state:
            state.normal_()


def pages_a_row(lookahead: int, context: int, tokens: int) -> int:
    return -(-(context + tokens + lookahead) // DEVICE_PAGE_SIZE)


@torch.inference_mode()
def step_us(batch: DeviceBatch, count: int, depth: int, steps: int = STEPS) -> float:
    """Microseconds per replay, with all rows running."""
    shape = (size_for(batch.sizes, count), depth, GREEDY, *batch.kv_bucket(CONTEXT))
    batch.record([shape])
    place_rows(batch, count, CONTEXT, tokens_for(depth, steps))
    for _ in range(2):
        batch.graphs.run(*shape)
    found = event_time(lambda: batch.graphs.run(*shape), steps)
    assert int(batch.state.rows.active.sum()) == count, "a row ended while it was timed"
    batch.state.rows.active.zero_()
    return found


def tokens_for(depth: int, steps: int) -> int:
    """Answer length for a timed run: the most that a row may get, and some more."""
    return (depth + 1) * (steps + 8)


def steps(bench: ShapeBench) -> Figures:
    """By rows and depth: microseconds, the same on cuBLAS, the least time the device could take, and its ratio to the time.

    `weights_share`: the time to read all weights, divided by the step time; it ignores the KV cache, and counts an embedding
    that is not read.
    """
    args, work = bench.args, bench.work
    depth, most = args.step_depth, max(args.concurrency)
    found: Figures = {"context": CONTEXT, "depth": depth, **peak_rates(bench.device)}
    tokens = tokens_for(depth, STEPS)
    engine = bench.build(most, most * DEVICE_PAGE_SIZE * pages_a_row(depth + 1, CONTEXT, tokens), depth)
    batch = engine.executor.batch
    for cache in (batch.cache, batch.method.cache):
        for tensor in (cache.keys, cache.values):
            tensor.normal_()
    ways: dict[str, Callable[[], Any]] = {"us": _as_it_is}
    if args.cublas:
        ways["cublas_us"] = on_cublas
    points = [(count, deep) for count in args.concurrency for deep in (0, depth)]
    for way, change in ways.items():
        forget(batch)
        with change():
            for count, deep in points[::-1]:  # the largest first: the others reuse its graph memory
                figures = found.setdefault(label(count, deep), {"rows": count, "depth": deep})
                figures[way] = step_us(batch, count, deep)
                if way == "us":
                    least = work.cycle_us(count, CONTEXT, deep)
                    floor = 1e6 * work.all_weights / work.bytes_per_s
                    figures |= {"least_us": least, "share": least / figures["us"], "weights_share": floor / figures["us"]}
                else:
                    figures["over_cublas"] = figures["cublas_us"] / figures["us"]
                shown(label(count, deep), figures)
    return found


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def label(rows: int, depth: int) -> str:
    return f"{rows} rows, plain" if not depth else f"{rows} rows, depth {depth}"


# prefill and closed loop


def prefill(bench: ShapeBench) -> Figures:
    """Times prompts that arrive together until the first token of the last one, without a drafter."""
    count, length = PREFILL_PROMPTS, min(PREFILL_LENGTH, bench.config.max_positions - 8)
    engine = bench.build(count, count * (length + 2 * DEVICE_PAGE_SIZE))
    prompts = random_prompts(bench.config, count, length)
    params = [SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)] * count

    def seconds() -> float:
        began = time.perf_counter()
        closed_loop(engine, prompts, params, count)
        return time.perf_counter() - began

    for _ in range(2):  # warm-up: compiles kernels and captures graphs, which happens at the second use
        seconds()
    lasted = statistics.median(seconds() for _ in range(bench.args.rounds))
    flops = bench.work.prefill_flops(count, length)
    figures = {"prompts": count, "length": length, "seconds": lasted, "tokens_per_s": count * length / lasted}
    return shown("prefill", figures | {"share": flops / lasted / bench.work.flops_per_s})


def loop_sizes(users: int) -> int:
    """The number of requests of a closed loop."""
    return max(4, 2 * users)


def loop(bench: ShapeBench) -> Figures:
    """Closed loop of plain decoding, prompts included. No speculative figure: drafts of random weights are never accepted."""
    found: Figures = {}
    most = max(bench.args.loop_users)
    engine = bench.build(most, most * DEVICE_PAGE_SIZE * pages_a_row(0, CONTEXT, LOOP_TOKENS + 1))
    for users in bench.args.loop_users:
        prompts = random_prompts(bench.config, loop_sizes(users), CONTEXT)
        params = [SamplingParams(max_tokens=LOOP_TOKENS, temperature=0, ignore_eos=True)] * len(prompts)
        record_ahead(engine, users, [0], [GREEDY], [CONTEXT])
        closed_loop(engine, prompts[:users], params[:users], users)
        done = closed_loop(engine, prompts, params, users)
        figures = {"tokens_per_s": done.tokens_per_s, "tokens_per_s_per_user": done.tokens_per_s / users}
        found[str(users)] = shown(f"{users} users", figures)
    return found


# vLLM


def vllm(bench: ShapeBench) -> Figures:
    """Runs vLLM in its own process, with dummy weights for the target and the same random drafter from a file."""
    args = bench.args
    if bench.name in FORMATS:
        return {"problem": "dummy weights are bf16; compare with the plain shape"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "target").mkdir()
        (folder / "target" / "config.json").write_text(json.dumps(config_to_hf(bench.config) | {"dtype": "bfloat16"}))
        save_drafter(bench.drafter, folder / "drafter")
        bench.free()
        task = {
            "model": str(folder / "target"),
            "drafter": str(folder / "drafter"),
            "depths": [depth for depth in args.vllm_depths if depth] if args.no_vllm_plain else [0, *args.vllm_depths],
            "rows": args.concurrency,
            "context": CONTEXT,
            "vocab_size": bench.config.vocab_size,
            "prefill": [PREFILL_PROMPTS, PREFILL_LENGTH],
            "loops": {users: loop_sizes(users) for users in args.loop_users},
            "loop_tokens": LOOP_TOKENS,
            "rounds": args.rounds,
            "memory": args.vllm_memory,
        }
        (folder / "task.json").write_text(json.dumps(task))
        environment = os.environ | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
        if args.vllm_path:
            environment["PYTHONPATH"] = args.vllm_path
        command = [
            sys.executable,
            str(Path(__file__).with_name("gpu_vllm_steps.py")),
            folder / "task.json",
            folder / "out.json",
        ]
        problem = None
        try:
            done = subprocess.run(command, env=environment, timeout=args.vllm_seconds, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if line.strip()]
                problem = f"ended with code {done.returncode}: " + " | ".join(lines[-12:])
        except subprocess.TimeoutExpired:
            problem = f"took more than {args.vllm_seconds:.0f} s"
        found: Figures = json.loads((folder / "out.json").read_text()) if (folder / "out.json").exists() else {}
    if problem:
        print(f"  vLLM {problem}")
        found["problem"] = problem
    return found


# start and memory


def start(bench: ShapeBench) -> Figures:
    """Times the start from a new process to a ready engine with default settings: no kernel compiled, then all cached."""
    bench.free()
    found: Figures = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("nothing cached", "kernels cached"):
            began = time.perf_counter()
            command = [sys.executable, __file__, bench.name]
            environment = os.environ | {"TRITON_CACHE_DIR": cache}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            lasted = time.perf_counter() - began
            if done.returncode:
                return found | {"problem": done.stderr[-2000:]}
            found[name] = shown(name, {"seconds": lasted, **json.loads(done.stdout.splitlines()[-1])})
    return found


def start_here(name: str) -> None:
    """Runs in the process that `start` times; prints one line of JSON."""
    began = time.perf_counter()
    config = SHAPES[name]
    decoder = random_decoder(config, "cuda", format=FORMATS.get(name))
    drafter = random_drafter(drafter_config(config), "cuda")
    torch.cuda.synchronize()
    with_weights = time.perf_counter()
    engine = build_engine(decoder, Speculation(drafter, 5), EngineConfig())
    lines = engine.warm_up()
    ready = time.perf_counter()
    prompt = random_prompts(config, 1, CONTEXT)
    closed_loop(engine, prompt, [SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)], 1)
    figures = {"weights_s": with_weights - began, "engine_s": ready - with_weights}
    print(json.dumps(figures | {"first_answer_s": time.perf_counter() - ready, "log": lines}))


def fit(bench: ShapeBench) -> Figures:
    """Whether the model starts with default settings in `--memory-gib` of the device's memory, and how much it uses."""
    found: Figures = {}
    total = torch.cuda.get_device_properties(0).total_memory
    limit = int(bench.args.memory_gib * 2**30) or total
    bench.free()
    torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0))
    ballast = torch.empty(max(total - limit, 0), dtype=torch.uint8, device="cuda")  # blocks the rest of the card's memory
    try:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        engine = build_engine(bench.decoder, Speculation(bench.drafter, 5), EngineConfig())
        prompts = random_prompts(bench.config, 8, CONTEXT)
        params = [SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)] * len(prompts)
        closed_loop(engine, prompts, params, len(prompts))
        found = {
            "limit_bytes": limit,
            "plan": memory_plan(engine).describe(),
            "peak_bytes": torch.cuda.max_memory_allocated() - before,
            "cache_tokens": engine.config.kv_cache_tokens,
        }
    finally:
        del ballast
        torch.cuda.set_per_process_memory_fraction(1.0)
    return shown("fit", found)


# the table


def print_table(results: Figures) -> None:
    """Prints Fledge's and vLLM's figures side by side."""
    theirs = results.get("vllm", {})
    lines = [["µs", "", "on cuBLAS", "vLLM", "vLLM / ours", "of the roofline", "weights over time"]]
    for name, one in results.get("steps", {}).items():
        if isinstance(one, dict):
            other = theirs.get("steps", {}).get(name, {}).get("us")
            lines.append(
                [name, one["us"], one.get("cublas_us"), other, other and other / one["us"], one["share"], one["weights_share"]]
            )
    speeds = {"prefill": (results.get("prefill"), theirs.get("prefill"))}
    for users, one in results.get("loop", {}).items():
        speeds[f"{users} users"] = one, theirs.get("loop", {}).get(users)
    lines.append(["tokens/s", "", "", "vLLM", "ours / vLLM", "of the roofline", ""])
    for name, (one, other) in speeds.items():
        if one:
            speed, beside = one["tokens_per_s"], (other or {}).get("tokens_per_s")
            lines.append([name, speed, None, beside, beside and speed / beside, one.get("share"), None])
    for line in lines:
        print("  " + "".join(f"{'–' if cell is None else brief(cell):>18}" for cell in line))


SHAPE_STAGES: dict[str, Callable[[ShapeBench], Figures]] = {
    stage.__name__: stage for stage in (steps, prefill, loop, vllm, start, fit)
}


if __name__ == "__main__":
    start_here(sys.argv[1])
