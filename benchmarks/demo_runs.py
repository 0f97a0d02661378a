"""Runs `fledge demo` several times; keeps the run with the median speed-up, and the figures of all runs.

python benchmarks/demo_runs.py [--runs 9]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from fledge.bench.provenance import write_json

RESULT = Path(__file__).parent / "results" / "demo-cpu.json"
KEPT = ("plain_tokens_per_second", "speculative_tokens_per_second", "speed_up", "acceptance_length", "identical")


def one_run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo.json"
        subprocess.run([sys.executable, "-m", "fledge", "demo", "--out", str(out)], check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=9)
    options = parser.parse_args()
    runs = []
    for number in range(options.runs):
        runs.append(one_run())
        summary = runs[-1]["summary"]
        rates = f"{summary['plain_tokens_per_second']:.1f} and {summary['speculative_tokens_per_second']:.1f} tokens/s"
        print(f"run {number + 1} of {options.runs}: {rates}, {summary['speed_up']:.2f}×", file=sys.stderr, flush=True)
    middle = sorted(runs, key=lambda run: run["summary"]["speed_up"])[len(runs) // 2]
    what = f"`fledge demo`, {len(runs)} runs one after the other; everything else here is the run with the median speed-up"
    write_json(RESULT, {"what": what, "runs": [{key: run["summary"][key] for key in KEPT} for run in runs], **middle})
    print(f"wrote {RESULT}", file=sys.stderr)


if __name__ == "__main__":
    main()
