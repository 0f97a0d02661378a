"""Measures all launch configurations of a model's linears on a GPU: exact bits, time, and the fastest by shape and rows.

    python benchmarks/gpu_linears.py --json linears.json            # about a minute, most of it compiling in parallel
    python benchmarks/gpu_linears.py --models 135m-d,1.5b-d         # linears of the drafters
    python benchmarks/gpu_linears.py --fill linears.json            # writes fledge/kernels/linear/measured.py; needs no GPU

Times are medians of graphs of 20 launches over 20 weights, with the L2 cache flushed before each graph. `before` is what
dispatch chooses without `staged_mma` and without `measured.CONFIGS`; `rules` is its choice for shapes that are not in the
table; `cuBLAS` sums in any order and has separate elementwise kernels. Forms (kernel, launch configuration) whose bits differ
from `before` are listed and never chosen. At the end, all linears of several layers run one after the other, as in a step.
There each form is chosen again, by the time of the layer, because how well a kernel overlaps with the one before it counts more
than its own time (64 rows of 135M: 25.1 µs per layer with the fastest single forms, 15.5 with others).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_linear_forms import (
    HEAD_ROWS,
    LAYERS,
    MODELS,
    ROWS,
    Kind,
    candidates,
    fill,
    filled,
    head_tiles,
    label,
    on_cublas,
)
from torch import Tensor

from fledge.kernels.linear import dispatch, tiles
from fledge.kernels.linear.dispatch import Case, case_of, linear
from fledge.kernels.linear.reference import Norm
from fledge.kernels.linear.tiles import PREFETCH_ROWS, Tile, tiled_head
from fledge.kernels.rms_norm import rms_norm
from fledge.kernels.sample import PartialArgmax, choose

LAUNCHES, ROUNDS, FLUSHED = 20, 9, 32 << 20
DEVICE, CARD = "cuda", torch.device("cuda")
left_out: set[str] = set()  # kernels
TRIED = 6  # number of the fastest forms of a linear that are tried within a layer


class Inputs:
    """Weights of one kind of linear, and input rows that all calls share."""

    def __init__(self, kind: Kind, copies: int, most_rows: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(0)
        drawn = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        self.kind = kind
        self.weights = [drawn(kind.outputs, kind.inputs) * kind.inputs**-0.5 for _ in range(copies)]
        self.x = drawn(most_rows, kind.inputs)
        self.residual = drawn(most_rows, kind.outputs) if kind.residual else None
        self.norm = Norm(1 + 0.1 * drawn(kind.inputs), 1e-5) if kind.norm or kind.head else None
        self.bias = drawn(kind.outputs) if kind.bias else None

    def call(self, rows: int, copy: int = 0) -> Tensor:
        residual = None if self.residual is None else self.residual[:rows]
        options = {"norm": self.norm, "gated": self.kind.gated, "residual_MO": residual}
        return linear(self.x[:rows], self.weights[copy], self.bias, **options)

    def call_head(self, rows: int, copy: int = 0, tile: Tile | None = None) -> PartialArgmax:
        """Runs norm and head; returns the best token of each block of the vocabulary."""
        assert self.norm is not None
        hidden, weight = rms_norm(self.x[:rows], *self.norm), self.weights[copy]
        return tiled_head(hidden, weight, case_of(hidden, weight).order, tile=tile)

    def call_cublas_head(self, rows: int, copy: int) -> PartialArgmax:
        assert self.norm is not None
        return choose(F.linear(rms_norm(self.x[:rows], *self.norm), self.weights[copy]))


@contextmanager
def ways(
    table: bool = True, forms: dict | None = None, cublas: bool = False, prefetch_rows: int = PREFETCH_ROWS
) -> Iterator[None]:
    """Sets how dispatch chooses: with or without its rule for `staged_mma`, from these measured forms, or cuBLAS for all.
    `prefetch_rows`: most rows for which `tiles` prefetches its first weights."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(dispatch, "CONFIGS", forms or {}))
        if not table:
            rules = tuple(rule for rule in dispatch.TABLE if rule.kernel != "staged_mma")
            stack.enter_context(patch.object(dispatch, "TABLE", rules))
        if cublas:
            stack.enter_context(on_cublas())
        stack.enter_context(patch.object(tiles, "PREFETCH_ROWS", prefetch_rows))
        yield


