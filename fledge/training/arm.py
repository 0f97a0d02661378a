"""An arm: one drafter in training, with its objective, optimiser, best acceptance and folder. A run has one or several."""

from __future__ import annotations

import shlex
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.drafter_config import config_to_hf
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.training.checkpoint import flat_settings, load_checkpoint, save_checkpoint
from fledge.training.context import TrainingContext
from fledge.training.data.prefetch import StepInput
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, Judged, describe_lengths, evaluate
from fledge.training.export import export, served_copy
from fledge.training.journal import Journal
from fledge.training.losses import LossSettings, StepMetrics
from fledge.training.objective import Objective, ObjectiveSettings
from fledge.training.optimizers import build_optimizers, clip_gradients, learning_rate_factor
from fledge.training.recipe import Recipe, RecipeError, with_overrides
from fledge.training.targets.target import Target, TargetStates
from fledge.training.ttt import TrainBatch

# Sections that arms may differ in, and keys of them that all arms share: the target's pass and the batches depend on these.
OWN = ("drafter", "objective", "optimizer")
SHARED = (
    *("drafter.aux_layers", "drafter.draft_vocab_size"),
    *("objective.ttt_steps", "objective.outside_vocabulary", "objective.chunk_rows"),
)

Recent = deque[tuple[int, StepInput]]


class TrainingStopped(UserError):
    """The run cannot go on; says where and what to do."""


class OutOfMemory(TrainingStopped):
    """`on_all`: all processes of the run stopped for it, so that they can try again together."""

    def __init__(self, message: str, *, on_all: bool) -> None:
        super().__init__(message)
        self.on_all = on_all


@dataclass
class _Window:
    """Sums on the device since the last log."""

    loss: Tensor
    grad_norm: Tensor
    first_bad: Tensor  # step whose loss was not finite; −1: none
    steps: int = 0
    tokens: int = 0
    began: float = 0.0


