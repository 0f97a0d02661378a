"""Trains a candidate and lets the gate judge it, in micro-steps, so that engine steps can run between them.

draw samples ─▶ hidden states, if they were not collected ─▶ training step (`Candidate`)
      … `steps_per_candidate` times ─▶ roll out candidate and serving drafter on held-out texts ─▶ gate ─▶ swap
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fledge.drift.metrics import Count
from fledge.drift.texts import TargetText, in_groups
from fledge.errors import printable
from fledge.learning.candidate import Candidate
from fledge.learning.config import LearnConfig
from fledge.learning.fixed_set import FixedSet
from fledge.learning.gate import Decision, accepted_counts, judge
from fledge.learning.micro_steps import Kind, Work
from fledge.learning.samples import Sample, SampleRing
from fledge.learning.served import ServedDrafter, are_finite
from fledge.learning.target import MOST_READ_TOKENS, ServedTarget
from fledge.training.checkpoint import served_copy
from fledge.training.objective import compiler_error

log = logging.getLogger("fledge.learning")

MAX_BAD_STEPS = 3  # after this many non-finite losses in a row, training starts again from the serving weights
# After a candidate that is worse, or this many refused in a row, training starts again from the serving weights at half the
# learning rate. The best rate depends on the drafter: one that was trained for long gets worse at a rate that a new one needs.
PATIENCE = 6
# Tokens per micro-step. On one CPU core, for 256 tokens, the target pass of SmolLM2-135M takes 0.14 s and drafting 0.38 s.
READ_TOKENS = {"cpu": 256, "cuda": 2048}
GATE_TOKENS = {"cpu": 128, "cuda": 4096}


@dataclass
class LearnerCounts:
    """Counts since the start. Plain numbers, so that other threads may read them."""

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
        candidate: Candidate,
        target: ServedTarget,
        ring: SampleRing,
        served: ServedDrafter,
        config: LearnConfig,
        depth: int,
    ) -> None:
        """`depth`: draft depth in the gate."""
        self.candidate, self.target, self.ring, self.served, self.config = candidate, target, ring, served, config
        self.depth = depth
        self.fixed = FixedSet()
        self.counts = LearnerCounts()
        self.refused_in_a_row = 0
        self.at_work: list[Sample] = []  # all samples that `micro_steps` holds; they may have left the ring
        self._uses: WeakKeyDictionary[Sample, int] = WeakKeyDictionary()  # since training last (re)started from served weights

    @property
    def device_type(self) -> str:
        return self.target.device.type

    def warm_up(self) -> Iterator[Kind]:
        """Runs one micro-step of each kind on a made-up text, to measure their times and, on a GPU, to compile the step."""
        length = self.config.sample_tokens if self.candidate.is_cpu else 32
        tokens = [(7 * one + 3) % self.target.vocab_size for one in range(min(length, self.candidate.num_positions))]
        short = tokens[: GATE_TOKENS[self.device_type]]
        sample, judged = Sample(tokens, len(tokens) // 2), Sample(short, len(short) // 2)
        yield from self._read_missing([sample, judged])
        began = time.perf_counter()
        try:
            yield from self.candidate.train([sample])
            if not self.candidate.is_cpu:
                log.info("learning: a training step was compiled in %.0f s", time.perf_counter() - began)
        except Exception as error:
            if (reason := compiler_error(error)) is None:
                raise
            log.warning("learning: torch.compile failed (%s); training steps are slower without it", printable(reason))
            self.candidate.objective = self.candidate.build_objective(compiled=False)
            yield from self.candidate.train([sample])
        yield from self._counted([judged], self.served.weights)
        self.candidate.start_over(self.served.weights, self.candidate.learning_rate)
        yield from self.served.stage(self.served.weights)[1]

    def release(self) -> None:
        """Frees all memory after learning has stopped."""
        del self.candidate
        self.fixed, self.at_work = FixedSet(), []

    def start_over(self) -> None:
        """Restarts training from the serving weights at half the learning rate. Uses of samples since then no longer count."""
        for sample, uses in self._uses.items():
            sample.uses = max(0, sample.uses - uses)
        self._uses.clear()
        self.refused_in_a_row = 0
        self.candidate.start_over(self.served.weights, self.candidate.slower_rate)

    # The work

    def micro_steps(self) -> Work:
        """Yields the kinds of all micro-steps, without end: train, gate, train, …"""
        yield from self._measure_fixed()
        while True:
            bad_steps = 0
            for _ in range(self.config.steps_per_candidate):
                if self.target.unknown_first_tokens:
                    yield Kind.READ
                    self.target.read([([token], 1) for token in self.target.unknown_first_tokens])
                while not (batch := self._draw()):
                    yield None
                yield from self._read_missing(batch)
                batch = [one for one in batch if one.text is not None]
                if batch and (yield from self._train(batch)):
                    bad_steps = 0
                elif batch and (bad_steps := bad_steps + 1) >= MAX_BAD_STEPS:
                    log.warning(
                        "learning: %d losses in a row were not finite; starting again from the serving weights", bad_steps
                    )
                    self._reset()
            self.at_work = batch = []  # no longer needed: the gate may wait for hours
            while len(self.ring.held_out) < self.config.min_held_out:
                yield None
            yield from self._gate()

    def _train(self, batch: Sequence[Sample]) -> Generator[Kind, None, bool]:
        is_finite = yield from self.candidate.train(batch)
        if is_finite:
            self.counts.steps += 1
            self.counts.tokens += sum(one.num_states for one in batch)
            self.counts.loss = self.candidate.loss
        else:
            self.counts.non_finite += 1
        return is_finite

    def _measure_fixed(self) -> Iterator[Kind]:
        """Measures the first and the serving weights on the fixed set: the baseline of candidates."""
        yield from self._read_missing([*self.fixed.replay, *self.fixed.judged])
        weights = {self.served.generation: self.served.weights}
        if self.served.first_weights is not None:
            weights[0] = self.served.first_weights
        for generation, one in weights.items():
            if self.fixed.judged and generation not in self.fixed.counts:
                self.fixed.counts[generation] = yield from self._counted(self.fixed.judged, one)
        self.served.first_weights = None

    def _draw(self) -> list[Sample]:
        """Draws a batch of traffic samples and some of the fixed set; empty if there is no traffic to draw from."""
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
        for one in self.at_work:
            self._uses[one] = self._uses.get(one, 0) + 1
        return self.at_work + fixed if self.at_work else []

    def _read_missing(self, samples: Sequence[Sample]) -> Iterator[Kind]:
        """Computes missing hidden states, a few samples at a time; drops samples that are too long for that.

        A separate generator, because a loop variable in `micro_steps` would keep the last samples alive past their age.
        """
        most = max(MOST_READ_TOKENS[self.device_type], self.config.sample_tokens)
        missing = [one for one in samples if one.text is None and len(one.tokens) <= most]
        for one in samples:
            if one.text is None and len(one.tokens) > most:
                self.ring.drop_long(one)
        for group in in_groups([len(one.tokens) for one in missing], READ_TOKENS[self.device_type]):
            yield Kind.READ
            some = [missing[index] for index in group]
            for sample, text in zip(some, self.target.read([(one.tokens, one.answer_start) for one in some]), strict=True):
                sample.keep(text)

    def _reset(self) -> None:
        self.counts.resets += 1
        self.start_over()

    # The gate

    def _gate(self) -> Iterator[Kind]:
        candidate = self.candidate.weights()
        self.counts.candidates += 1
        yield from self._measure_fixed()
        self.at_work = list(self.ring.held_out)
        yield from self._read_missing(self.at_work)
        texts = self.at_work = [one for one in self.at_work if one.text is not None]
        serving = self.served.generation
        if not are_finite(candidate):
            self.counts.non_finite += 1
            decision = Decision(False, "not finite", is_worse=True)
        else:
            before = yield from self._counted([one for one in texts if serving not in one.counts], self.served.weights)
            for sample, count in before.items():
                sample.counts = {serving: count}
            after = yield from self._counted([*texts, *self.fixed.judged], candidate)
            decision = judge(
                self.config,
                [one.counts[serving] for one in texts],
                [after[one] for one in texts],
                [one.domain for one in texts],
                self.fixed.baseline(serving),
                [after[one] for one in self.fixed.judged],
                [one.client for one in texts],
            )
        self.served.choose_drafts(decision)
        if decision.accepted:
            yield from self.accept(candidate, decision)
            if self.fixed.judged:
                self.fixed.keep({one: after[one] for one in self.fixed.judged}, self.served.generation)
        else:
            self.refuse(decision)

    def accept(self, candidate: dict[str, Tensor], decision: Decision) -> Iterator[Kind]:
        yield from self.served.swap(candidate, decision)
        self.counts.accepted += 1
        self.refused_in_a_row = 0
        self._uses.clear()
        self.candidate.was_accepted()

    def refuse(self, decision: Decision) -> None:
        self.counts.refused += 1
        self.refused_in_a_row += 1
        self.served.refused(decision)
        if decision.is_worse or self.refused_in_a_row >= PATIENCE:
            self._reset()

    def _counted(self, samples: Sequence[Sample], weights: dict[str, Tensor]) -> Generator[Kind, None, dict[Sample, Count]]:
        """Returns what a drafter with these weights accepts on the samples, a few samples per micro-step."""
        found: dict[Sample, Count] = {}
        if not samples:
            return found
        master = self.candidate.master
        drafter = served_copy(master, self.target, torch.float32)
        drafter.load_state_dict({**weights, "d2t": master.d2t}, assign=True)
        for group in in_groups([one.num_states for one in samples], GATE_TOKENS[self.device_type]):
            yield Kind.GATE
            some = [samples[index] for index in group]
            texts = [_for_rollout(one.text) for one in some if one.text is not None]
            found |= dict(zip(some, accepted_counts(drafter, texts, self.depth), strict=True))
        return found


def _for_rollout(text: TargetText) -> TargetText:
    tokens_T = text.tokens_T.to(text.taps[0].device)
    return replace(text, tokens_T=tokens_T, taps=[tap.float() for tap in text.taps], hidden_TD=None)
