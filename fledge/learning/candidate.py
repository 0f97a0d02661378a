"""The weights in training: fp32 masters, their optimizer state, and the mean over the last steps, which the gate judges.

On a CPU a training step takes seconds, so it is split into micro-steps; on a GPU it is one compiled micro-step.

for each micro-batch: unrolled drafter ─▶ loss and its gradients, in chunks of positions ─▶ backward        then: update
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn

from fledge.learning.config import LearnConfig
from fledge.learning.memory import loss_rows
from fledge.learning.micro_steps import Kind
from fledge.learning.samples import Sample
from fledge.learning.target import ServedTarget, training_dtype
from fledge.models.drafter import EagleDrafter
from fledge.training.arm import build_optimizers
from fledge.training.data.packing import PackedBatch
from fledge.training.objective import Objective
from fledge.training.recipe import ObjectiveRecipe, OptimizerRecipe
from fledge.training.targets.target import TargetStates
from fledge.training.ttt import TrainBatch, step_masks

WARM_UP_STEPS = 8
# A candidate's weights are a moving mean over about this many steps. Small batches leave noise in the weights: after 64 steps
# on translations the mean gained 10.4 % and lost 2.0 % on the fixed set, the weights of the last step 9.4 % and 3.3 %.
AVERAGED_STEPS = 24
MOST_SLOWDOWN = 32  # the learning rate is halved at most down to the configured one / 32
SPEED_UP, MOST_SPEEDUP = 1.25, 2  # factor on the learning rate per accepted candidate, and the most over all of them


class Candidate:
    def __init__(
        self, master: EagleDrafter, target: ServedTarget, config: LearnConfig, weights: dict[str, Tensor], num_positions: int
    ) -> None:
        """`master`: the drafter that is trained; it starts from `weights`. `num_positions`: of the longest text."""
        self.target, self.config, self.device, self.num_positions = target, config, target.device, num_positions
        self.master = master.to(self.device).train().requires_grad_(True)
        self.is_cpu = self.device.type == "cpu"
        self.parameters = list(self.master.parameters())
        self.objective = self.build_objective(compiled=not self.is_cpu)
        self.loss = 0.0  # of the last step
        self.start_over(weights, config.learning_rate)

    def build_objective(self, *, compiled: bool) -> Objective:
        """Builds the training objective, compiled on a GPU: on an H200, uncompiled operations took 65 ms for 4,096 tokens; a
        compiled training run takes 38 ms for 32,768."""
        config, dtype = self.config, training_dtype(self.device)
        chunk_rows = loss_rows(self.master.config, config, is_cpu=self.is_cpu)
        return Objective(
            self.master,
            self.target,
            ObjectiveRecipe(ttt_steps=config.ttt_steps, chunk_rows=chunk_rows),
            self.num_positions,
            config.batch_tokens,
            compute_dtype=None if dtype == torch.float32 else dtype,
            compile=compiled,
        )

    def start_over(self, weights: dict[str, Tensor], learning_rate: float) -> None:
        """Restarts training from these weights, with fresh optimizer moments."""
        self.load(weights)
        self.learning_rate = learning_rate
        self.optimizer = build_optimizers(self.master, OptimizerRecipe(learning_rate=self.config.learning_rate))
        self.optimizer.zero_grad()  # gradients of an interrupted step
        self.steps_since_start = 0
        self.average = [parameter.detach().clone() for parameter in self.parameters]

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self.master.named_parameters():
            parameter.copy_(weights[name])

    def weights(self) -> dict[str, Tensor]:
        """Returns a copy of the averaged weights, which the gate judges."""
        names = [name for name, _ in self.master.named_parameters()]
        return {name: value.clone() for name, value in zip(names, self.average, strict=True)}

    @property
    def slower_rate(self) -> float:
        return max(self.learning_rate / 2, self.config.learning_rate / MOST_SLOWDOWN)

    def was_accepted(self) -> None:
        self.learning_rate = min(SPEED_UP * self.learning_rate, MOST_SPEEDUP * self.config.learning_rate)

    @torch.enable_grad()
    def train(self, samples: Sequence[Sample]) -> Generator[Kind, None, bool]:
        """Runs one step. If its loss or gradient is not finite, returns False and leaves the weights unchanged."""
        groups = [samples] if not self.is_cpu else micro_batches(samples, self.config.micro_batch_tokens)
        rows = [pack(group, self._length(group)) for group in groups]
        batches = [self.objective.plan(row).to(self.device) for row, _ in rows]
        weights = self.objective.step_weights(torch.stack([batch.num_valid_K for batch in batches]).sum(0))
        self.optimizer.zero_grad()
        loss = torch.zeros((), device=self.device)
        for batch, (_, states) in zip(batches, rows, strict=True):
            yield Kind.FORWARD
            loss = loss + (yield from self._accumulate(batch, weights, states))
        if self.is_cpu:
            yield Kind.UPDATE
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        if not bool(torch.isfinite(loss + norm)):
            self.optimizer.zero_grad()
            return False
        warm_up = min(1.0, (self.steps_since_start + 1) / WARM_UP_STEPS)
        self.optimizer.set_factor(warm_up * self.learning_rate / self.config.learning_rate)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_since_start += 1
        with torch.no_grad():
            newest = [parameter.detach() for parameter in self.parameters]
            torch._foreach_lerp_(self.average, newest, 1 / min(self.steps_since_start + 1, AVERAGED_STEPS))
        self.loss = float(loss)
        return True

    @torch.enable_grad()
    def _accumulate(self, batch: TrainBatch, weights_K: Tensor, states: TargetStates) -> Generator[Kind, None, Tensor]:
        """Accumulates the gradients of a micro-batch and returns its loss."""
        objective = self.objective
        if objective.compute_dtype is None:
            states = TargetStates([tap.float() for tap in states.taps], states.hidden_ND.float())
        masks = step_masks(batch.start_BT, self.config.ttt_steps, self.master.config.window, flex=self.device.type == "cuda")
        hidden = objective.unroll(states.taps, batch.tokens_BT, batch.positions_BT, masks)
        # The loss reads detached copies: its gradients are computed in chunks, and one backward goes through the drafter.
        ends = [one.detach().requires_grad_() for one in hidden]
        head = self.master.head.weight
        assert isinstance(head, Tensor)
        total = torch.zeros((), device=self.device)
        step = objective.chunk_rows if self.is_cpu else len(batch.scored_R)
        for at in range(0, len(batch.scored_R), max(step, 1)):
            if self.is_cpu:
                yield Kind.LOSS
            scored, valid = batch.scored_R[at : at + step], batch.valid_KR[:, at : at + step]
            loss, _ = objective.loss(ends, head, states.hidden_ND, scored, valid, weights_K)
            loss.backward()
            total += loss.detach()
        if self.is_cpu:
            yield Kind.BACKWARD
        reached = [(one, end.grad) for one, end in zip(hidden, ends, strict=True) if end.grad is not None]
        if reached:
            torch.autograd.backward([one for one, _ in reached], [gradient for _, gradient in reached])
        return total

    def _length(self, samples: Sequence[Sample]) -> int:
        """Returns the row length: on a GPU always `batch_tokens`, for which the step is compiled."""
        if not self.is_cpu:
            return self.config.batch_tokens
        return -(-sum(one.num_states for one in samples) // 16) * 16


def micro_batches(samples: Sequence[Sample], room: int) -> list[list[Sample]]:
    """Splits samples into groups of at most `room` tokens; a longer sample is a group of its own."""
    groups: list[list[Sample]] = []
    left = 0
    for sample in samples:
        if sample.num_states > left or not groups:
            groups.append([])
            left = room
        groups[-1].append(sample)
        left -= sample.num_states
    return groups


def pack(samples: Sequence[Sample], length: int) -> tuple[PackedBatch, TargetStates]:
    """Concatenates the texts into one row of `length` tokens, and their hidden states likewise; padding is zero."""
    texts = [one.text for one in samples if one.text is not None]
    assert len(texts) == len(samples), "a text without hidden states"
    lengths = [len(text.tokens_T) for text in texts]
    total = sum(lengths)
    assert total <= length, "more tokens than a batch holds"
    tokens = torch.zeros(1, length, dtype=torch.long)
    positions, document = torch.zeros_like(tokens), torch.zeros(1, length, dtype=torch.int32)
    loss = torch.zeros(1, length, dtype=torch.bool)
    tokens[0, :total] = torch.cat([text.tokens_T for text in texts])
    at = 0
    for number, (sample, text, size) in enumerate(zip(samples, texts, lengths, strict=True), 1):
        # `num_skipped` tokens after the first one of a long text are left out.
        positions[0, at + 1 : at + size] = torch.arange(1, size) + sample.num_skipped
        document[0, at : at + size] = number
        loss[0, at + max(text.answer_start, 1) : at + size] = True
        at += size

    def row(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        return torch.cat([joined, joined.new_zeros(length - total, joined.shape[1])])

    taps = [row(layer) for layer in zip(*(text.taps for text in texts), strict=True)]
    hidden = row([text.hidden_TD for text in texts if text.hidden_TD is not None])
    return PackedBatch(tokens, positions, document, loss), TargetStates(taps, hidden)