class Arm:
    journal: Journal  # set by the trainer when the run starts

    def __init__(self, context: TrainingContext, world: DistributedContext) -> None:
        self.context, self.world, self.recipe, self.drafter = context, world, context.recipe, context.drafter
        self.target, self.device = context.target, context.device
        self.folder, self.dtype = Path(self.recipe.output), getattr(torch, self.recipe.run.compute_dtype)
        self.best, self.stale = 0.0, 0
        self.evaluations: list[dict[str, Any]] = []  # of this process's part of the run
        world.broadcast_parameters(self.drafter)
        self.objective = self._objective(compile=self.recipe.run.compile == "yes")
        asked = self.recipe.optimizer
        self.optimizer = build_optimizers(
            self.drafter,
            asked.kind,
            asked.learning_rate,
            weight_decay=asked.weight_decay,
            betas=asked.betas,
            muon_learning_rate=asked.muon_learning_rate,
        )

    def _objective(self, compile: bool) -> Objective:
        asked, data = self.recipe.objective, self.recipe.data
        settings = ObjectiveSettings(
            steps=asked.ttt_steps,
            decay=asked.decay,
            loss=LossSettings(asked.loss, asked.lk_weight),
            compute_dtype=None if self.dtype == torch.float32 else self.dtype,
            chunk_rows=asked.chunk_rows,
            mask_outside=asked.outside_vocabulary == "mask",
            recompute=asked.recompute,
            compile=compile,
        )
        num_positions = data.sequence_length + data.position_offset_max
        batch_tokens = data.sequence_length * data.micro_batch_size
        return Objective(self.drafter, self.target, settings, num_positions, batch_tokens)

    def without_compiler(self) -> None:
        self.objective = self._objective(compile=False)
        self.optimizer.zero_grad()

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, share: float) -> None:
        """`share`: how much of the run is over."""
        asked = self.recipe.optimizer
        self.optimizer.set_factor(learning_rate_factor(share, asked.schedule, asked.warmup, asked.decay, asked.floor))
        self.optimizer.zero_grad()
        self._metrics: list[StepMetrics] = []

    def backward(self, batch: TrainBatch, states: TargetStates, counts_K: Tensor, measure: bool) -> None:
        """Adds a batch's gradients. `counts_K`: positions with loss at each draft step, of the whole step."""
        weights = self.objective.step_weights(counts_K)
        loss, metrics = self.objective(batch, weights, measure=measure, states=states)
        loss.backward()
        self._metrics.append(metrics)
        self._window.loss += loss.detach()
        self._window.tokens += batch.tokens_BT.numel() * self.world.size

    def end_step(self, step: int) -> None:
        """Updates the weights by the gradients, which are summed over all processes by now."""
        norm = clip_gradients(self.drafter.parameters(), self.recipe.optimizer.max_grad_norm)
        self.optimizer.step()
        window = self._window
        window.grad_norm += norm
        window.steps += 1
        is_bad = ~torch.isfinite(window.loss + norm) & (window.first_bad < 0)
        window.first_bad = torch.where(is_bad, step, window.first_bad)

    # --- logging --------------------------------------------------------------------------------------------------

    def reset_window(self) -> None:
        zero = torch.zeros((), device=self.device)
        first_bad = torch.full((), -1, device=self.device)
        self._window = _Window(zero.clone(), zero.clone(), first_bad, began=time.perf_counter())

    def pause(self, seconds: float) -> None:
        """Leaves an evaluation's time out of the tokens per second."""
        self._window.began += seconds

    def check_finite(self, recent: Recent) -> None:
        """Raises if a loss or gradient since the last log was not finite. Synchronises with the device."""
        bad = int(self._window.first_bad)
        if bad >= 0:
            step_input = next((x for step, x in recent if step == bad), None)
            raise TrainingStopped(describe_not_finite(bad + 1, step_input, self.target, self.folder))

    def log(self, step: int, tokens: int, seconds: float, counts_K: Tensor, epoch: float, recent: Recent) -> None:
        window = self._window
        sums = torch.stack([torch.stack([m.loss_K, m.acceptance_K, m.hits_K]) for m in self._metrics]).sum(0)
        facts = torch.cat([sums.flatten(), window.loss[None] / window.steps]).cpu().double()
        self.check_finite(recent)
        facts = self.world.sum(facts)
        loss_K, acceptance_K, hits_K = facts[:-1].view(3, -1)
        passed = time.perf_counter() - window.began
        counts = counts_K.clamp_min(1).double()  # with the tokens outside the draft vocabulary: they are misses
        figures = {
            "loss": float(facts[-1]),
            "loss_by_step": (loss_K / self.objective.decay_K.cpu()).tolist(),
            "accuracy": (hits_K / counts).tolist(),
            "acceptance_probability": (acceptance_K / counts).tolist(),
            "learning_rate": self.optimizer.parts[0].param_groups[0]["lr"],
            "grad_norm": float(window.grad_norm / window.steps),
            "epoch": epoch,
            "tokens": tokens,
            "tokens_per_second": window.tokens / passed,
        }
        if self.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.journal.record("train", step, figures)
        accuracy = figures["accuracy"]
        self.journal.progress(
            step,
            seconds,
            f"loss {figures['loss']:.3f}, accuracy {accuracy[0]:.1%}…{accuracy[-1]:.1%}, "
            f"best acceptance length {self.best:.2f}, {figures['tokens_per_second']:,.0f} tokens/s",
        )
        self.reset_window()

    def evaluate(self, step: int, tokens: int, held_out: HeldOut | None) -> None:
        """Evaluates on the first process, which has `held_out`, and keeps the drafter if it is the best so far."""
        asked = self.recipe.evaluation

        def measured() -> dict[str, Any]:
            assert held_out is not None
            drafter = served_copy(self.drafter, self.target, self.dtype)
            return evaluate(drafter, held_out, asked.depths, asked.sink_column)

        figures = self.world.on_first(measured)
        if self.world.is_first:
            self.journal.record("evaluation", step, figures)
            self.journal.say(f"step {step:,}: acceptance length {describe_lengths(figures)}")
            self.evaluations.append({"step": step, **figures})
        length = Judged.of(figures).length[asked.select_depth]
        if length > self.best:
            self.best, self.stale = length, 0
            if self.world.is_first:
                record = {"step": step, "tokens": tokens, "evaluation": figures, **self.context.provenance}
                export(self.drafter, self.folder / "best", self.dtype, {**record, "recipe": self.recipe.to_dict()})
        else:
            self.stale += 1

    # --- keeping --------------------------------------------------------------------------------------------------

    def save_recipe(self) -> None:
        text = self.recipe.to_yaml().encode()
        write_atomically(self.folder / "recipe.yaml", lambda file: file.write(text))

    def save(self, step: int, position: dict[str, Any], keep: int) -> None:
        """`position`: where the run's loop is."""
        state = {
            "recipe": self.recipe.to_dict(),
            "config": config_to_hf(self.drafter.config, self.dtype),
            "provenance": self.context.provenance,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "stale": self.stale,
            **position,
        }
        save_checkpoint(self.folder / "checkpoints", step, state, keep)

    def resume(self, path: Path) -> dict[str, Any]:
        """Loads a checkpoint's weights and returns its whole state. The first process reads: others may not have the file."""
        state = self.world.on_first(lambda: load_checkpoint(path))
        if not torch.equal(state["drafter"]["d2t"], self.drafter.d2t.cpu()):
            raise UserError(
                f"{path}: was trained with another draft vocabulary; put it back (data.vocabulary), or use another output "
                "folder"
            )
        try:
            self.drafter.load_state_dict(state["drafter"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError):
            raise UserError(
                f"{path}: belongs to another drafter or optimiser than this recipe's; use another output folder, or "
                "delete it to start anew"
            ) from None
        self.best, self.stale = state["best"], state["stale"]
        return state


def arm_recipes(recipe: Recipe, arms: Sequence[str]) -> list[Recipe]:
    """Parses arms, each `NAME=KEY=VALUE …`: the recipe with these keys, in a folder NAME of the output folder."""
    recipes: dict[str, Recipe] = {}
    for text in arms:
        name, equals, keys = text.partition("=")
        if not equals or not name or Path(name).name != name:
            raise RecipeError(f"--arms {text!r}: give a name and what is its own, as in eagle3=drafter.version=3")
        if name in recipes:
            raise RecipeError(f"--arms: {name} is there twice")
        recipes[name] = with_overrides(recipe, shlex.split(keys))
        was, now = flat_settings(recipe.to_dict()), flat_settings(recipes[name].to_dict())
        changed = [key for key, value in now.items() if value != was[key]]
        if refused := [key for key in changed if key.partition(".")[0] not in OWN or key in SHARED]:
            raise RecipeError(
                f"--arms {name}: {', '.join(refused)} must be the same in all arms, which share target, data and batches; "
                "set it for all of them"
            )
    if recipe.run.patience is not None:
        raise RecipeError("run.patience: arms end together, at the same step; leave it out")
    return [replace(one, output=str(Path(recipe.output) / name)) for name, one in recipes.items()]


def describe_not_finite(step: int, step_input: StepInput | None, target: Target, folder: Path) -> str:
    """Says which step failed and whether the target or the drafter caused it. Saves the batch in `folder`."""
    text = f"step {step}: the loss is not a finite number"
    if step_input is None:
        return text
    where = folder / "not-finite.pt"
    write_atomically(where, lambda file: torch.save([vars(packed) for packed in step_input.packed], file))
    text += f" (epoch {step_input.epoch:.3f}; its batch is kept in {where})"
    for number, (batch, packed) in enumerate(zip(step_input.batches, step_input.packed, strict=True)):
        finite = torch.stack([torch.isfinite(tap).all(-1) for tap in target.states(batch).taps]).all(0)
        finite = finite.view(batch.tokens_BT.shape).cpu()
        if not finite.all():
            row, column = (~finite).nonzero()[0].tolist()
            return text + (
                f"; the target's own states are not finite in batch {number}, row {row}, "
                f"document {int(packed.document[row, column])}: try target.dtype=bfloat16 or float32"
            )
    documents = sum(int(packed.document.max(1).values.sum()) for packed in step_input.packed)
    return text + (
        f"; the target's states of its {documents} documents are fine, so the drafter diverged: "
        "lower optimizer.learning_rate, or lengthen optimizer.warmup"
    )
