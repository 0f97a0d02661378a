"""Positions whose token is outside the draft vocabulary: no loss there (`mask`), or the target's distribution over the rest.

    python benchmarks/outside_vocabulary.py --json benchmarks/results/outside-vocabulary-toy-cpu.json

Drafters for the toy, some seeds of each: the same data, steps and start, differing in `objective.outside_vocabulary` alone. The
toy's draft vocabularies: 48 tokens leave out 9 % of the answers' tokens, 72 leave out 1.5 %. A real drafter's: 1 to 7 %.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from fledge.bench.provenance import provenance, write_json
from fledge.training.data.vocabulary import DraftVocabulary
from fledge.training.recipe import load_recipe, with_overrides
from fledge.training.targets import toy
from fledge.training.trainer import train

RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
CHOICES = ("mask", "renormalise")
DEPTHS = (3, 5, 7)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabularies", default="48,72", help="draft vocabulary sizes")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.seeds < 2:
        parser.error("--seeds: at least 2, or the difference has no standard error")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = toy.make(name)
        rows = [measure(folder, size, args.seeds, args.steps) for size in map(int, args.vocabularies.split(","))]
        answers = (folder / "answers.jsonl").read_text().splitlines()
    if args.json:
        settings = {"recipe": RECIPE.name, "steps": args.steps, "seeds": args.seeds, "toy_vocabulary": len(toy.WORDS)}
        write_json(args.json, {"settings": settings, "rows": rows, "provenance": provenance(answers)})


def measure(folder: Path, size: int, seeds: int, steps: int) -> dict[str, Any]:
    """Acceptance lengths of one draft vocabulary by choice and depth, one for each seed; and the mean difference."""
    lengths: dict[str, dict[int, list[float]]] = {choice: {depth: [] for depth in DEPTHS} for choice in CHOICES}
    for seed in range(seeds):
        for choice in CHOICES:
            output = folder / f"{size}-{choice}-{seed}"
            settings = {
                "output": output,
                "seed": seed,
                "target.model": folder / "target",
                "data.train": folder / "answers.jsonl",
                "data.held_out_samples": 100,
                "drafter.draft_vocab_size": size,
                "objective.outside_vocabulary": choice,
                "run.steps": steps,
                "run.evaluate_every": steps,
            }
            result = train(with_overrides(load_recipe(RECIPE), [f"{key}={value}" for key, value in settings.items()]))
            found = result.evaluations[-1]["acceptance_length"]
            for depth in DEPTHS:
                lengths[choice][depth].append(round(found[depth], 4))
            print(f"{size} tokens, seed {seed}, {choice}: {[lengths[choice][depth][-1] for depth in DEPTHS]}", flush=True)
    differences = {d: [a - b for a, b in zip(*(lengths[choice][d] for choice in CHOICES), strict=True)] for d in DEPTHS}
    return {
        "draft_vocabulary": size,
        "coverage": round(DraftVocabulary.load(output / "vocabulary").coverage, 4),
        "acceptance_length": lengths,
        "mask_minus_renormalise": {d: round(statistics.mean(found), 4) for d, found in differences.items()},
        "standard_error": {d: round(statistics.stdev(found) / len(found) ** 0.5, 4) for d, found in differences.items()},
    }


if __name__ == "__main__":
    main()
