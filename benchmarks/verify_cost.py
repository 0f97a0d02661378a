"""Measures the cost of verifying a draft on a CPU: a target pass over n tokens against one token, alternating, medians.

python benchmarks/verify_cost.py [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from fledge.bench.provenance import provenance, write_json
from fledge.engine.build import EngineConfig, Speculation, build_engine
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import SequenceLayout
from fledge.kernels.native import best_of

CONTEXT, ROUNDS, SIZES = 256, 40, (1, 2, 4, 6, 8, 12)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    options = parser.parse_args()
    engine = build_engine("smollm2-135m", Speculation("none"), EngineConfig(device="cpu"))
    pages = list(range(-(-(CONTEXT + max(SIZES)) // engine.pool.page_size)))
    tokens = torch.randint(0, 40_000, (CONTEXT + max(SIZES),), generator=torch.Generator().manual_seed(0))

    def run(first: int, count: int) -> None:
        layouts, positions = [SequenceLayout(pages, count, first + count)], torch.arange(first, first + count)
        meta = AttentionMetadata.from_layouts(layouts, positions, engine.pool.page_size, first + count)
        decoder, ops = engine.decoder, engine.executor.ops
        x, _ = decoder.run(decoder.embed(tokens[first : first + count]), meta, ops)
        best_of(ops.linear(decoder.lm_head, ops.norm(decoder.norm, x)))

    run(0, CONTEXT)
    times: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(ROUNDS):
        for size in SIZES:
            began = time.perf_counter()
            run(CONTEXT, size)
            times[size].append(time.perf_counter() - began)
    medians = {size: 1e3 * statistics.median(values) for size, values in times.items()}
    for size, median in medians.items():
        print(f"{size:3d} tokens {median:6.2f} ms   {median / medians[1]:.2f} x one token")
    if options.json:
        write_json(options.json, {"context": CONTEXT, "milliseconds": medians, "provenance": provenance()})


if __name__ == "__main__":
    main()