BEFORE: dict[str, Any] = {"table": False}


def one_form(kind: Kind, kernel: str, numbers: tuple[int, ...]) -> dict[str, Any]:
    return {"forms": {kind.key: ((1 << 30, kernel, numbers),)}}


@lru_cache
def keeper() -> torch.cuda.CUDAGraph:
    """A graph that keeps its memory pool alive: torch cannot capture into a pool whose graphs have all been freed."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin()
        torch.zeros(1, device="cuda")
        graph.capture_end()
    return graph


def graph_time(calls: list[Callable[[], object]], flush: Tensor) -> float:
    """Microseconds per call, with all calls in one graph."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    gc.disable()
    # `torch.cuda.graph` would collect garbage and empty the allocator's cache each time, which takes tens of milliseconds.
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(pool=keeper().pool())
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
    gc.enable()
    times = []
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(ROUNDS + 1):
        flush.sum()  # reads, not writes: written data would be evicted from the cache while the graph runs
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / len(calls))
    return statistics.median(times[1:])


def tried(kind: Kind, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    return (form for form in candidates(kind, rows) if form[0] not in left_out)


def jobs_of(models: list[str]) -> list[tuple[Kind, int, Tile | dict[str, Any] | None]]:
    """One launch of each kernel that will be measured: its kind, rows, and tile (of a head) or way."""
    jobs: dict[object, tuple] = {}
    for kind in (kind for model in models for kind in MODELS[model]):
        if kind.head:
            for rows, tile in itertools.product(HEAD_ROWS, (None, *head_tiles(64))):
                jobs[kind, rows if tile is None else 0, tile] = (kind, rows, tile)
            continue
        for rows in ROWS[kind.model]:
            jobs[kind, rows, "before"] = (kind, rows, BEFORE)
            jobs[kind, rows, "rules"] = (kind, rows, {})
            for kernel, numbers in tried(kind, rows):
                jobs[kind, kernel, numbers] = (kind, rows, one_form(kind, kernel, numbers))
    return list(jobs.values())


def compile_share(models: list[str], without: list[str], share: int, shares: int) -> None:
    """Launches every `shares`-th kernel once, from number `share` on, so that it is in the compile cache."""
    left_out.update(without)
    mine = jobs_of(models)[share::shares]
    for kind in dict.fromkeys(job[0] for job in mine):
        inputs = Inputs(kind, 1, max(ROWS[kind.model]))
        for _, rows, way in (job for job in mine if job[0] == kind):
            if isinstance(way, dict):
                try_one(inputs, rows, way)
            else:
                try_head(inputs, rows, way)


def try_one(inputs: Inputs, rows: int, way: dict[str, Any]) -> Tensor | str:
    """The result, or the reason why there is none."""
    with ways(**way):
        return attempt(lambda: inputs.call(rows), way)


def try_head(inputs: Inputs, rows: int, tile: Tile | None) -> Tensor | str:
    """The best logits and tokens, or the reason why there are none."""

    def chosen() -> Tensor:
        best, ids = inputs.call_head(rows, tile=tile)[:2]
        top = best.max(1).values
        return torch.stack((top, ids.where(best == top[:, None], 1 << 30).min(1).values.float()))

    return attempt(chosen, tile)


def attempt(call: Callable[[], Tensor], what: object) -> Tensor | str:
    try:
        out = call()
        if out.is_cuda:
            torch.cuda.synchronize()
        return out
    except Exception as error:  # a form that needs more resources than the card has
        message = f"{type(error).__name__}: {error}"[:80]
        if "CUDA error" in message:  # CUDA does not work in this process any more
            raise SystemExit(f"{what}: {message}") from error
        return message


def measure(kind: Kind, flush: Tensor) -> list[dict[str, Any]]:
    """Measures all forms of a linear; returns one line per number of rows."""
    size = 2 * kind.inputs * kind.outputs
    copies = max(2, min(LAUNCHES, (2 << 30) // size))
    inputs = Inputs(kind, copies, max(ROWS[kind.model]))
    lines = []
    with ways(**BEFORE):
        wanted = inputs.call(max(ROWS[kind.model]))

    def timed(rows: int, way: dict[str, Any]) -> float:
        with ways(**way):
            return graph_time([partial(inputs.call, rows, i % copies) for i in range(LAUNCHES)], flush)

    for rows in ROWS[kind.model]:
        found: dict[str, float] = {}
        wrong = []
        forms = {}
        for kernel, numbers in tried(kind, rows):
            way, name = one_form(kind, kernel, numbers), label(kernel, numbers)
            out = try_one(inputs, rows, way)
            if isinstance(out, str) or not torch.equal(out, wanted[:rows]):
                wrong.append(f"{name}: {out if isinstance(out, str) else 'other bits'}")
                continue
            found[name], forms[name] = timed(rows, way), (kernel, numbers)
        line: dict[str, Any] = {"model": kind.model, "linear": kind.name, "K": kind.inputs, "N": kind.outputs, "rows": rows}
        line |= {"before": timed(rows, BEFORE), "rules": timed(rows, {}), "cublas": timed(rows, {"cublas": True})}
        best = min(found, key=found.__getitem__, default=None)
        line |= {"best": best, "best_us": found.get(best or ""), "form": forms.get(best or ""), "forms": found, "wrong": wrong}
        line |= {"by_name": forms, "floor": size / 4.8e6}
        lines.append(line)
    return lines


def measure_head(kind: Kind, flush: Tensor) -> list[dict[str, Any]]:
    """Measures all forms of the head, with norm and choice of the best tokens; returns one line per number of rows."""
    inputs = Inputs(kind, 2, 64)
    lines = []
    for rows in HEAD_ROWS:
        wanted = try_head(inputs, rows, None)
        assert isinstance(wanted, Tensor), wanted

        def timed(*form: Any, call: Callable = inputs.call_head, rows: int = rows) -> float:
            return graph_time([partial(call, rows, copy, *form) for copy in (0, 1, 0, 1)], flush)

        found, forms, wrong = {}, {}, []
        for tile in head_tiles(rows):
            if tile.rows < rows:
                continue
            numbers = (*tile, 0)
            name = label("tiles", numbers)
            out = try_head(inputs, rows, tile)
            if isinstance(out, str) or not torch.equal(out, wanted):
                wrong.append(f"{name}: {out if isinstance(out, str) else 'other choice'}")
            else:
                found[name], forms[name] = timed(tile), ("tiles", numbers)
        best = min(found, key=found.__getitem__, default=None)
        line = {"model": kind.model, "linear": "head", "K": kind.inputs, "N": kind.outputs, "rows": rows}
        line |= {"before": timed(), "rules": timed(), "cublas": timed(call=inputs.call_cublas_head)}
        line |= {"best": best, "best_us": found.get(best or ""), "form": forms.get(best or ""), "forms": found, "wrong": wrong}
        line["floor"] = 2 * kind.inputs * kind.outputs / 4.8e6
        lines.append(line)
    return lines


class Chain:
    """All linears of several layers of a model, one after the other."""

    def __init__(self, model: str, flush: Tensor) -> None:
        self.model, self.count, self.flush = model, LAYERS[model], flush
        self.parts = [Inputs(kind, self.count, max(ROWS[model])) for kind in MODELS[model] if not kind.head]

    def time(self, rows: int, **way: Any) -> float:
        """Microseconds per layer."""

        def call() -> None:
            for copy in range(self.count):
                for part in self.parts:
                    part.call(rows, copy)

        with ways(**way):
            return graph_time([call], self.flush) / self.count

    def choose(self, lines: list[dict[str, Any]], rows: int) -> dict[str, Any]:
        """Sets the lines' forms to those with which a layer is fastest; returns the times with each way of choosing."""
        own = [line for line in lines if (line["model"], line["rows"]) == (self.model, rows) and line["linear"] != "head"]
        kinds = {part.kind.name: part.kind for part in self.parts}
        by_rules = {line["linear"]: choose_by_rules(kinds[line["linear"]], rows) for line in own}
        fastest = by_rules | {line["linear"]: tuple(line["form"]) for line in own if line["form"]}
        times = {"before": self.time(rows, **BEFORE), "rules": self.time(rows), "cublas": self.time(rows, cublas=True)}

        def timed(forms: dict[str, tuple], **way: Any) -> float:
            table = {kinds[name].key: ((1 << 30, kernel, tuple(numbers)),) for name, (kernel, numbers) in forms.items()}
            return self.time(rows, forms=table, **way)

        times["best alone"] = timed(fastest)
        forms, least = (fastest, times["best alone"]) if times["best alone"] < times["rules"] else (by_rules, times["rules"])
        for line in (*own, *own):
            name = line["linear"]
            single = sorted(line["forms"], key=line["forms"].__getitem__)[:TRIED]
            for form in (by_rules[name], *(line["by_name"][one] for one in single)):
                if form != forms[name] and (found := timed(forms | {name: form})) < 0.995 * least:
                    forms, least = forms | {name: form}, found
        for line in own:
            line["form"] = forms[line["linear"]]
        if rows <= PREFETCH_ROWS:
            times["best without prefetch"] = timed(forms, prefetch_rows=0)
        return {"model": self.model, "rows": rows} | times | {"best": least}


def choose_by_rules(kind: Kind, rows: int) -> tuple[str, tuple[int, ...]]:
    with ways():
        return dispatch.choose_kernel(Case(rows, kind.inputs, kind.outputs, "plain", torch.bfloat16, CARD, kind.gated))


def same_for_all_rows(model: str, lines: list[dict[str, Any]]) -> dict[str, int]:
    """For each linear, how many of 1 to 255 rows give other bits than 256 rows, with `rules` and with the new table."""
    wrong = {}
    for kind in (kind for kind in MODELS[model] if not kind.head):
        inputs = Inputs(kind, 1, 256)
        for name, way in {"rules": {}, "best": {"forms": filled(lines)}}.items():
            with ways(**way):
                wanted = inputs.call(256)
                differ = [not torch.equal(inputs.call(rows), wanted[:rows]) for rows in range(1, 256)]
            wrong[f"{kind.name}, {name}"] = sum(differ)
    return wrong


def show(line: dict[str, Any]) -> None:
    best = line["best_us"] or 0.0
    head = f"{line['model']:5}{line['linear']:8}{line['K']:6}{line['N']:7}{line['rows']:5}"
    times = f"{line['floor']:7.1f}{line['before']:8.2f}{line['rules']:8.2f}{line['cublas']:8.2f}{best:8.2f}"
    print(f"{head}{times}  {line['best']}{'  WRONG ' + str(len(line['wrong'])) if line['wrong'] else ''}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="135m,1.5b", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--json", type=Path, default=Path("linears.json"))
    parser.add_argument("--fill", type=Path, nargs="+", help="write measured.py from these files of --json, and exit")
    parser.add_argument("--without", nargs="+", default=[], help="kernels to leave out")
    parser.add_argument("--workers", type=int, default=14, help="number of processes that compile")
    args = parser.parse_args()
    if args.fill:
        fill([line for path in args.fill for line in json.loads(path.read_text())["lines"]])
        return
    models, began = args.models.split(","), time.perf_counter()
    left_out.update(args.without)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_share, args=(models, args.without, i, args.workers)) for i in range(args.workers)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    print(f"compiled in {time.perf_counter() - began:.0f} s; microseconds:")
    print("model linear       K      N rows  floor  before   rules  cuBLAS    best  form")
    flush = torch.zeros(FLUSHED, device=DEVICE)
    lines = []
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "lines": lines}
    for kind in (kind for model in models for kind in MODELS[model]):
        for line in measure_head(kind, flush) if kind.head else measure(kind, flush):
            show(line)
            lines.append(line)
        args.json.write_text(json.dumps(report, indent=1))
    report["layers"] = []
    for model in models:
        chain = Chain(model, flush)
        for rows in ROWS[model]:
            report["layers"].append(line := chain.choose(lines, rows))
            numbers = ", ".join(f"{name} {value:.2f}" for name, value in line.items() if name not in ("model", "rows"))
            print(f"a layer of {model}, {rows} rows: {numbers}", flush=True)
    report["other bits, of 255"] = {model: same_for_all_rows(model, lines) for model in models}
    print("rows of 1 to 255 with other bits:", report["other bits, of 255"])
    for line in lines:
        for form in line["wrong"]:
            print("left out:", line["model"], line["linear"], line["rows"], form, file=sys.stderr)
    report["seconds"] = round(time.perf_counter() - began, 1)
    args.json.write_text(json.dumps(report, indent=1))
    print(f"{report['seconds']} s; {args.json}")


if __name__ == "__main__":
    main()
