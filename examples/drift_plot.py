"""Plot how a drafter drifts from draft step to draft step. Takes a minute or two on two CPU cores.

python examples/drift_plot.py --model smollm2-135m --drafter smollm2-135m-eagle3.1 --out drift.png
`fledge drift` measures more, and writes a report.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from fledge import progress
from fledge.drift.lab import run_lab
from fledge.drift.suites import Settings

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--drafter", action="append", help="may be repeated; default: smollm2-135m-eagle3.1")
parser.add_argument("--max-tokens", type=int, default=32, help="maximum length of each answer")
parser.add_argument("--out", type=Path, default=Path("drift.png"))
options = parser.parse_args()

# Run the probes over all prompts, and as little as possible of everything else.
settings = replace(
    Settings.quick(), max_tokens=options.max_tokens, prompts=1, templates=(), lengths=(256,), noise=(), temperatures=(0.0,)
)
drafters = options.drafter or ["smollm2-135m-eagle3.1"]
with progress.task("starting", unit="prompts") as shown:
    figures = run_lab(options.model, drafters, settings=settings, on_progress=shown.show)

panels = {"joint_acceptance": "still accepted", "rms": "RMS of the fed-back state", "sink_share": "attention on the sink"}
figure, axes = plt.subplots(1, len(panels), figsize=(12, 3.5), layout="constrained")
for axis, (name, title) in zip(axes, panels.items(), strict=True):
    for drafter, probes in figures["probes"].items():
        axis.plot(range(1, len(probes[name]) + 1), probes[name], marker=".", label=drafter)
    axis.set(title=title, xlabel="draft step", ylim=(0, None))
    axis.grid(alpha=0.3)
axes[0].legend()
figure.savefig(options.out, dpi=120)
for drafter, probes in figures["probes"].items():
    print(f"{drafter}: acceptance length {probes['acceptance_length']}")
print(f"picture: {options.out}")
