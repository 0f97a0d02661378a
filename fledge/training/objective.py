"""One training step's forward pass: target states, unrolled drafter, loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fledge.errors import UserError, first_line
from fledge.models.drafter import EagleDrafter
from fledge.training.data.packing import PackedBatch
from fledge.training.losses import DraftLoss, LossSettings, StepMetrics, auto_chunk_rows
from fledge.training.targets.target import Target, TargetStates
from fledge.training.ttt import TrainBatch, Unroll, step_masks


@dataclass(frozen=True)
class ObjectiveSettings:
    steps: int = 5  # draft steps unrolled
    decay: float = 0.8  # step j counts decay^j
    loss: LossSettings = field(default_factory=LossSettings)
    compute_dtype: torch.dtype | None = None  # None: the weights' own
    chunk_rows: int | None = None  # scored positions at once; None: by the size of the draft vocabulary
    mask_outside: bool = True  # no loss where a token outside the draft vocabulary comes; False: on what is left of p
    recompute: bool = False
    compile: bool = False


class Objective:
    def __init__(
        self, drafter: EagleDrafter, target: Target, settings: ObjectiveSettings, num_positions: int, batch_tokens: int
    ) -> None:
        """`num_positions`: the highest position of any batch + 1; `batch_tokens`: tokens of a batch, padding included."""
        config = drafter.config
        if config.window is not None and config.window <= settings.steps:
            raise UserError(f"a drafter window of {config.window} is too small for {settings.steps} draft steps")
        if config.vocab_size != target.vocab_size or config.target_hidden_size != target.hidden_size:
            raise UserError(
                f"the drafter is made for a target with {config.vocab_size} tokens and states of "
                f"{config.target_hidden_size}; this one has {target.vocab_size} and {target.hidden_size}"
            )
        drafter.share(target.embedding, target.lm_head)
        self.drafter, self.target, self.settings = drafter, target, settings
        auto = min(auto_chunk_rows(settings.steps, config.draft_vocab_size), batch_tokens)
        self.chunk_rows = settings.chunk_rows or auto
        device = drafter.fc.weight.device
        same = config.draft_vocab_size == config.vocab_size
        ids = None if same else drafter.target_ids(torch.arange(config.draft_vocab_size, device=device))
        self.vocabulary_V = None  # on the host, where batches are planned
        if settings.mask_outside and ids is not None:
            self.vocabulary_V = torch.zeros(config.vocab_size, dtype=torch.bool)
            self.vocabulary_V[ids.cpu()] = True
        self.loss = DraftLoss(target.head, ids, settings.loss, chunk_rows=self.chunk_rows, compile=settings.compile)
        self.unroll: Callable[..., list[Tensor]] = Unroll(drafter, settings.compute_dtype, recompute=settings.recompute)
        if settings.compile:
            self.unroll = torch.compile(self.unroll, dynamic=False)
        drafter.rotary.reserve(num_positions + settings.steps)
        target.reserve(num_positions)
        self.decay_K = settings.decay ** torch.arange(settings.steps, device=device)

    def plan(self, batch: PackedBatch) -> TrainBatch:
        return TrainBatch.plan(
            batch.tokens,
            batch.positions,
            batch.document,
            batch.loss_mask,
            self.settings.steps,
            self.chunk_rows,
            self.vocabulary_V,
        )

    def step_weights(self, num_valid_K: Tensor) -> Tensor:
        """Weights that make the sum over positions the average over those valid at each step (of all processes)."""
        return self.decay_K / num_valid_K.clamp_min(1.0)

    def __call__(
        self, batch: TrainBatch, step_weight_K: Tensor, *, measure: bool = False, states: TargetStates | None = None
    ) -> tuple[Tensor, StepMetrics]:
        states = states or self.target.states(batch)
        flex = batch.start_BT.device.type == "cuda"
        masks = step_masks(batch.start_BT, self.settings.steps, self.drafter.config.window, flex=flex)
        hidden = self.unroll(states.taps, batch.tokens_BT, batch.positions_BT, masks)
        head_weight = self.drafter.head.weight
        assert isinstance(head_weight, Tensor)
        return self.loss(hidden, head_weight, states.hidden_ND, batch.scored_R, batch.valid_KR, step_weight_K, measure)


def compiler_error(error: Exception) -> str | None:
    """Why torch.compile failed, in a line; None: it was something else."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    return first_line(getattr(error, "inner_exception", error))
