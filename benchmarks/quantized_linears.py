"""Measures quantised linears on a GPU, in 90 s: the same bits in every kernel, the time of an 8B layer, the best tiles.

    python benchmarks/quantized_linears.py [--no-tests] [--no-sweep] [--out results.json]

Kernels are compiled first, in one process per core; if the tests run too, they take half of the processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.kernels.formats.fp8 import quantize_fp8, read_fp8
from fledge.kernels.linear.dispatch import case_of, linear
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.register_stream import register_stream
from fledge.kernels.linear.summation import CHUNK, Summation
from fledge.kernels.linear.tiles import QUANTISED_SPLIT, Tile, tiled_linear
from fledge.kernels.quantization import QuantizedWeight, kept_fp8, quantize

ROOT = Path(__file__).parents[1]
TESTS = "tests/kernels/test_linear.py"
ROWS, FORMATS = (1, 4, 8, 16, 32, 64), ("bf16", "fp8", "fp8 in blocks", "int8", "int4")
SECONDS = 60.0  # limit for compiling and tests together; what runs longer is killed and reported
# Linears of an 8B layer: inputs, outputs of the weight, gated.
LAYER = {
    "qkv": (4096, 6144, False),
    "o": (4096, 4096, False),
    "gate_up": (4096, 28672, True),
    "down": (14336, 4096, False),
}
# Launch configurations to try. For few rows: `register_stream` with this many slices of the inputs. A slice is a warp. Other
# slices give other bits: using a faster number would mean changing `summation` for all kernels. For 32 rows: the stream, which
# reads codes twice, and tiles (outputs, rows, inputs, warps, stages). For 64 rows: tiles.
FEW = [(2,), (4,), (8,)]
SOME = {
    32: [(8,), (64, 32, 64, 4, 3), (64, 32, 64, 4, 6), (64, 32, 128, 4, 3), (128, 32, 64, 8, 4)],
    64: [(64, 64, 64, 4, 3), (64, 64, 64, 4, 6), (64, 64, 128, 4, 3), (128, 64, 64, 4, 4), (128, 64, 64, 8, 4)],
}
CACHE_BYTES = 200 << 20  # total size of a weight's copies, so that none of them is in the device's cache


class Job(NamedTuple):
    """A linear in one format with a number of rows. `tile`: a tile, a number of slices to stream in, or None: as dispatched."""

    format: str
    name: str
    rows: int
    tile: tuple[int, ...] | None = None


def weight_of(format: str, name: str) -> Tensor | QuantizedWeight:
    size, outputs, _ = LAYER[name]
    weight = torch.randn(outputs, size, device="cuda", dtype=torch.bfloat16) / size**0.5
    if format == "bf16":
        return weight
    if format == "fp8":
        return kept_fp8(quantize_fp8(weight))
    if format == "fp8 in blocks":
        scales = torch.full((outputs // 128, size // 128), 0.01, device="cuda")
        return kept_fp8(read_fp8((weight / 0.01).to(torch.float8_e4m3fn), scales, (128, 128)))
    return quantize(weight, 8) if format == "int8" else quantize(weight, 4, 128)


def copied(weight: Tensor | QuantizedWeight) -> list[Tensor | QuantizedWeight]:
    if isinstance(weight, Tensor):
        return [weight.clone() for _ in range(-(-CACHE_BYTES // (2 * weight.numel())))]
    return [
        replace(weight, codes=weight.codes.clone(), scales=weight.scales.clone())
        for _ in range(-(-CACHE_BYTES // weight.num_bytes))
    ]


def call(job: Job, weight: Tensor | QuantizedWeight) -> Callable[[], Tensor]:
    size, outputs, gated = LAYER[job.name]
    x = torch.randn(job.rows, size, device="cuda").bfloat16()
    if job.tile is None:
        norm = Norm(torch.ones(size, device="cuda", dtype=torch.bfloat16), 1e-5) if job.name in ("qkv", "gate_up") else None
        residual = None if norm is not None else torch.randn(job.rows, outputs, device="cuda").bfloat16()
        return lambda: linear(x, weight, norm=norm, gated=gated, residual_MO=residual)
    order = case_of(x, weight, gated).order
    if len(job.tile) == 1 and isinstance(weight, QuantizedWeight):
        order = Summation(job.tile[0], False, -(-size // (CHUNK * job.tile[0])) * CHUNK)
        return lambda: register_stream(x, weight, order=order, gated=gated)
    tile, split = Tile(*job.tile), order.slices > 1 and outputs <= QUANTISED_SPLIT
    return lambda: tiled_linear(x, weight, order=order, gated=gated, tile=tile, split=split)


def jobs(sweep: bool) -> Iterator[Job]:
    for format in FORMATS:
        for name in LAYER:
            for rows in ROWS:
                yield Job(format, name, rows)
            if sweep and format != "bf16":
                yield from (Job(format, name, rows, tile) for rows in (1, 16) for tile in FEW)
                yield from (Job(format, name, rows, tile) for rows, tiles in SOME.items() for tile in tiles)


def warm(part: int, parts: int, sweep: bool) -> None:
    """Compiles every `parts`-th weight's kernels, from number `part` on."""
    kinds: dict[tuple[str, str], list[Job]] = {}
    for job in jobs(sweep):
        kinds.setdefault((job.format, job.name), []).append(job)
    for (format, name), some in list(kinds.items())[part::parts]:
        weight = weight_of(format, name)
        for job in some:
            try:
                call(job, weight)()
            except Exception as error:  # a tile that does not fit is left out of the table
                print("left out", job, str(error)[:100])
    torch.cuda.synchronize()


