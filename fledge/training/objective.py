"""The forward pass of a training step: target states, unrolled drafter, loss.

The loss compares the drafter's distributions with the target's, over the draft vocabulary, in chunks of target positions.

Shapes: K draft steps, C scored target positions of one chunk, D hidden size, V draft vocabulary.

The target's distribution at position s is computed once, and compared with step j of row s−1−j for every j. Gradients are
computed in the same pass (three matrix products instead of four with recomputation), so that at most one chunk's [K·C, V]
logits are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fledge.errors import UserError, first_line
from fledge.models.drafter import EagleDrafter
from fledge.training.data.packing import PackedBatch
from fledge.training.recipe import ObjectiveRecipe
from fledge.training.targets.target import Head, Target, TargetStates
from fledge.training.ttt import TrainBatch, Unroll, step_masks


def chunk_loss(
    hidden_KCD: Tensor,
    weight_VD: Tensor,
    target_logits_CV: Tensor,
    coverage_C: Tensor,
    row_weight_KC: Tensor,
    kind: str,
    lk_weight: float,
    with_gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Computes one chunk's (loss_K, acceptance_K, predicted_KC, d_hidden_KCD, d_weight_VD).

    `kind`: kl: cross-entropy; lk: −log of the acceptance probability Σ min(p, q); mix: both, lk with a share of `lk_weight`.
    The loss and its gradients are weighted by row; the acceptance is the plain sum over rows that have a weight.
    `coverage_C`: the target's probability of the draft vocabulary (ones where unknown: acceptance is then too high).
    """
    logits = torch.nn.functional.linear(hidden_KCD, weight_VD).float()  # [K, C, V]
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    q = log_q.exp()
    p = target_logits_CV.float().softmax(-1)  # renormalised within the draft vocabulary

    acceptance = torch.minimum(q, p * coverage_C[:, None]).sum(-1)
    loss = torch.zeros_like(acceptance)
    d_logits = torch.zeros_like(q) if with_gradients else None
    if kind != "lk":
        share = 1.0 if kind == "kl" else 1.0 - lk_weight
        loss = loss - share * (p * log_q).sum(-1)
        if d_logits is not None:
            d_logits = d_logits + share * (q - p)
    if kind != "kl":
        share = 1.0 if kind == "lk" else lk_weight
        alpha = torch.minimum(q, p).sum(-1).clamp_min(1e-8)
        loss = loss - share * alpha.log()
        if d_logits is not None:
            # dα/dz = q·(m − Σ m·q) with m = 1 where q < p: elsewhere α does not depend on q.
            below = torch.where(q < p, q, 0.0)
            d_logits = d_logits - share * (below - q * below.sum(-1, keepdim=True)) / alpha[..., None]

    counted = (row_weight_KC > 0).float()
    d_hidden = d_weight = None
    if d_logits is not None:
        d_logits = (d_logits * row_weight_KC[..., None]).to(hidden_KCD.dtype)
        d_hidden = d_logits @ weight_VD
        d_weight = d_logits.flatten(0, 1).T @ hidden_KCD.flatten(0, 1)
    return (loss * row_weight_KC).sum(-1), (acceptance * counted).sum(-1), logits.argmax(-1), d_hidden, d_weight


