"""One drafter in training: its objective and optimiser, what it has reached, its folder. A run has one, or several arms."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge.checkpoints.drafter_config import config_to_hf
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.training.checkpoint import load_checkpoint, save_checkpoint
from fledge.training.context import TrainingContext
from fledge.training.data.prefetch import StepInput
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, evaluate
from fledge.training.export import export, served_copy
from fledge.training.guards import describe_not_finite
from fledge.training.journal import Journal
from fledge.training.losses import LossSettings, StepMetrics
from fledge.training.objective import Objective, ObjectiveSettings
from fledge.training.optimizers import build_optimizers, clip_gradients, learning_rate_factor
from fledge.training.targets.target import TargetStates
from fledge.training.ttt import TrainBatch

Recent = deque[tuple[int, StepInput]]


class TrainingStopped(UserError):
    """The run cannot go on; says where and what to do."""


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
    journal: Journal  # from the run's start

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
        self.world.sum_gradients(self.drafter.parameters())
        norm = clip_gradients(self.drafter.parameters(), self.recipe.optimizer.max_grad_norm)
        self.optimizer.step()
        window = self._window
        window.grad_norm += norm
        window.steps += 1
        is_bad = ~torch.isfinite(window.loss + norm) & (window.first_bad < 0)
        window.first_bad = torch.where(is_bad, step, window.first_bad)

    # --- telling --------------------------------------------------------------------------------------------------

    def reset_window(self) -> None:
        zero = torch.zeros((), device=self.device)
        first_bad = torch.full((), -1, device=self.device)
        self._window = _Window(zero.clone(), zero.clone(), first_bad, began=time.perf_counter())

    def pause(self, seconds: float) -> None:
        """The tokens per second are those of training: evaluations do not count."""
        self._window.began += seconds

    def check_finite(self, recent: Recent) -> None:
        """Waits for the device."""
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
            f"acceptance {self.best:.2f}, {figures['tokens_per_second']:,.0f} tokens/s",
        )
        self.reset_window()

    def evaluate(self, step: int, tokens: int, held_out: HeldOut | None) -> None:
        """On the first process, which has `held_out`; the others wait for what it found."""
        figures, asked = None, self.recipe.evaluation
        if self.world.is_first:
            assert held_out is not None
            drafter = served_copy(self.drafter, self.target, self.dtype)
            figures = evaluate(drafter, held_out, asked.depths, asked.sink_column)
            self.journal.record("evaluation", step, figures)
            shown = ", ".join(f"{value:.2f} at depth {depth}" for depth, value in figures["acceptance_length"].items())
            self.journal.say(f"step {step:,}: acceptance length {shown}")
            self.evaluations.append({"step": step, **figures})
        length = self.world.broadcast(figures and figures["acceptance_length"][asked.select_depth])
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
        """Takes a checkpoint's weights and returns all of it. The first process reads: the others may not have the file."""
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