def microseconds(functions: list[Callable[[], Tensor]]) -> float:
    """Microseconds per call, in a captured graph of all calls."""
    for function in functions[:2]:
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for function in functions:
            function()
    repeats = max(3, 60 // len(functions))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1000 / repeats / len(functions)


def run_tests_and_warm(tests: bool, sweep: bool) -> list[str]:
    """Compiles all kernels and runs the tests in parallel; returns lines of text on what failed."""
    start, cores = time.monotonic(), os.cpu_count() or 4
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, *(() if sweep else ("--no-sweep",))]
    warmers = min(cores, len(FORMATS) * len(LAYER)) // (2 if tests else 1)
    processes = []
    for part in range(warmers):
        output = subprocess.PIPE
        args = [*command, "--warm", f"{part}/{warmers}"]
        processes.append(
            (f"warm {part}", subprocess.Popen(args, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment))
        )
    if tests:
        collect = [sys.executable, "-m", "pytest", "-q", "--collect-only", TESTS, "-k", "same_bits and not plain"]
        listed = subprocess.run(collect, capture_output=True, text=True, cwd=ROOT, env=environment).stdout.splitlines()
        ids = [line for line in listed if "::" in line]
        shards = max(cores - warmers, 2)
        for part in range(shards):
            args = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *ids[part::shards]]
            if ids[part::shards]:
                process = subprocess.Popen(
                    args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=environment
                )
                processes.append((f"tests {part}", process))
    lines = []
    for name, process in processes:
        try:
            said = process.communicate(timeout=max(1.0, start + SECONDS - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            said = process.communicate()[0] + "\n(not finished in time)"
        found = [
            line for line in said.splitlines() if line.startswith(("FAILED", "ERROR", "left out")) or "not finished" in line
        ]
        ended = said.strip().splitlines()[-1:] if name.startswith("tests") or process.returncode else []
        lines += [f"{name}: {line[:150]}" for line in (found[:4] + ended)]
    return [*lines, f"compiled and tested in {time.monotonic() - start:.0f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-sweep", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.warm:
        part, parts = map(int, asked.warm.split("/"))
        warm(part, parts, not asked.no_sweep)
        return
    for line in run_tests_and_warm(not asked.no_tests, not asked.no_sweep)[-26:]:
        print(line, flush=True)
    times: dict[str, float] = {}
    best: dict[tuple[str, int, str], tuple[float, Job]] = {}
    for format in FORMATS:
        for name in LAYER:
            weights = copied(weight_of(format, name))
            for job in jobs(not asked.no_sweep):
                if (job.format, job.name) != (format, name):
                    continue
                try:
                    took = microseconds([call(job, weight) for weight in weights])
                except Exception:  # a tile that does not fit
                    continue
                times[f"{format} {name} {job.rows} {job.tile or 'dispatched'}"] = took
                key = (format, job.rows, name)
                if job.tile is not None and took < best.get(key, (float("inf"), job))[0]:
                    best[key] = (took, job)
    print("µs per layer of 8B (4 linears with norm or residual), speed relative to bf16, and share of 4.8 TB/s")
    sizes = {"bf16": 2.0, "fp8": 1.0, "fp8 in blocks": 1.0 + 4 / 128, "int8": 1.0625, "int4": 0.5 + 4 / 128}
    weights_of_layer = sum(size * outputs for size, outputs, _ in LAYER.values())
    for rows in ROWS:
        whole = {format: sum(times[f"{format} {name} {rows} dispatched"] for name in LAYER) for format in FORMATS}
        shown = [
            f"{format} {took:6.1f} {whole['bf16'] / took:4.2f}x {weights_of_layer * sizes[format] / took / 4.8e6:4.0%}"
            for format, took in whole.items()
        ]
        print(f"{rows:3} rows  " + "   ".join(shown))
    for format in FORMATS:
        shown = [" ".join(f"{times[f'{format} {name} {rows} dispatched']:.1f}" for rows in ROWS) for name in LAYER]
        print(
            f"{format} by linear at {ROWS} rows: "
            + "; ".join(f"{name} {text}" for name, text in zip(LAYER, shown, strict=True))
        )
    for format in FORMATS[1:]:
        for rows in (1, 16, 32, 64):
            shown = [
                f"{name} {best[key][0]:.1f} {best[key][1].tile}" for name in LAYER if (key := (format, rows, name)) in best
            ]
            print(f"best tile, {format} {rows} rows: " + "; ".join(shown))
    if asked.out:
        Path(asked.out).write_text(json.dumps(times, indent=1))


if __name__ == "__main__":
    main()
