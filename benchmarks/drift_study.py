"""The drift study: runs the whole drift lab over named drafters, and writes `docs/drift-study.md` and its plots.

    python -m benchmarks.drift_study run --drafter "EAGLE 3=runs/eagle3" --drafter "EAGLE 3.1=runs/eagle3.1" \\
        --documents texts/ --json benchmarks/results/drift-h200.json
    python -m benchmarks.drift_study write benchmarks/results/drift-h200.json \\
        --ablation benchmarks/results/drift-ablation-h200.json

`run` measures the drafters and writes JSON; ratios are relative to the first drafter. `write` makes the page and plots from the
JSON alone: every figure on the page is from the file; only the notes on how the drafters were trained are written by hand.

The drafters of the ablation are trained by `fledge train --arms`; `recipes/ablation/README.md` has the commands.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.drift_page import Ablation, write_study
from fledge.bench.provenance import write_json
from fledge.drift.lab import run_lab
from fledge.drift.suites import Settings

# How the drafters of `drift-h200.json` were trained; the file does not say.
TRAINED_ALIKE = (
    "They were trained together in two stages, on the same target passes: the same data, batches, steps and seed. They "
    "differ in the two norms and, in the first stage, in the learning rate: 2e-3 for EAGLE 3, 1e-3 for 3.1; in the second it "
    "is 1e-3 for both. The 3.1 drafter is the one that ships. [`training-notes.md`](training-notes.md) has the details."
)
# How the drafters of `drift-ablation-h200.json` were trained.
TRAINED_APART = (
    "Seven drafters were trained for this, each from the target's last layer: 400 steps of 32,768 tokens of answers to "
    "prompts that the target wrote itself, learning rate 1e-3, the same seed and batches (those without augmentation, or "
    "with more of it, see the same answers under other templates). That is 13 million tokens each, far fewer than the "
    "shipped drafter's: their acceptance lengths are low, and the conclusions hold for short trainings. EAGLE 3 itself "
    "trains better with a higher learning rate (2e-3 in the first stage of the drafter above), so a part of the difference "
    "may come from the rate. This comparison is confounded by the initial weights: the copied layer was scaled by a "
    'constant, 0.1, in the drafters with norm_output and not at all in the others, so "fc_norm only" began with a layer '
    'about twenty times too large for its residual stream, and "norm_output only" with a first step that did not fit the '
    "later ones. Now the scale follows from measured states for each of the four, but the four have not been trained again, "
    'so these two drafters say little about the fixes themselves. "Augmented more" has another template in 35 % of texts '
    "instead of 10, none in 10 instead of 5, a system prompt in 40 instead of 15."
)
CONCLUSIONS = (
    "Both norms are the default, and they work only together: alone, the norm on the fed-back state keeps its size but "
    "lowers acceptance, and the norm on the inputs raises acceptance a little while the state grows faster than without "
    "either. Augmentation stays as it is. It helps EAGLE 3 most, whose losses under other templates it removes; 3.1 gains "
    "nothing from it in a short training, and loses a little everywhere with more of it. The shipped drafter was trained "
    "with it, and its retention is in the table at the top; whether it would be the same without needs two long trainings."
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    run = commands.add_parser("run")
    run.add_argument("--model", default="smollm2-135m")
    run.add_argument("--drafter", action="append", required=True, metavar="NAME=FOLDER")
    run.add_argument("--data", default="builtin")
    run.add_argument("--documents", type=Path, help="folder of long texts; default: Python's own documentation")
    run.add_argument("--device", default="auto")
    run.add_argument("--json", type=Path, required=True)
    run.add_argument("--commit", help="commit of the code, if there is no git")
    amounts = Settings()
    for name in ("max_tokens", "depth", "probe_depth", "prompts", "documents", "questions", "conversations"):
        flag = "--num-documents" if name == "documents" else f"--{name.replace('_', '-')}"
        run.add_argument(flag, type=int, default=getattr(amounts, name), dest=f"amount_{name}")
    for name in ("lengths", "noise", "temperatures"):
        kind = int if name == "lengths" else float
        run.add_argument(f"--{name}", type=kind, nargs="+", default=getattr(amounts, name), dest=f"amount_{name}")
    write = commands.add_parser("write")
    write.add_argument("figures", type=Path)
    write.add_argument("--ablation", type=Path, help="figures of drafters that differ in one setting each")
    write.add_argument("--page", type=Path, default=Path("docs/drift-study.md"))
    write.add_argument("--images", type=Path, default=Path("docs/images"))
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.what == "write":
        apart = args.ablation and ablation_of(args.ablation)
        figures = json.loads(args.figures.read_text())
        print(write_study(figures, args.figures, args.page, args.images, TRAINED_ALIKE, apart))
        return
    began = time.time()
    amounts = {name.removeprefix("amount_"): value for name, value in vars(args).items() if name.startswith("amount_")}
    settings = replace(Settings(), **{n: tuple(v) if isinstance(v, list) else v for n, v in amounts.items()})
    shown = [0.0]

    def progress(text: str) -> None:
        if time.time() - shown[0] > 5:
            shown[0] = time.time()
            print(f"[{time.time() - began:.0f} s] {text}", flush=True)

    figures = run_lab(
        args.model,
        args.drafter,
        settings=settings,
        data=args.data,
        documents=args.documents,
        device=args.device,
        on_progress=progress,
    )
    if args.commit:
        figures["provenance"]["commit"] = args.commit
    write_json(args.json, rounded(figures))
    print(f"{args.json}: {figures['seconds']:.0f} s")


def ablation_of(path: Path) -> Ablation:
    """The ablation of a file. The notes on training and conclusions belong to `drift-ablation-h200.json` only."""
    told = (TRAINED_APART, CONCLUSIONS) if path.name == "drift-ablation-h200.json" else ("From drafters trained for this.", "")
    return Ablation(json.loads(path.read_text()), path.name, *told)


def rounded(value: Any) -> Any:
    """All numbers rounded to six digits: the other digits are noise and a third of the file's size."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    main()
