"""The training loop: steps, logs, evaluations, checkpoints, and exact resuming."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fledge import progress
from fledge.errors import UserError
from fledge.training.arm import Arm, OutOfMemory, Recent
from fledge.training.checkpoint import check_settings, earlier_settings, latest_checkpoints, remove_leftovers
from fledge.training.context import Log, TrainingContext, build_contexts, held_out_texts, resolve
from fledge.training.data.chat_files import DataError
from fledge.training.data.packing import PackedLoader
from fledge.training.data.prefetch import Prefetcher, StepInput
from fledge.training.distributed import AgreedOutOfMemory, DistributedContext
from fledge.training.evaluate import HeldOut
from fledge.training.journal import Journal, draw_curves
from fledge.training.objective import compiler_error
from fledge.training.recipe import OWN, Recipe, arm_recipes
from fledge.training.targets.offline import StatesOnDisk, weights_fingerprint
from fledge.training.ttt import TrainBatch


class Interrupts:
    """Handles SIGINT and SIGTERM inside a `with`: the first signal sets `wanted`, a second one has its usual effect."""

    def __init__(self) -> None:
        self.wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def __exit__(self, *error: object) -> None:
        self._restore()


@dataclass
class Result:
    step: int
    finished: bool  # False: interrupted; can be resumed
    best_acceptance_length: float
    best_folder: Path
    evaluations: list[dict[str, Any]] = field(default_factory=list)  # since this process started, not those before a resume


class Trainer:
    """Trains one drafter, or several on the same batches and target states."""

    def __init__(
        self,
        contexts: Sequence[TrainingContext],
        dist: DistributedContext,
        held_out: HeldOut | None,
        began: float | None = None,
    ) -> None:
        """`held_out`: only given on the first process, which evaluates. `began`: see `train`."""
        context = contexts[0]
        self.dist, self.recipe, self.held_out = dist, context.recipe, held_out
        self.target, self.target_folder, self.device = context.target, context.target_folder, context.device
        self.arms = [Arm(one, dist) for one in contexts]
        data = self.recipe.data
        self.loader = PackedLoader(
            context.train,
            data.sequence_length,
            data.micro_batch_size,
            self.recipe.seed,
            dist.rank,
            dist.size,
            data.position_offset_max,
            data.global_batch_size,
        )
        self.step, self.tokens = 0, 0
        # The run's clock, and the part of it spent in steps. Loading, compiling (in the first step), evaluations and
        # checkpoints count towards the run's time limit, but do not advance the learning rate schedule.
        self._began, self._seconds_before, self.step_seconds = began, 0.0, 0.0
        self.loader_state: dict[str, Any] | None = None
        self.agreed_seconds = self.agreed_step_seconds = 0.0  # clocks of the first process, which all processes use
        self.total_steps = self._total_steps()
        self.interrupts = Interrupts()
        self._resume()
        self._done_at = {"evaluate": self.agreed_seconds, "save": self.agreed_seconds}
        for arm in self.arms:
            arm.journal = Journal(
                arm.folder,
                active=dist.is_first,
                resumed_step=self.step,
                total_steps=self.total_steps,
                max_seconds=self.recipe.run.max_seconds,
                label=arm.folder.name if len(self.arms) > 1 else "",
            )

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, including earlier attempts."""
        return self._seconds_before + (0.0 if self._began is None else time.perf_counter() - self._began)

    def _total_steps(self) -> int | None:
        """Returns the total number of steps; None if only the time limit ends the run."""
        run, limits = self.recipe.run, []
        if run.steps is not None:
            limits.append(run.steps)
        if run.epochs is not None:
            limits.append(max(1, int(run.epochs * self.loader.steps_per_epoch)))
        return min(limits) if limits else None

    def use_states_on_disk(self) -> None:
        """Computes the missing target states of all data, and releases the target."""
        recipe, folder, layers = self.recipe, self.recipe.run.hidden_states_folder, self.arms[0].drafter.config.aux_layer_ids
        identity = {
            "model": recipe.target.model,
            "weights": weights_fingerprint(self.target_folder),
            "dtype": recipe.target.dtype,
            "layers": list(layers),
        }
        place = Path(folder or Path(recipe.output) / "states")
        states = StatesOnDisk(self.target, len(layers), place, identity, self.dist.rank)
        with progress.task("computing the target's hidden states", 100, "%") as shown:
            for share in states.fill(self.loader, self.arms[0].objective.plan, self.device, self.dist):
                if self.dist.is_first:
                    shown.update(100 * share)
        self.dist.barrier()
        states.reload()
        states.release_target()
        self.target = states
        for arm in self.arms:
            arm.objective.target = states

    # --- the loop -------------------------------------------------------------------------------------------------

    def fit(self) -> list[Result]:
        """Trains to the end or to an interruption; returns the result of each arm."""
        prefetch = Prefetcher(self.loader, self.arms[0].objective, self.device)
        self._recent: Recent = deque(maxlen=self.recipe.run.log_every + 1)
        for arm in self.arms:
            arm.reset_window()
        finished = False
        try:
            with self.interrupts:
                finished = self._loop(prefetch)
        finally:
            prefetch.close()
            for arm in self.arms:
                arm.journal.close()
                if self.dist.is_first:  # also after an error, when curves are needed most
                    draw_curves(arm.folder / "log.jsonl", arm.folder / "curves.png")
        for arm in self.arms:
            if finished:
                arm.journal.log(
                    f"done: {self.step:,} steps, acceptance length {arm.best:.3f}; drafter in {arm.folder / 'best'}"
                )
            else:
                arm.journal.log(f"interrupted at step {self.step:,}; run the same command again to continue")
        return [Result(self.step, finished, arm.best, arm.folder / "best", arm.evaluations) for arm in self.arms]

    def _loop(self, prefetch: Prefetcher) -> bool:
        """Runs the remaining steps; returns whether the run is finished."""
        run, is_compiled = self.recipe.run, False
        if self._began is None:
            self._began = time.perf_counter()
        if self.step == 0:
            self._evaluate()
        while not self._is_done():
            began = time.perf_counter()
            step_input = next(prefetch)
            counts, outside, stop = self._agree(step_input)
            if stop:
                break
            is_logged = (self.step + 1) % run.log_every == 0
            self._train_step(step_input, counts, measure=is_logged)
            self.step += 1
            self.loader_state = step_input.loader_state
            if is_logged:
                for arm in self.arms:
                    arm.log(self.step, self.tokens, self.agreed_seconds, counts + outside, step_input.epoch, self._recent)
            self.step_seconds += time.perf_counter() - began if is_compiled else 0.0
            is_compiled = True
            last = self._is_done()
            if self._is_due("evaluate", run.evaluate_every, run.evaluate_seconds) or last:
                self._check_finite()
                self._evaluate()
            if self._is_due("save", run.save_every, run.save_seconds) and not last:
                self._check_finite()
                self.save()
        self._check_finite()
        self.save()
        return self._is_done()

    def _is_due(self, what: str, every: int, seconds: float | None) -> bool:
        """Whether an action is due, by steps or by the first process's clock; the result is the same in all processes."""
        due = self.step % every == 0 or (seconds is not None and self.agreed_seconds - self._done_at[what] >= seconds)
        if due:
            self._done_at[what] = self.agreed_seconds
        return due

    def _is_done(self) -> bool:
        run = self.recipe.run
        if self.total_steps is not None and self.step >= self.total_steps:
            return True
        if run.patience is not None and self.arms[0].stale >= run.patience:
            return True
        return run.max_seconds is not None and self.step > 0 and self.agreed_seconds >= run.max_seconds

    def _agree(self, step_input: StepInput) -> tuple[Tensor, Tensor, bool]:
        """Returns, over all processes: positions with loss at each draft step, positions left out because their token is
        outside the draft vocabulary, and whether one process wants to stop. Also stores the first process's clocks."""
        clocks = (self.seconds, self.step_seconds) if self.dist.is_first else (0.0, 0.0)
        mine = torch.tensor([float(self.interrupts.wanted), *clocks])
        facts = self.dist.sum(torch.cat([step_input.num_valid_K, step_input.num_outside_K, mine]).double())
        self.agreed_seconds, self.agreed_step_seconds = facts[-2:].tolist()
        valid, outside = facts[:-3].float().chunk(2)
        return valid, outside, bool(facts[-3] > 0)

    def _share(self) -> float:
        """Returns the fraction of the run that is complete, by steps or time. The learning rate depends on it."""
        share = 0.0 if self.total_steps is None else self.step / self.total_steps
        if (limit := self.recipe.run.max_seconds) is not None:
            left = max(limit - self.agreed_seconds, 1e-9)
            share = max(share, self.agreed_step_seconds / (self.agreed_step_seconds + left))
        return share

    def _train_step(self, step_input: StepInput, counts: Tensor, measure: bool) -> None:
        counts = counts.to(self.device, non_blocking=True)
        for arm in self.arms:
            arm.begin_step(self._share())
        with self._agree_on_memory():
            for batch in step_input.batches:
                self._backward(batch, counts, measure)
        for arm in self.arms:
            self.dist.sum_gradients(arm.drafter.parameters())
        with self._agree_on_memory():  # the first step allocates the optimizer's moments
            for arm in self.arms:
                arm.end_step(self.step)
        self.tokens += sum(batch.tokens_BT.numel() for batch in step_input.batches) * self.dist.size
        self._recent.append((self.step, step_input))

    def _agree_on_memory(self) -> AbstractContextManager[None]:
        """`dist.agree_on_memory`, except for a sharded target: the others wait in its collectives, so the process must end."""
        return nullcontext() if self.recipe.run.shard_target else self.dist.agree_on_memory()

    def _backward(self, batch: TrainBatch, counts: Tensor, measure: bool) -> None:
        states = None
        for arm in self.arms:
            try:
                states = states or self.target.states(batch)
                arm.backward(batch, states, counts, measure)
            except Exception as error:
                reason = compiler_error(error)
                if not (arm.objective.is_compiled and reason and self.step < 2):
                    raise
                arm.journal.log(f"torch.compile failed ({reason}); continuing without it, which is slower (run.compile=no)")
                self.target.without_compiler()
                arm.without_compiler()
                states = states or self.target.states(batch)
                arm.backward(batch, states, counts, measure)

    def _check_finite(self) -> None:
        for arm in self.arms:
            arm.check_finite(self._recent)

    def _evaluate(self) -> None:
        began = time.perf_counter()
        for arm in self.arms:
            arm.evaluate(self.step, self.tokens, self.held_out)
        for arm in self.arms:
            arm.pause(time.perf_counter() - began)

    # --- keeping --------------------------------------------------------------------------------------------------

    def save(self) -> None:
        if self.dist.is_first:
            clocks = {"seconds": self.seconds, "step_seconds": self.step_seconds}
            position = {"loader": self.loader_state, "tokens": self.tokens, **clocks}
            # With several arms keep one more, so that a run killed between two saves can resume from a step that all have.
            keep = self.recipe.run.keep + (len(self.arms) > 1)
            for arm in self.arms:
                arm.save(self.step, position, keep)
        self.dist.barrier()

    def _resume(self) -> None:
        """Resumes from the first process's files, because the machines of other processes may not have them."""
        paths = self.dist.on_first(lambda: latest_checkpoints([arm.folder for arm in self.arms]))
        for arm, path in zip(self.arms, paths, strict=False):
            state = arm.resume(path)
        if not paths:
            return
        if state["loader"] is not None:
            try:
                self.loader.load_state_dict(state["loader"])
            except DataError as error:
                raise UserError(f"{paths[-1]}: {error}") from None
        self.loader_state = state["loader"]
        self.step, self.tokens = state["step"], state["tokens"]
        self._seconds_before = self.agreed_seconds = state["seconds"]
        self.step_seconds = self.agreed_step_seconds = state["step_seconds"]


