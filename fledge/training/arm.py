"""An arm: one drafter in training, with its objective, optimizer, best acceptance and folder. A run has one or several."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge.checkpoints.drafter_config import config_to_hf
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.training.checkpoint import export, load_checkpoint, save_checkpoint, served_copy
from fledge.training.context import TrainingContext
from fledge.training.data.prefetch import StepInput
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, Judged, describe_lengths, evaluate
from fledge.training.journal import Journal, describe_not_finite
from fledge.training.objective import Objective, StepMetrics
from fledge.training.recipe import OptimizerRecipe
from fledge.training.targets.target import Target, TargetStates
from fledge.training.ttt import TrainBatch

Recent = deque[tuple[int, StepInput]]


class TrainingStopped(UserError):
    """The run cannot continue. The message says where it stopped and what to do."""


class OutOfMemory(TrainingStopped):
    """The device ran out of memory. `on_all`: all processes of the run have stopped for it, so they can retry together."""

    def __init__(self, message: str, *, on_all: bool) -> None:
        super().__init__(message)
        self.on_all = on_all


@dataclass
class _Window:
    """Sums on the device since the last log."""

    loss: Tensor
    grad_norm: Tensor
    first_bad: Tensor  # first step whose loss was not finite; −1: none
    steps: int = 0
    tokens: int = 0
    began: float = 0.0


class Arm:
    journal: Journal  # set by the trainer when the run starts

    def __init__(self, context: TrainingContext, dist: DistributedContext) -> None:
        self.dist, self.recipe, self.drafter, self.device = dist, context.recipe, context.drafter, context.device
        self.provenance = context.provenance
        self.folder, self.dtype = Path(self.recipe.output), getattr(torch, self.recipe.run.compute_dtype)
        self.best, self.stale = 0.0, 0
        self.evaluations: list[dict[str, Any]] = []  # since this process started; earlier ones before a resume are not in it
        dist.broadcast_parameters(self.drafter)
        self.objective = self._objective(context.target, compile=self.recipe.run.compile == "yes")
        self.optimizer = build_optimizers(self.drafter, self.recipe.optimizer)

    @property
    def target(self) -> Target:
        return self.objective.target

    def _objective(self, target: Target, compile: bool) -> Objective:
        data = self.recipe.data
        return Objective(
            self.drafter,
            target,
            self.recipe.objective,
            num_positions=data.sequence_length + data.position_offset_max,
            batch_tokens=data.sequence_length * data.micro_batch_size,
            compute_dtype=None if self.dtype == torch.float32 else self.dtype,
            compile=compile,
        )

    def without_compiler(self) -> None:
        self.objective = self._objective(self.target, compile=False)
        self.optimizer.zero_grad()

    # --- a step ---------------------------------------------------------------------------------------------------

    def begin_step(self, share: float) -> None:
        """Sets the learning rate and clears the gradients. `share`: fraction of the run that is complete, 0 to 1."""
        self.optimizer.set_factor(learning_rate_factor(share, self.recipe.optimizer))
        self.optimizer.zero_grad()
        self._metrics: list[StepMetrics] = []

    def backward(self, batch: TrainBatch, states: TargetStates, counts_K: Tensor, measure: bool) -> None:
        """Accumulates a batch's gradients. `counts_K`: positions with loss at each draft step, over the whole training step."""
        weights = self.objective.step_weights(counts_K)
        loss, metrics = self.objective(batch, weights, measure=measure, states=states)
        loss.backward()
        self._metrics.append(metrics)
        self._window.loss += loss.detach()
        self._window.tokens += batch.tokens_BT.numel() * self.dist.size

    def end_step(self, step: int) -> None:
        """Updates the weights. The gradients must already be summed over all processes."""
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.recipe.optimizer.max_grad_norm or math.inf)
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
        """Excludes an evaluation's time from the tokens per second."""
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
        facts = self.dist.sum(facts)
        loss_K, acceptance_K, hits_K = facts[:-1].view(3, -1)
        passed = time.perf_counter() - window.began
        counts = counts_K.clamp_min(1).double()  # includes tokens outside the draft vocabulary: they are misses
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
        """Evaluates on the first process, which has `held_out`, and exports the drafter if it is the best so far."""
        asked = self.recipe.evaluation

        def measured() -> dict[str, Any]:
            assert held_out is not None
            drafter = served_copy(self.drafter, self.target, self.dtype)
            return evaluate(drafter, held_out, asked.depths, asked.sink_column)

        figures = self.dist.on_first(measured)
        if self.dist.is_first:
            self.journal.record("evaluation", step, figures)
            self.journal.log(f"step {step:,}: acceptance length {describe_lengths(figures)}")
            self.evaluations.append({"step": step, **figures})
        length = Judged.of(figures).length[asked.select_depth]
        if length > self.best:
            self.best, self.stale = length, 0
            if self.dist.is_first:
                record = {"step": step, "tokens": tokens, "evaluation": figures, **self.provenance}
                export(self.drafter, self.folder / "best", self.dtype, {**record, "recipe": self.recipe.to_dict()})
        else:
            self.stale += 1

    # --- keeping --------------------------------------------------------------------------------------------------

    def save_recipe(self) -> None:
        text = self.recipe.to_yaml().encode()
        write_atomically(self.folder / "recipe.yaml", lambda file: file.write(text))

    def save(self, step: int, position: dict[str, Any], keep: int) -> None:
        """Saves a checkpoint. `position`: the state of the training loop."""
        state = {
            "recipe": self.recipe.to_dict(),
            "config": config_to_hf(self.drafter.config, self.dtype),
            "provenance": self.provenance,
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": self.best,
            "stale": self.stale,
            **position,
        }
        save_checkpoint(self.folder / "checkpoints", step, state, keep)

    def resume(self, path: Path) -> dict[str, Any]:
        """Loads a checkpoint's weights and returns its whole state. Only the first process reads: others may lack the file."""
        state = self.dist.on_first(lambda: load_checkpoint(path))
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
                f"{path}: belongs to another drafter or optimizer than this recipe's; use another output folder, or "
                "delete the checkpoint to start again"
            ) from None
        self.best, self.stale = state["best"], state["stale"]
        return state