def target_over_all(hidden_CD: Tensor, head: Head, inside_logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the target's greedy token over its whole vocabulary, and the probability of the draft vocabulary."""
    logits = head(hidden_CD).float()
    coverage = (inside_logits_CV.float().logsumexp(-1) - logits.logsumexp(-1)).exp().clamp_max(1.0)
    return logits.argmax(-1), coverage


@dataclass(frozen=True)
class StepMetrics:
    """Sums over the scored positions, per draft step; on the device."""

    loss_K: Tensor  # weighted as in the objective
    acceptance_K: Tensor  # Σ_v min(p, q), the probability that sampling accepts
    hits_K: Tensor  # the drafter's greedy token is the target's, over the target's whole vocabulary


class DraftLoss:
    """The loss Σ_j weight_j · mean over the positions valid at step j, a differentiable scalar of the unrolled states."""

    def __init__(
        self,
        target_head: Head,
        draft_to_target: Tensor | None,
        kind: str = "kl",
        lk_weight: float = 0.5,
        *,
        chunk_rows: int,
        compile: bool = False,
    ) -> None:
        """`draft_to_target`: the target id of every draft id; None if the vocabularies are the same.

        `kind` and `lk_weight`: see `chunk_loss`.
        """
        self.full_head, self.kind, self.lk_weight, self.chunk_rows = target_head, kind, lk_weight, chunk_rows
        self.inside_head = target_head if draft_to_target is None else target_head.rows(draft_to_target)
        self.draft_to_target = draft_to_target
        self.chunk_loss, self.target_over_all = chunk_loss, target_over_all
        if compile:
            self.compile()

    def compile(self) -> None:
        self.chunk_loss = torch.compile(chunk_loss, dynamic=False)
        self.target_over_all = torch.compile(target_over_all, dynamic=False)

    def __call__(
        self,
        hidden: Sequence[Tensor],
        draft_weight: Tensor,
        target_hidden_ND: Tensor,
        scored_R: Tensor,
        valid_KR: Tensor,
        step_weight_K: Tensor,
        measure: bool = False,
    ) -> tuple[Tensor, StepMetrics]:
        """`step_weight_K`: weight_j divided by the number of positions valid at step j (over all processes).

        `measure`: also compute accuracy and acceptance, which need the target's whole head.
        """
        sums = [torch.zeros(len(hidden), device=scored_R.device) for _ in range(3)]
        run = partial(self._run, sums, target_hidden_ND, scored_R, valid_KR, step_weight_K, measure)
        loss = _ChunkedLoss.apply(run, draft_weight, *hidden)
        return loss, StepMetrics(*sums)

    def _run(
        self,
        sums: list[Tensor],
        target_hidden_ND: Tensor,
        scored_R: Tensor,
        valid_KR: Tensor,
        step_weight_K: Tensor,
        measure: bool,
        hidden: Sequence[Tensor],
        draft_weight: Tensor,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> tuple[Tensor, list[Tensor] | None, Tensor | None]:
        """Loops over chunks and adds to `sums`: loss_K, acceptance_K, hits_K. Returns (loss, d_hidden per step, d_weight)."""
        num_rows, size = hidden[0].shape
        weight = draft_weight.to(hidden[0].dtype)
        # One extra row, to which rows without a loss write.
        d_hidden = [x.new_zeros(num_rows + 1, size) for x in hidden] if needs_hidden else None
        d_weight = torch.zeros_like(draft_weight, dtype=torch.float32) if needs_weight else None
        before = 1 + torch.arange(len(hidden), device=scored_R.device)[:, None]
        ones = torch.ones(self.chunk_rows, device=scored_R.device)
        for start in range(0, len(scored_R), self.chunk_rows):
            scored = scored_R[start : start + self.chunk_rows]
            valid = valid_KR[:, start : start + self.chunk_rows]
            rows = torch.where(valid, scored[None, :] - before, num_rows)
            states = torch.stack([x[r.clamp_max(num_rows - 1)] for x, r in zip(hidden, rows, strict=True)])
            target_states = target_hidden_ND[scored]
            inside = self.inside_head(target_states)
            coverage, greedy = ones[: len(scored)], None
            if measure:
                greedy, coverage = self.target_over_all(target_states, self.full_head, inside)
            loss, acceptance, predicted, d_states, d_chunk_weight = self.chunk_loss(
                states, weight, inside, coverage, valid * step_weight_K[:, None], self.kind, self.lk_weight, needs_hidden
            )
            sums[0] += loss
            if measure:
                if self.draft_to_target is not None:
                    predicted = self.draft_to_target[predicted]
                sums[1] += acceptance
                sums[2] += ((predicted == greedy) & valid).sum(-1)
            if d_hidden is not None:
                assert d_states is not None
                for buffer, r, gradient in zip(d_hidden, rows, d_states, strict=True):
                    buffer[r] = gradient
            if d_weight is not None:
                assert d_chunk_weight is not None
                d_weight += d_chunk_weight
        return sums[0].sum(), [x[:-1] for x in d_hidden] if d_hidden is not None else None, d_weight


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[..., Any], draft_weight: Tensor, *hidden: Tensor) -> Tensor:
        """`run`: `DraftLoss._run` with its first arguments bound."""
        _, ctx.needs_weight, *needs_hidden = ctx.needs_input_grad
        ctx.weight_dtype = draft_weight.dtype
        loss, d_hidden, d_weight = run(hidden, draft_weight, any(needs_hidden) or ctx.needs_weight, ctx.needs_weight)
        if d_hidden is not None:
            ctx.save_for_backward(*([d_weight] if ctx.needs_weight else []), *d_hidden)
        return loss

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        d_weight = (saved.pop(0) * d_loss).to(ctx.weight_dtype) if ctx.needs_weight else None
        return (None, d_weight, *(x * d_loss.to(x.dtype) for x in saved))


def auto_chunk_rows(steps: int, draft_vocab_size: int) -> int:
    """Returns the positions per chunk for which a chunk has about 170 M logits: large products, little memory."""
    rows = 170_000_000 // (steps * draft_vocab_size)
    return max(128, min(8192, 1 << max(rows, 1).bit_length() - 1))


# --- the whole step -------------------------------------------------------------------------------------------------


class Objective:
    def __init__(
        self,
        drafter: EagleDrafter,
        target: Target,
        settings: ObjectiveRecipe,
        num_positions: int,
        batch_tokens: int,
        *,
        compute_dtype: torch.dtype | None = None,
        compile: bool = False,
    ) -> None:
        """`num_positions`: the highest position of any batch + 1. `batch_tokens`: tokens of a batch, including padding.
        `compute_dtype`: None: the type of the weights."""
        config, steps = drafter.config, settings.ttt_steps
        if config.window is not None and config.window <= steps:
            raise UserError(f"a drafter window of {config.window} is too small for {steps} draft steps")
        if config.vocab_size != target.vocab_size or config.target_hidden_size != target.hidden_size:
            raise UserError(
                f"the drafter is made for a target with {config.vocab_size} tokens and states of "
                f"{config.target_hidden_size}; this one has {target.vocab_size} and {target.hidden_size}"
            )
        drafter.share(target.embedding, target.lm_head)
        self.drafter, self.target, self.steps = drafter, target, steps
        self.compute_dtype, self.is_compiled = compute_dtype, compile
        auto = min(auto_chunk_rows(steps, config.draft_vocab_size), batch_tokens)
        self.chunk_rows = settings.chunk_rows or auto
        device = drafter.fc.weight.device
        same = config.draft_vocab_size == config.vocab_size
        ids = None if same else drafter.target_ids(torch.arange(config.draft_vocab_size, device=device))
        self.vocabulary_V = None  # on the host, because batches are planned there
        if settings.outside_vocabulary == "mask" and ids is not None:
            self.vocabulary_V = torch.zeros(config.vocab_size, dtype=torch.bool)
            self.vocabulary_V[ids.cpu()] = True
        self.loss = DraftLoss(target.head, ids, settings.loss, settings.lk_weight, chunk_rows=self.chunk_rows, compile=compile)
        self.unroll: Callable[..., list[Tensor]] = Unroll(drafter, compute_dtype, recompute=settings.recompute)
        if compile:
            self.unroll = torch.compile(self.unroll, dynamic=False)
        drafter.rotary.reserve(num_positions + steps)
        target.reserve(num_positions)
        self.decay_K = settings.decay ** torch.arange(steps, device=device)

    def plan(self, batch: PackedBatch) -> TrainBatch:
        return TrainBatch.plan(
            batch.tokens,
            batch.positions,
            batch.document,
            batch.loss_mask,
            self.steps,
            self.chunk_rows,
            self.vocabulary_V,
        )

    def step_weights(self, num_valid_K: Tensor) -> Tensor:
        """Returns the weights that turn the sum over positions into the mean over those valid at each step (all processes)."""
        return self.decay_K / num_valid_K.clamp_min(1.0)

    def __call__(
        self, batch: TrainBatch, step_weight_K: Tensor, *, measure: bool = False, states: TargetStates | None = None
    ) -> tuple[Tensor, StepMetrics]:
        states = states or self.target.states(batch)
        flex = batch.start_BT.device.type == "cuda"
        masks = step_masks(batch.start_BT, self.steps, self.drafter.config.window, flex=flex)
        hidden = self.unroll(states.taps, batch.tokens_BT, batch.positions_BT, masks)
        head_weight = self.drafter.head.weight
        assert isinstance(head_weight, Tensor)
        return self.loss(hidden, head_weight, states.hidden_ND, batch.scored_R, batch.valid_KR, step_weight_K, measure)


def compiler_error(error: Exception) -> str | None:
    """Returns why torch.compile failed, in one line; None if the error has another cause."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return None
    return first_line(getattr(error, "inner_exception", error))