def train(recipe: Recipe, *, began: float | None = None, dist: DistributedContext | None = None) -> Result:
    """Runs or resumes a whole training run: everything that `fledge train` does.

    `began`: when the clock of `run.max_seconds` started (time.perf_counter()); None: it starts with the first step.
    `dist`: given if the caller has joined the processes and will leave them; None: joined and left here.
    """
    return _train(recipe, [recipe], began, dist)[0]


def train_arms(
    recipe: Recipe, arms: Sequence[str], *, began: float | None = None, dist: DistributedContext | None = None
) -> dict[str, Result]:
    """Trains several drafters on the same batches of target states, each as if it were trained alone (see `arm_recipes`)."""
    recipes = arm_recipes(recipe, arms)
    results = _train(recipe, recipes, began, dist)
    return {Path(one.output).name: result for one, result in zip(recipes, results, strict=True)}


def _train(common: Recipe, arms: Sequence[Recipe], began: float | None, joined: DistributedContext | None) -> list[Result]:
    asked = common.run.device
    use_cuda = asked.startswith("cuda") or (asked == "auto" and torch.cuda.is_available())
    dist = joined or DistributedContext.join(use_cuda=use_cuda)
    log = progress.say if dist.is_first else (lambda text: None)
    try:
        recipes = _resolved(common, arms, dist, log)
        contexts = build_contexts(recipes, dist, log)
        run = recipes[0].run
        # A sharded target needs all processes for every pass, although only the first one evaluates.
        takes_part = dist.is_first or run.shard_target
        held_out = held_out_texts(contexts[0]) if takes_part else None
        dist.barrier()  # on the host, with a long timeout: next comes a GPU collective, which times out after ten minutes
        trainer = Trainer(contexts, dist, held_out if dist.is_first else None, began)
        vocabulary = contexts[0].vocabulary
        del contexts, held_out  # so that the trainer can free the target
        log(f"packing: {trainer.loader}")
        if run.hidden_states == "offline":
            trainer.use_states_on_disk()
        for arm in trainer.arms if dist.is_first else ():  # only after all checks, so that a refused run changes no files
            if vocabulary is not None and not arm.recipe.data.vocabulary:
                vocabulary.save(arm.folder / "vocabulary")
            arm.save_recipe()
            remove_leftovers(arm.folder / "checkpoints")
        if trainer.step:
            log(f"resuming at step {trainer.step:,}")
        return trainer.fit()
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"the GPU ran out of memory ({str(error).split('. ')[0]}): lower data.micro_batch_size, "
            "set objective.recompute=true, or lower objective.chunk_rows",
            on_all=dist.size == 1 or isinstance(error, AgreedOutOfMemory),
        ) from error
    finally:
        if joined is None:
            dist.leave()


def _resolved(common: Recipe, arms: Sequence[Recipe], dist: DistributedContext, log: Log) -> list[Recipe]:
    """Resolves the recipes of all arms, and checks them against earlier runs in their folders."""
    before: list[Mapping[str, Any] | None] = dist.on_first(lambda: [earlier_settings(arm.output) for arm in arms])
    common = resolve(common, dist, before[0])
    log(common.to_yaml())
    own = ({"output": arm.output} | {key: getattr(arm, key) for key in OWN} for arm in arms)
    recipes = [replace(common, **settings) for settings in own]
    for recipe, earlier in zip(recipes, before, strict=True):
        if earlier is not None:
            check_settings(recipe, earlier, log)
    return recipes