# --- optimizers -------------------------------------------------------------------------------------------------------


class Optimizers:
    """Combines one or two optimizers; each keeps its own peak learning rate."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def set_factor(self, factor: float) -> None:
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def build_optimizers(drafter: nn.Module, settings: OptimizerRecipe) -> Optimizers:
    """Builds the optimizers. With Muon, it takes the layers' matrices and fc; the head and embedding stay with AdamW.

    Norms and biases have no weight decay. Muon's update is scaled to AdamW's size, so that their learning rates are comparable.
    """
    named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    use_muon, rate = settings.kind == "muon", settings.learning_rate
    matrices = [p for name, p in named if use_muon and p.ndim == 2 and not name.startswith(("lm_head", "embed"))]
    taken = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in taken]
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=rate, betas=settings.betas, fused=others[0].is_cuda)
    ]
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices,
                lr=settings.muon_learning_rate or rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return Optimizers(parts)


def learning_rate_factor(progress: float, settings: OptimizerRecipe) -> float:
    """Returns the factor on the peak learning rate when the fraction `progress` (0…1) of the run is complete."""
    kind, warmup = settings.schedule, settings.warmup
    if progress < warmup:
        return min(1.0, max(progress, 1e-4) / warmup)  # above 0 at the first step, and at most the peak
    if kind == "constant":
        return 1.0
    done = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    if kind == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * done))
    elif kind == "linear":
        shape = 1.0 - done
    else:
        shape = min(1.0, max(0.0, 1.0 - progress) / settings.decay)
    return settings.floor + (1.0 - settings.floor) * shape
