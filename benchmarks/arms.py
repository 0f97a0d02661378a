"""Trains several drafters side by side, each by its own recipe: same batches, same steps, one target pass for all.

    python benchmarks/arms.py --seconds 540 --out runs/twins recipes/smollm2-135m-eagle3.1.yaml recipes/smollm2-135m-eagle3.yaml
    python benchmarks/arms.py --steps 300 --out runs/sweep "low=recipe.yaml optimizer.learning_rate=5e-4" "high=recipe.yaml …"

An arm is `[name=]recipe [key=value …]`. The arms may differ in drafter flags, start, loss and optimiser; target, data, taps,
draft vocabulary and seed are those of the first. Sharing the target's pass makes a comparison of two a quarter cheaper than two
runs of `fledge train`, which does the same otherwise. With --seconds or --until the learning rate follows the clock. --warm
only compiles: run it beside other work to fill the compiler's cache.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.bench.provenance import provenance, write_json
from fledge.models.drafter import EagleDrafter
from fledge.training.context import TrainingContext, build_context, drafter_config, held_out_texts, resolve, start_drafter
from fledge.training.data.packing import PackedLoader
from fledge.training.data.prefetch import Prefetcher
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, evaluate
from fledge.training.export import export, served_copy
from fledge.training.losses import LossSettings
from fledge.training.objective import Objective, ObjectiveSettings
from fledge.training.optimizers import build_optimizers, clip_gradients, learning_rate_factor
from fledge.training.recipe import Recipe, load_recipe
from fledge.training.targets.target import DecoderTarget
from fledge.training.warm_start import last_layer

COMPILED_AFTER = 3  # steps
OWN = ("drafter", "objective", "optimizer", "output", "evaluation")  # keys in which arms may differ


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arms", nargs="+", metavar="[name=]recipe [key=value …]")
    parser.add_argument("--out", type=Path, default=Path("runs/arms"))
    ends = parser.add_mutually_exclusive_group(required=True)
    ends.add_argument("--steps", type=int)
    ends.add_argument("--seconds", type=float, help="of training, compiling not counted")
    ends.add_argument("--until", type=float, help="when to end (Unix time)")
    ends.add_argument("--warm", action="store_true")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--evaluate-every", type=int, default=0, help="steps; 0: at the end only")
    parser.add_argument("--commit", default=None, help="where there is no git")
    return parser.parse_args()


def parse_arm(text: str) -> tuple[str, Recipe]:
    first, *overrides = shlex.split(text)
    name, equals, path = first.partition("=")
    recipe = load_recipe(path if equals else first, overrides)
    return (name if equals else Path(first).stem), recipe


class Arm:
    """One of the drafters in training."""

    def __init__(self, name: str, recipe: Recipe, drafter: EagleDrafter, context: TrainingContext) -> None:
        self.name, self.recipe, self.drafter, self.context = name, recipe, drafter, context
        run, asked, data = context.recipe.run, recipe.objective, context.recipe.data
        self.dtype = getattr(torch, run.compute_dtype)
        settings = ObjectiveSettings(
            steps=asked.ttt_steps,
            decay=asked.decay,
            loss=LossSettings(asked.loss, asked.lk_weight),
            compute_dtype=None if self.dtype == torch.float32 else self.dtype,
            mask_outside=asked.outside_vocabulary == "mask",
            compile=run.compile == "yes",
        )
        num_positions = data.sequence_length + data.position_offset_max
        self.objective = Objective(
            drafter, context.target, settings, num_positions, data.sequence_length * data.micro_batch_size
        )
        wanted = recipe.optimizer
        self.optimizer = build_optimizers(
            drafter,
            wanted.kind,
            wanted.learning_rate,
            weight_decay=wanted.weight_decay,
            betas=wanted.betas,
            muon_learning_rate=wanted.muon_learning_rate,
        )
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]

    def step(self, planned, num_valid_K, states, progress: float, measure: bool):
        weights = self.objective.step_weights(num_valid_K.to(planned.tokens_BT.device, non_blocking=True))
        loss, metrics = self.objective(planned, weights, measure=measure, states=states)
        loss.backward()
        wanted = self.recipe.optimizer
        clip_gradients(self.parameters, wanted.max_grad_norm)
        self.optimizer.set_factor(learning_rate_factor(progress, wanted.schedule, wanted.warmup, wanted.decay, wanted.floor))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach(), metrics

    def evaluated(self, held_out: HeldOut) -> dict[str, Any]:
        asked = self.recipe.evaluation
        served = served_copy(self.drafter, self.context.target, self.dtype)
        return evaluate(served, held_out, asked.depths, asked.sink_column)


def build_arms(named: list[tuple[str, Recipe]]) -> tuple[TrainingContext, list[Arm]]:
    world, say = DistributedContext(), lambda text: print(text, flush=True)
    recipes = {name: resolve(recipe, world) for name, recipe in named}
    first = next(iter(recipes.values()))
    for name, recipe in recipes.items():
        common = {key: getattr(first, key) for key in vars(first) if key not in OWN}
        if {key: getattr(recipe, key) for key in common} != common:
            raise SystemExit(f"arm {name}: only {', '.join(OWN)} may differ from the first arm's")
        if recipe.objective.ttt_steps != first.objective.ttt_steps:
            raise SystemExit(f"arm {name}: objective.ttt_steps must be the first arm's: the batches are planned for it")
    context = build_context(first, world, say)
    if not isinstance(context.target, DecoderTarget):
        raise SystemExit("the target must be one that Fledge runs itself")
    drafters = {}
    for name, recipe in recipes.items():
        config = drafter_config(recipe, context.target.decoder.config)
        if config.aux_layer_ids != context.drafter.config.aux_layer_ids:
            raise SystemExit(f"arm {name}: the arms share one target pass and so its tapped layers")
        drafter = EagleDrafter(config)
        drafter.d2t.copy_(context.drafter.d2t)
        start_drafter(recipe, drafter, context.target, last_layer(context.target.decoder), context.train.tokens[:256], say)
        drafters[name] = drafter.to(context.device)
    return context, [Arm(name, recipe, drafters[name], context) for name, recipe in recipes.items()]


def main() -> None:
    args = arguments()
    context, arms = build_arms([parse_arm(text) for text in args.arms])
    recipe, device = context.recipe, context.device
    data, on_gpu = recipe.data, device.type == "cuda"
    held_out = None if args.warm else held_out_texts(context)
    loader = PackedLoader(
        context.train, data.sequence_length, data.micro_batch_size, recipe.seed, 0, 1, data.position_offset_max
    )
    print(loader, flush=True)
    prefetch = Prefetcher(loader, arms[0].objective, device)
    tokens_a_step = data.sequence_length * data.micro_batch_size
    step, began, logged, log, paused = 0, time.time(), time.time(), [], 0.0
    while True:
        batch = next(prefetch)
        if step == COMPILED_AFTER:
            if on_gpu:
                torch.cuda.synchronize()
            began = logged = time.time()
            if args.warm:
                prefetch.close()
                return
        if args.steps is not None:
            progress = step / args.steps
        else:
            seconds = args.until - began if args.until else args.seconds
            progress = (time.time() - began - paused) / max(seconds - paused, 1.0) if step > COMPILED_AFTER else 0.0
        if progress >= 1:
            break
        planned, measure = batch.batches[0], (step + 1) % args.log_every == 0
        with torch.no_grad():
            states = context.target.states(planned)
        results = [arm.step(planned, batch.num_valid_K, states, progress, measure) for arm in arms]
        step += 1
        if measure:
            rate = args.log_every * tokens_a_step / (time.time() - logged)
            entry: dict[str, Any] = {"step": step, "epoch": batch.epoch, "tokens_per_second": rate, "progress": progress}
            shown = []
            for arm, (loss, metrics) in zip(arms, results, strict=True):
                hits = (metrics.hits_K.cpu() / batch.num_valid_K).tolist()
                acceptance = (metrics.acceptance_K.cpu() / batch.num_valid_K).tolist()
                entry[arm.name] = {"loss": float(loss), "accuracy": hits, "acceptance": acceptance}
                if not np.isfinite(float(loss)):
                    raise SystemExit(f"the loss of {arm.name} is {float(loss)} at step {step}")
                shown.append(f"{arm.name} {float(loss):.3f} {hits[0]:.3f}…{hits[-1]:.3f}")
            log.append(entry)
            logged = time.time()
            print(f"step {step} epoch {batch.epoch:.2f} {rate / 1e3:.0f}k tok/s  " + "  ".join(shown), flush=True)
        if args.evaluate_every and step % args.evaluate_every == 0:
            at = time.time()
            for arm in arms:
                figures = arm.evaluated(held_out)
                log.append({"step": step, "arm": arm.name, "evaluation": figures})
                print(f"step {step} {arm.name}: acceptance length {figures['acceptance_length']}", flush=True)
            paused += time.time() - at
            logged += time.time() - at
    prefetch.close()
    if on_gpu:
        torch.cuda.synchronize()
    facts = {
        "steps": step,
        "tokens_seen": step * tokens_a_step,
        "epochs": batch.epoch,
        "training_seconds": time.time() - began - paused,
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None,
        "data": context.provenance,
        "provenance": provenance() | ({"commit": args.commit} if args.commit else {}),
    }
    finals = {}
    for arm in arms:
        finals[arm.name] = arm.evaluated(held_out)
        print(f"{arm.name}: acceptance length {finals[arm.name]['acceptance_length']}", flush=True)
        record = {**facts, "recipe": arm.recipe.to_dict(), "evaluation": finals[arm.name]}
        export(arm.drafter, args.out / arm.name, torch.bfloat16, json.loads(json.dumps(record, default=str)))
    recipes = {arm.name: arm.recipe.to_dict() for arm in arms}
    write_json(
        args.out / "arms.json", json.loads(json.dumps({**facts, "recipes": recipes, "final": finals, "log": log}, default=str))
    )
    print(json.dumps({k: facts[k] for k in ("steps", "tokens_seen", "epochs", "training_seconds", "peak_memory_gib")}))


if __name__ == "__main__":
    main()
