"""Trains a candidate in small pieces, and has it judged: a generator that pauses after each piece, so that serving goes on.

draw samples ─▶ hidden states, where they were not collected ─▶ loss of `fledge train`, backward ─▶ optimiser step
      … `steps_per_candidate` times ─▶ roll out candidate and serving drafter on held-out texts ─▶ gate ─▶ swap
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fledge.drift.metrics import Count
from fledge.drift.texts import TargetText, in_groups
from fledge.errors import printable
from fledge.learning.batch import chunk_rows, pack
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import FixedSet
from fledge.learning.gate import Decision, accepted_counts, judge
from fledge.learning.samples import Sample, SampleRing
from fledge.learning.target import ServedTarget
from fledge.learning.weights import are_finite, weights_of
from fledge.models.drafter import EagleDrafter
from fledge.training.arm import build_optimizers, clip_gradients
from fledge.training.checkpoint import served_copy
from fledge.training.objective import LossSettings, Objective, ObjectiveSettings, compiler_error
from fledge.training.targets.target import TargetStates

log = logging.getLogger("fledge.learning")

WARM_UP_STEPS = 8
MAX_BAD_STEPS = 3  # so many losses in a row that are not finite: training starts again from the serving weights
# A candidate that is worse, or so many refused in a row: training starts again from the serving weights, at half the learning
# rate. How large it may be depends on the drafter: one that was trained for long loses at a rate that a new one needs.
PATIENCE = 6
MOST_SLOWDOWN = 32  # of the learning rate, by such halvings
SPEED_UP, MOST_SPEEDUP = 1.25, 2  # of the learning rate, when a candidate was accepted; and by all of them
# Steps that a candidate's weights are the mean of, about. Small batches leave noise in the weights: after 64 steps on
# translations the mean gained 10.4 % and lost 2.0 % on the fixed set, the weights of the last step 9.4 % and 3.3 %.
AVERAGED_STEPS = 24
GATE_TOKENS = {"cpu": 1024, "cuda": 4096}  # rolled out in one piece
# Of each weight, in fp32: master, mean, two moments, the serving and the previous one; and a gradient or, in the gate, a
# candidate.
WEIGHT_BYTES = 7 * 4
READ_TOKENS = {"cpu": 512, "cuda": 2048}  # of the target, in one piece


@dataclass
class LearnerCounts:
    """Since the start. Plain numbers: another thread may read them."""

    steps: int = 0
    tokens: int = 0
    non_finite: int = 0
    candidates: int = 0
    accepted: int = 0
    refused: int = 0
    resets: int = 0
    loss: float = 0.0  # of the last step


class Learner:
    def __init__(
        self,
        master: EagleDrafter,
        target: ServedTarget,
        ring: SampleRing,
        fixed: FixedSet,
        config: LearnConfig,
        *,
        depth: int,
        swap: Callable[[dict[str, Tensor], Decision], Iterator[None]],
        refused: Callable[[Decision], None],
    ) -> None:
        """`master`: fp32 weights that start as the serving ones. `depth`: that the gate drafts to. `swap`: serves the
        weights of an accepted candidate, and calls `serve_next`. `refused`: told of every other."""
        self.target, self.ring, self.fixed, self.config, self.depth, self.swap = target, ring, fixed, config, depth, swap
        self.refused, self.device = refused, target.device
        self.master = master.to(self.device).train().requires_grad_(True)
        self.is_cpu = self.device.type == "cpu"
        self.compute_dtype = None if self.is_cpu else torch.bfloat16
        self.objective = self._objective(compiled=not self.is_cpu)
        self.parameters = list(self.master.parameters())
        self.serving = weights_of(self.master)
        self.counts = LearnerCounts()
        self.generation = 0  # that is served
        self.newest = 0  # the highest number given: that of a generation that fell is not given again
        # Weights of the first generation after a restart with a later one, until the fixed set was measured with them.
        self.first: dict[str, Tensor] | None = None
        self.refused_in_a_row = 0
        self.at_work: list[Sample] = []  # all samples of requests that `pieces` holds; they may have left the ring
        self._start_over(config.learning_rate)

    def _objective(self, compiled: bool) -> Objective:
        """Compiled on a GPU: launched one by one, operations took 65 ms for 4,096 tokens on an H200, while a training run,
        compiled, takes 38 ms for 32,768."""
        config = self.config
        settings = ObjectiveSettings(
            steps=config.ttt_steps,
            loss=LossSettings(),
            compute_dtype=self.compute_dtype,
            chunk_rows=chunk_rows(self.master.config, config),
            compile=compiled,
        )
        return Objective(self.master, self.target, settings, config.batch_tokens, config.batch_tokens)

    @property
    def num_bytes(self) -> int:
        """Of all copies of the weights."""
        return WEIGHT_BYTES * sum(p.numel() for p in self.parameters)

    def _start_over(self, learning_rate: float) -> None:
        """Trains on from the serving weights, with fresh moments."""
        self.load(self.serving)
        self.learning_rate = learning_rate
        self.optimizer = build_optimizers(self.master, "adamw", self.config.learning_rate)
        self.steps_since_start = 0
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.master.named_parameters():
            parameter.copy_(weights[name])

    def serve_next(self, weights: dict[str, Tensor]) -> int:
        """An accepted candidate is served now; the number of its generation."""
        self.newest += 1
        self.serving, self.generation = weights, self.newest
        return self.newest

    def serve_again(self, weights: dict[str, Tensor], generation: int) -> None:
        """A roll-back: those are served now, and training goes on from them."""
        self.serving, self.generation = weights, generation
        self._start_over(max(self.learning_rate / 2, self.config.learning_rate / MOST_SLOWDOWN))

    def warm_up(self) -> None:
        """On a GPU a step is compiled for the one shape of a batch: not while requests wait."""
        if self.is_cpu:
            return
        tokens = [one % self.target.vocab_size for one in range(3, 35)]
        sample = Sample(tokens, 1, text=self.target.read([(tokens, 1)])[0])
        began = time.perf_counter()
        try:
            self._train([sample])
            log.info("learning: a training step was compiled in %.0f s", time.perf_counter() - began)
        except Exception as error:
            if (reason := compiler_error(error)) is None:
                raise
            log.warning("learning: torch.compile failed (%s); training steps are slower without it", printable(reason))
            self.objective = self._objective(compiled=False)
            self._train([sample])
        self.counts = LearnerCounts()
        self._start_over(self.learning_rate)

    def release(self) -> None:
        """Learning has stopped: gives up all memory."""
        del self.optimizer, self.objective, self.master
        self.parameters, self.average, self.serving, self.first = [], [], {}, None
        self.fixed, self.at_work = FixedSet(), []

    # The work, in pieces

    def pieces(self) -> Iterator[bool]:
        """Endless. True: a piece was done. False: there is nothing to do until more samples come."""
        yield from self._read_fixed()
        while True:
            bad_steps = 0
            for _ in range(self.config.steps_per_candidate):
                while not (batch := self._draw()):
                    yield False
                yield from self._read_missing(batch)
                if self._train(batch):
                    bad_steps = 0
                elif (bad_steps := bad_steps + 1) >= MAX_BAD_STEPS:
                    log.warning(
                        "learning: %d losses in a row were not finite; starting again from the serving weights", bad_steps
                    )
                    self._reset()
                yield True
            self.at_work = batch = []  # no longer needed: the gate may wait for hours
            while len(self.ring.held_out) < self.config.min_held_out:
                yield False
            yield from self._gate()

    def _read_fixed(self) -> Iterator[bool]:
        yield from self._read_missing([*self.fixed.replay, *self.fixed.judged])
        # First of all: later generations are compared with it.
        unknown = [one for one in self.fixed.judged if one not in self.fixed.first_counts]
        for counts in self._counted(unknown, self.first or self.serving):
            self.fixed.first_counts |= counts
            yield True
        self.first = None

    def _draw(self) -> list[Sample]:
        """Traffic, and some of the fixed set with it."""
        room = self.config.batch_tokens
        fixed: list[Sample] = []
        budget = int(room * self.config.fixed_share) if self.fixed.replay else 0
        for _ in range(len(self.fixed.replay)):
            one = self.fixed.replay[int(torch.randint(len(self.fixed.replay), ()))]
            if len(one.tokens) > budget:
                break
            if one not in fixed:
                fixed.append(one)
                budget -= len(one.tokens)
        self.at_work = self.ring.draw(room - sum(len(one.tokens) for one in fixed))
        return self.at_work + fixed if self.at_work else []

    def _read_missing(self, samples: Sequence[Sample]) -> Iterator[bool]:
        """Computes hidden states where there are none, a few samples at a time.

        A generator of its own: a loop variable of `pieces` would hold the last few past their age.
        """
        missing = [one for one in samples if one.text is None]
        for group in in_groups([len(one.tokens) for one in missing], READ_TOKENS[self.device.type]):
            some = [missing[index] for index in group]
            for sample, text in zip(some, self.target.read([(one.tokens, one.answer_start) for one in some]), strict=True):
                sample.keep(text)
            yield True

    @torch.enable_grad()
    def _train(self, samples: Sequence[Sample]) -> bool:
        """One step; False, and the weights unchanged, if its loss or gradient is not finite."""
        packed, states = pack([one.text for one in samples if one.text is not None], self._length(samples))
        if self.compute_dtype is None:
            states = TargetStates([tap.float() for tap in states.taps], states.hidden_ND.float())
        batch = self.objective.plan(packed).to(self.device)
        weights = self.objective.step_weights(batch.num_valid_K)
        self.optimizer.zero_grad()
        loss, _ = self.objective(batch, weights, states=states)
        loss.backward()
        norm = clip_gradients(self.parameters, self.config.max_grad_norm)
        if not bool(torch.isfinite(loss.detach() + norm)):
            self.optimizer.zero_grad()
            self.counts.non_finite += 1
            return False
        warm_up = min(1.0, (self.steps_since_start + 1) / WARM_UP_STEPS)
        self.optimizer.set_factor(warm_up * self.learning_rate / self.config.learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_since_start += 1
        with torch.no_grad():
            newest = [parameter.detach() for parameter in self.parameters]
            torch._foreach_lerp_(self.average, newest, 1 / min(self.steps_since_start + 1, AVERAGED_STEPS))
        self.counts.steps += 1
        self.counts.tokens += sum(len(one.tokens) for one in samples)
        self.counts.loss = float(loss.detach())
        return True

    def _length(self, samples: Sequence[Sample]) -> int:
        """On a GPU always the same: a step is compiled for it."""
        if not self.is_cpu:
            return self.config.batch_tokens
        return -(-sum(len(one.tokens) for one in samples) // 16) * 16

    def _reset(self) -> None:
        self.counts.resets += 1
        self.refused_in_a_row = 0
        self._start_over(max(self.learning_rate / 2, self.config.learning_rate / MOST_SLOWDOWN))

    # The gate

    def _gate(self) -> Iterator[bool]:
        names = [name for name, _ in self.master.named_parameters()]
        candidate = {name: value.clone() for name, value in zip(names, self.average, strict=True)}
        self.counts.candidates += 1
        texts = self.at_work = list(self.ring.held_out)
        yield from self._read_missing(texts)
        if not are_finite(candidate):
            self.counts.non_finite += 1
            decision = Decision(False, "not finite", is_worse=True)
        else:
            for counts in self._counted([one for one in texts if self.generation not in one.counts], self.serving):
                for sample, count in counts.items():
                    sample.counts = {self.generation: count}
                yield True
            after: dict[Sample, Count] = {}
            for counts in self._counted([*texts, *self.fixed.judged], candidate):
                after |= counts
                yield True
            decision = judge(
                self.config,
                [one.counts[self.generation] for one in texts],
                [after[one] for one in texts],
                [one.domain for one in texts],
                [self.fixed.first_counts[one] for one in self.fixed.judged],
                [after[one] for one in self.fixed.judged],
                [one.client for one in texts],
            )
        if decision.accepted:
            yield from self._accept(candidate, decision)
        else:
            self._refuse(decision)
            yield True

    def _accept(self, candidate: dict[str, Tensor], decision: Decision) -> Iterator[bool]:
        for _ in self.swap(candidate, decision):
            yield True
        self.counts.accepted += 1
        self.refused_in_a_row = 0
        self.learning_rate = min(SPEED_UP * self.learning_rate, MOST_SPEEDUP * self.config.learning_rate)
        yield True

    def _refuse(self, decision: Decision) -> None:
        self.counts.refused += 1
        self.refused_in_a_row += 1
        self.refused(decision)
        if decision.is_worse or self.refused_in_a_row >= PATIENCE:
            self._reset()

    def _counted(self, samples: Sequence[Sample], weights: dict[str, Tensor]) -> Iterator[dict[Sample, Count]]:
        """What a drafter with these weights accepts over samples, a few at a time."""
        if not samples:
            return
        drafter = served_copy(self.master, self.target, torch.float32)
        drafter.load_state_dict({**weights, "d2t": self.master.d2t}, assign=True)
        for group in in_groups([one.num_states for one in samples], GATE_TOKENS[self.device.type]):
            some = [samples[index] for index in group]
            texts = [_for_rollout(one.text) for one in some if one.text is not None]
            yield dict(zip(some, accepted_counts(drafter, texts, self.depth), strict=True))


def _for_rollout(text: TargetText) -> TargetText:
    tokens_T = text.tokens_T.to(text.taps[0].device)
    return replace(text, tokens_T=tokens_T, taps=[tap.float() for tap in text.taps], hidden_TD=None)
