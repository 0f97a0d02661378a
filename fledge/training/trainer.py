"""The training loop: steps, logs, evaluations, checkpoints; resumes exactly where it was."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge import progress
from fledge.checkpoints.drafter_config import config_to_hf
from fledge.errors import UserError
from fledge.files import write_atomically
from fledge.training.checkpoint import (
    check_settings,
    checkpoints,
    earlier_settings,
    load_checkpoint,
    remove_leftovers,
    restore_random_state,
    save_checkpoint,
)
from fledge.training.context import TrainingContext, build_context, held_out_texts, resolve
from fledge.training.data.loading import DataError
from fledge.training.data.packing import PackedLoader
from fledge.training.data.prefetch import Prefetcher, StepInput
from fledge.training.distributed import DistributedContext
from fledge.training.evaluate import HeldOut, evaluate
from fledge.training.export import export, served_copy
from fledge.training.guards import Interrupts, describe_not_finite
from fledge.training.journal import Journal, draw_curves
from fledge.training.losses import LossSettings, StepMetrics
from fledge.training.objective import Objective, ObjectiveSettings
from fledge.training.optimizers import build_optimizers, clip_gradients, learning_rate_factor
from fledge.training.recipe import Recipe
from fledge.training.targets.offline import StatesOnDisk, weights_fingerprint


class TrainingStopped(UserError):
    """The run cannot go on; says where and what to do."""


@dataclass
class Result:
    step: int
    finished: bool  # False: interrupted, to be resumed
    best_acceptance_length: float
    best_folder: Path
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # of this process's part of the run


@dataclass
class _Window:
    """Sums on the device since the last log."""

    loss: Tensor
    grad_norm: Tensor
    first_bad: Tensor  # step whose loss was not finite; −1: none
    steps: int = 0
    tokens: int = 0
    began: float = 0.0


class Trainer:
    def __init__(self, context: TrainingContext, world: DistributedContext, held_out: HeldOut | None) -> None:
        """`held_out`: on the first process, which evaluates."""
        self.context, self.world, self.recipe, self.held_out = context, world, context.recipe, held_out
        self.target = context.target
        recipe, self.drafter, self.device = self.recipe, context.drafter, context.device
        self.folder, self.dtype = Path(recipe.output), getattr(torch, recipe.run.compute_dtype)
        world.broadcast_parameters(self.drafter)
        self.objective = self._objective(compile=recipe.run.compile == "yes")
        self.optimizer = build_optimizers(
            self.drafter,
            recipe.optimizer.kind,
            recipe.optimizer.learning_rate,
            weight_decay=recipe.optimizer.weight_decay,
            betas=recipe.optimizer.betas,
            muon_learning_rate=recipe.optimizer.muon_learning_rate,
        )
        data = recipe.data
        self.loader = PackedLoader(
            context.train,
            data.sequence_length,
            data.micro_batch_size,
            recipe.seed,
            world.rank,
            world.size,
            data.position_offset_max,
            data.global_batch_size,
        )
        self.step, self.seconds, self.tokens, self.best, self.stale = 0, 0.0, 0, 0.0, 0
        self.total_steps = self._total_steps()
        self.interrupts = Interrupts()
        self._resume()
        self._done_at = {"evaluate": self.agreed_seconds, "save": self.agreed_seconds}
        self.journal = Journal(
            self.folder,
            active=world.is_first,
            resumed_step=self.step,
            total_steps=self.total_steps,
            max_seconds=recipe.run.max_seconds,
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

    def _total_steps(self) -> int | None:
        """None: only the clock ends the run."""
        run, limits = self.recipe.run, []
        if run.steps is not None:
            limits.append(run.steps)
        if run.epochs is not None:
            limits.append(max(1, int(run.epochs * self.loader.steps_per_epoch)))
        return min(limits) if limits else None

    def use_states_on_disk(self) -> None:
        """Runs the target over all data, unless that is done; then training no longer holds it."""
        recipe, folder = self.recipe, self.recipe.run.hidden_states_folder
        identity = {
            "model": recipe.target.model,
            "weights": weights_fingerprint(self.context.target_folder),
            "dtype": recipe.target.dtype,
            "layers": list(self.drafter.config.aux_layer_ids),
        }
        states = StatesOnDisk(
            self.target,
            len(self.drafter.config.aux_layer_ids),
            Path(folder or self.folder / "states"),
            identity,
            self.world.rank,
        )
        with progress.task("computing the target's hidden states", 100, "%") as shown:
            for share in states.fill(self.loader, self.objective.plan, self.device, self.world):
                if self.world.is_first:
                    shown.update(100 * share)
        self.world.barrier()
        states.reload()
        states.release_target()
        self.target = self.objective.target = states
        self.context = replace(self.context, target=states)

    # --- the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> Result:
        run, journal = self.recipe.run, self.journal
        result = Result(self.step, False, self.best, self.folder / "best")
        prefetch = Prefetcher(self.loader, self.objective, self.device)
        self._recent: deque[tuple[int, StepInput]] = deque(maxlen=run.log_every + 1)
        self._reset_window()
        try:
            with self.interrupts:
                self._loop(prefetch, result)
        finally:
            prefetch.close()
            self.journal.close()
            if self.world.is_first:  # a run that stops on an error most of all
                draw_curves(self.folder / "log.jsonl", self.folder / "curves.png")
        result.step, result.best_acceptance_length = self.step, self.best
        if self.world.is_first:
            if result.finished:
                journal.say(f"done: {self.step:,} steps, acceptance length {self.best:.3f}; drafter in {result.best_folder}")
            else:
                journal.say(f"interrupted at step {self.step:,}; the same command goes on from here")
        return result

    def _loop(self, prefetch: Prefetcher, result: Result) -> None:
        run = self.recipe.run
        if self.step == 0:
            self._evaluate(result)
        while not self._is_done():
            step_input = next(prefetch)
            began = time.perf_counter()
            counts, outside, stop, seconds = self._agree(step_input)
            if stop:
                break
            self.optimizer.set_factor(self._factor(seconds))
            is_logged = (self.step + 1) % run.log_every == 0
            metrics = self._train_step(step_input, counts, measure=is_logged)
            self.step += 1
            self.loader_state = step_input.loader_state
            if is_logged:
                self._log(metrics, counts + outside, step_input.epoch)
            self.seconds += time.perf_counter() - began
            last = self._is_done()
            if self._is_due("evaluate", run.evaluate_every, run.evaluate_seconds) or last:
                self._check_finite()
                self._evaluate(result)
            if self._is_due("save", run.save_every, run.save_seconds) and not last:
                self._check_finite()
                self.save()
        self._check_finite()
        self.save()
        result.finished = self._is_done()

    def _is_due(self, what: str, every: int, seconds: float | None) -> bool:
        """By steps or by the first process's clock: the same answer in all processes."""
        due = self.step % every == 0 or (seconds is not None and self.agreed_seconds - self._done_at[what] >= seconds)
        if due:
            self._done_at[what] = self.agreed_seconds
        return due

    def _is_done(self) -> bool:
        run = self.recipe.run
        if self.total_steps is not None and self.step >= self.total_steps:
            return True
        if run.patience is not None and self.stale >= run.patience:
            return True
        return run.max_seconds is not None and self.agreed_seconds >= run.max_seconds

    def _agree(self, step_input: StepInput) -> tuple[Tensor, Tensor, bool, float]:
        """Over all processes: positions with loss at each draft step, those without as their token is outside the draft
        vocabulary, whether anyone wants to stop; and the first one's seconds."""
        mine = torch.tensor([float(self.interrupts.wanted), self.seconds if self.world.is_first else 0.0])
        facts = self.world.sum(torch.cat([step_input.num_valid_K, step_input.num_outside_K, mine]).double())
        self.agreed_seconds = float(facts[-1])
        valid, outside = facts[:-2].float().chunk(2)
        return valid, outside, bool(facts[-2] > 0), self.agreed_seconds

    def _factor(self, seconds: float) -> float:
        optimizer, run = self.recipe.optimizer, self.recipe.run
        share = 0.0 if self.total_steps is None else self.step / self.total_steps
        if run.max_seconds is not None:
            share = max(share, seconds / run.max_seconds)
        return learning_rate_factor(share, optimizer.schedule, optimizer.warmup, optimizer.decay, optimizer.floor)

    def _train_step(self, step_input: StepInput, counts: Tensor, measure: bool) -> list[StepMetrics]:
        weights = self.objective.step_weights(counts.to(self.device, non_blocking=True))
        self.optimizer.zero_grad()
        metrics = []
        for batch in step_input.batches:
            loss, batch_metrics = self._forward_backward(batch, weights, measure)
            metrics.append(batch_metrics)
            self._window.loss += loss
            self._window.tokens += batch.tokens_BT.numel() * self.world.size
            self.tokens += batch.tokens_BT.numel() * self.world.size
        self.world.sum_gradients(self.drafter.parameters())
        norm = clip_gradients(self.drafter.parameters(), self.recipe.optimizer.max_grad_norm)
        self.optimizer.step()
        window = self._window
        window.grad_norm += norm
        window.steps += 1
        is_bad = ~torch.isfinite(window.loss + norm) & (window.first_bad < 0)
        window.first_bad = torch.where(is_bad, self.step, window.first_bad)
        self._recent.append((self.step, step_input))
        return metrics

    def _forward_backward(self, batch: Any, weights: Tensor, measure: bool) -> tuple[Tensor, StepMetrics]:
        try:
            loss, metrics = self.objective(batch, weights, measure=measure)
            loss.backward()
        except Exception as error:
            if self.objective.settings.compile and _is_compiler_error(error) and self.step < 2:
                inner = getattr(error, "inner_exception", error)
                reason = (str(inner).strip() or type(inner).__name__).splitlines()[0]
                self.journal.say(f"torch.compile failed ({reason}); going on without it, slower (run.compile=no)")
                self.target.without_compiler()
                self.objective = self._objective(compile=False)
                self.optimizer.zero_grad()
                return self._forward_backward(batch, weights, measure)
            raise
        return loss.detach(), metrics

    # --- telling --------------------------------------------------------------------------------------------------

    def _reset_window(self) -> None:
        zero = torch.zeros((), device=self.device)
        first_bad = torch.full((), -1, device=self.device)
        self._window = _Window(zero.clone(), zero.clone(), first_bad, began=time.perf_counter())

    def _check_finite(self) -> None:
        """Waits for the device."""
        bad = int(self._window.first_bad)
        if bad >= 0:
            step_input = next((x for step, x in self._recent if step == bad), None)
            raise TrainingStopped(describe_not_finite(bad + 1, step_input, self.target, self.folder))

    def _log(self, metrics: list[StepMetrics], counts: Tensor, epoch: float) -> None:
        window = self._window
        sums = torch.stack([torch.stack([m.loss_K, m.acceptance_K, m.hits_K]) for m in metrics]).sum(0)
        facts = torch.cat([sums.flatten(), window.loss[None] / window.steps]).cpu().double()
        self._check_finite()
        facts = self.world.sum(facts)
        loss_K, acceptance_K, hits_K = facts[:-1].view(3, -1)
        seconds = time.perf_counter() - window.began
        counts = counts.clamp_min(1).double()  # with the tokens outside the draft vocabulary: they are misses
        figures = {
            "loss": float(facts[-1]),
            "loss_by_step": (loss_K / self.objective.decay_K.cpu()).tolist(),
            "accuracy": (hits_K / counts).tolist(),
            "acceptance_probability": (acceptance_K / counts).tolist(),
            "learning_rate": self.optimizer.parts[0].param_groups[0]["lr"],
            "grad_norm": float(window.grad_norm / window.steps),
            "epoch": epoch,
            "tokens": self.tokens,
            "tokens_per_second": window.tokens / seconds,
        }
        if self.device.type == "cuda":
            figures["peak_memory_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        self.journal.record("train", self.step, figures)
        accuracy = figures["accuracy"]
        self.journal.progress(
            self.step,
            self.agreed_seconds,
            f"loss {figures['loss']:.3f}, accuracy {accuracy[0]:.1%}…{accuracy[-1]:.1%}, "
            f"acceptance {self.best:.2f}, {figures['tokens_per_second']:,.0f} tokens/s",
        )
        self._reset_window()

    def _evaluate(self, result: Result) -> None:
        """On the first process; the others wait for what it found."""
        began = time.perf_counter()
        figures = None
        if self.world.is_first:
            asked = self.recipe.evaluation
            drafter = served_copy(self.drafter, self.target, self.dtype)
            figures = evaluate(drafter, self.held_out, asked.depths, asked.sink_column)
            length = figures["acceptance_length"][asked.select_depth]
            self.journal.record("evaluation", self.step, figures)
            shown = ", ".join(f"{value:.2f} at depth {depth}" for depth, value in figures["acceptance_length"].items())
            self.journal.say(f"step {self.step:,}: acceptance length {shown}")
            result.evaluations.append({"step": self.step, **figures})
        length = self.world.broadcast(figures and figures["acceptance_length"][self.recipe.evaluation.select_depth])
        if length > self.best:
            self.best, self.stale = length, 0
            if self.world.is_first:
                self._export(self.folder / "best", figures)
        else:
            self.stale += 1
        self._window.began += time.perf_counter() - began  # the tokens per second are those of training

    # --- keeping --------------------------------------------------------------------------------------------------

    def _export(self, folder: Path, evaluation: dict[str, Any]) -> None:
        where = {"step": self.step, "tokens": self.tokens, "evaluation": evaluation}
        export(self.drafter, folder, self.dtype, {**where, **self.context.provenance, "recipe": self.recipe.to_dict()})

    def save(self) -> None:
        if self.world.is_first:
            state = {
                "recipe": self.recipe.to_dict(),
                "config": config_to_hf(self.drafter.config, self.dtype),
                "provenance": self.context.provenance,
                "drafter": self.drafter.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "loader": self.loader_state,
                "seconds": self.seconds,
                "tokens": self.tokens,
                "best": self.best,
                "stale": self.stale,
            }
            save_checkpoint(self.folder / "checkpoints", self.step, state, self.recipe.run.keep)
        self.world.barrier()

    def _resume(self) -> None:
        """From the first process's files: the others may run on machines that do not have them."""
        self.loader_state, self.agreed_seconds = None, 0.0
        found = self.world.on_first(lambda: checkpoints(self.folder / "checkpoints"))
        if not found:
            return
        state = self.world.on_first(lambda: load_checkpoint(found[-1]))
        if not torch.equal(state["drafter"]["d2t"], self.drafter.d2t.cpu()):
            raise UserError(
                f"{found[-1]}: was trained with another draft vocabulary; put it back (data.vocabulary), or use another "
                "output folder"
            )
        try:
            self.drafter.load_state_dict(state["drafter"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError):
            raise UserError(
                f"{found[-1]}: belongs to another drafter or optimiser than this recipe's; use another output folder, or "
                "delete it to start anew"
            ) from None
        if state["loader"] is not None:
            try:
                self.loader.load_state_dict(state["loader"])
            except DataError as error:
                raise UserError(f"{found[-1]}: {error}") from None
        self.loader_state = state["loader"]
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
        self.best, self.stale, self.agreed_seconds = state["best"], state["stale"], state["seconds"]
        restore_random_state(state["random"])


def _is_compiler_error(error: Exception) -> bool:
    module = type(error).__module__
    return module.startswith(("torch._dynamo", "torch._inductor"))


def train(recipe: Recipe) -> Result:
    """A whole run, or the rest of one: everything `fledge train` does."""
    asked = recipe.run.device
    world = DistributedContext.join(use_cuda=asked.startswith("cuda") or (asked == "auto" and torch.cuda.is_available()))
    folder = Path(recipe.output)
    say = Journal.tell if world.is_first else (lambda text: None)
    try:
        before = world.on_first(lambda: earlier_settings(recipe.output))
        recipe = resolve(recipe, world, before)
        say(recipe.to_yaml())
        if before is not None:
            check_settings(recipe, before, say)
        context = build_context(recipe, world, say)
        # A sharded target needs all processes for every pass, though the first alone evaluates.
        takes_part = world.is_first or recipe.run.shard_target
        held_out = held_out_texts(context) if takes_part else None
        trainer = Trainer(context, world, held_out if world.is_first else None)
        del context, held_out  # the trainer may let go of the target
        say(f"packing: {trainer.loader}")
        if recipe.run.hidden_states == "offline":
            trainer.use_states_on_disk()
        if world.is_first:  # only now: a run that is refused leaves things as they were
            if trainer.context.vocabulary is not None and not recipe.data.vocabulary:
                trainer.context.vocabulary.save(folder / "vocabulary")
            write_atomically(folder / "recipe.yaml", lambda file: file.write(recipe.to_yaml().encode()))
            remove_leftovers(folder / "checkpoints")
        if trainer.step:
            say(f"resuming at step {trainer.step:,}")
        return trainer.fit()
    except torch.OutOfMemoryError as error:
        raise TrainingStopped(
            f"the GPU ran out of memory ({str(error).split('. ')[0]}): lower data.micro_batch_size, "
            "set objective.recompute=true, or lower objective.chunk_rows"
        ) from error
    finally:
        world.leave()
