"""Compares two objectives for tokens outside the draft vocabulary: no loss (`mask`), or renormalised target probabilities.

    python benchmarks/outside_vocabulary.py --json benchmarks/results/outside-vocabulary-toy-cpu.json

Trains drafters for the toy target with several seeds each: the same data, steps and initial weights; they differ only in
`objective.outside_vocabulary`. A draft vocabulary of 48 tokens leaves out 9 % of the toy's answer tokens, one of 72 leaves out
1.5 %; a real drafter's leaves out 1 to 7 %.
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
    """Trains both choices with one draft vocabulary. Returns acceptance lengths by choice, depth and seed, and differences."""
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
