"""Chooses launch configs of a layer's linears by the time of a whole step, with attention, unlike `gpu_linears.py`.

    python benchmarks/gpu_step_forms.py --model 135m --rows 16,64 --fill     # half a minute; writes measured.py

A linear that is fastest in a chain of linears may leave attention no room: 16 rows of 135M took 645 µs per step with a form of
qkv that saved 0.8 µs per layer in the chain, and 472 before. Starting from the table's forms, each linear in turn gets the form
with the fastest step; this is done twice, and for several limits up to which attention's programs may fill a multiprocessor.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from gpu_linear_forms import MODELS, Kind, candidates, label, write_configs
from gpu_shapes import SHAPES
from gpu_sizes import ShapeBench, pages_a_row, step_us, tokens_for
from gpu_steps import forget

from fledge.engine.config import DEVICE_PAGE_SIZE
from fledge.engine.executors.batch_state import GREEDY
from fledge.engine.executors.device_batch import DeviceBatch
from fledge.kernels import compile_ahead
from fledge.kernels.attention import launch_config
from fledge.kernels.linear import dispatch
from fledge.kernels.linear.dispatch import Case

Form = tuple[str, tuple[int, ...]]
CONTEXT, STEPS = 200, 40
GAIN = 0.995  # a form is taken if the step takes less than this fraction of the time before


class Search:
    def __init__(self, batch: DeviceBatch, kinds: list[Kind], rows: int) -> None:
        self.batch, self.rows = batch, rows
        self.kinds = {kind.name: kind for kind in kinds if not kind.head}
        self.shape = (rows, 0, GREEDY, *batch.kv_bucket(CONTEXT))
        self.tried = {name: list(candidates(kind, rows)) for name, kind in self.kinds.items()}

    def table_forms(self) -> dict[str, Form]:
        return {name: dispatch.choose_kernel(self._case(kind)) for name, kind in self.kinds.items()}

    def _case(self, kind: Kind) -> Case:
        return Case(self.rows, kind.inputs, kind.outputs, "plain", torch.bfloat16, self.batch.device, kind.gated)

    @contextmanager
    def using(self, forms: Mapping[str, Form], few: int) -> Iterator[None]:
        configs = {self.kinds[name].key: ((1 << 30, *form),) for name, form in forms.items()}
        forget(self.batch)
        with (
            patch.object(dispatch, "CONFIGS", dispatch.CONFIGS | configs),
            patch.object(launch_config, "few_programs", lambda device: few),
        ):
            yield

    def compile(self, fews: list[int]) -> None:
        """Compiles every kernel that will be tried, on all cores."""
        forms = self.table_forms()
        with compile_ahead.side_by_side():
            for few in fews:
                for name, tried in self.tried.items():
                    for form in tried:
                        with self.using(forms | {name: form}, few):
                            self.batch.record([self.shape])

    def time(self, forms: Mapping[str, Form], few: int) -> float:
        with self.using(forms, few):
            return step_us(self.batch, self.rows, 0, STEPS)

    def choose(self, few: int) -> tuple[dict[str, Form], dict[str, Any]]:
        """Returns the fastest forms and their figures."""
        forms = self.table_forms()
        least = before = self.time(forms, few)
        for name in (*self.kinds, *self.kinds):
            for form in self.tried[name]:
                if form != forms[name] and (found := self.time(forms | {name: form}, few)) < GAIN * least:
                    forms, least = forms | {name: form}, found
        found = {"rows": self.rows, "few_programs": few, "table_us": before, "us": self.time(forms, few)}
        return forms, found | {"forms": {name: label(*form) for name, form in forms.items()}}


def with_forms(configs: dict, kinds: Mapping[str, Kind], rows: int, forms: Mapping[str, Form]) -> dict:
    """The table with these forms for `rows` rows, and for fewer rows that had the same entry."""
    changed = dict(configs)
    for name, form in forms.items():
        key = kinds[name].key
        entries = {most: other for most, *other in configs.get(key, ())} | {rows: form}
        changed[key] = tuple((most, *entries[most]) for most in sorted(entries))
    return changed


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="135m", choices=sorted(set(MODELS) & set(SHAPES)))
    parser.add_argument("--rows", default="16,64")
    parser.add_argument(
        "--few", default="", help="more limits of attention's programs to try, with commas; default: only the current one"
    )
    parser.add_argument("--fill", action="store_true", help="write measured.py with the fastest forms at the current limit")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    began, configs, found = time.perf_counter(), dispatch.CONFIGS, []
    bench = ShapeBench(args.model, SHAPES[args.model], args)
    counts = [int(part) for part in args.rows.split(",")]
    as_is = launch_config.few_programs(torch.device("cuda", 0))
    fews = [as_is, *(int(part) for part in args.few.split(",") if part)]
    most, tokens = max(counts), tokens_for(0, STEPS)
    batch = bench.build(most, most * DEVICE_PAGE_SIZE * pages_a_row(1, CONTEXT, tokens)).executor.batch
    for tensor in (batch.cache.keys, batch.cache.values):
        tensor.normal_()
    for rows in counts:
        search = Search(batch, MODELS[args.model], rows)
        search.compile(fews)
        print(f"{args.model}, {rows} rows: compiled after {time.perf_counter() - began:.0f} s", flush=True)
        for few in fews:
            forms, figures = search.choose(few)
            found.append(figures)
            print("  " + json.dumps(figures), flush=True)
            if few == as_is:
                configs = with_forms(configs, search.kinds, rows, forms)
        if args.json:
            args.json.write_text(
                json.dumps({"model": args.model, "device": torch.cuda.get_device_name(), "steps": found}, indent=1)
            )
    if args.fill:
        write_configs(configs)
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
