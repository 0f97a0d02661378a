"""Drafting for every position of known texts at once, with the drafter's own tokens, as when serving.

Greedy acceptance depends on the target's greedy text alone. So one rollout from every position of that text tells what any
speculative run over it would accept, at every depth up to the one rolled out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend
from fledge.training.attention import attention_with_lse
from fledge.training.target import use_flex
from fledge.training.ttt import UnrollAttention, merge_own, own_shares, step_masks

HEAD_ROWS = 4096  # rows that the head is applied to at once


@dataclass(frozen=True)
class Rollout:
    """M rows, J draft steps; row t drafts x_{t+2}, x_{t+3}, … from the state at t and the token x_{t+1}."""

    drafted_MJ: Tensor  # target ids
    rms_MJ: Tensor  # size of the state that each step gives to the next
    sink_MJ: Tensor  # share of attention on the document's first token, mean over heads and layers
    own_MJ: Tensor  # share on the row's own tokens: the one it drafts from and those drafted since


class ProbedAttention(UnrollAttention):
    """Also tells where the attention goes."""

    def __init__(self, masks: Sequence, length: int, start_N: Tensor) -> None:
        super().__init__(masks, length)
        self.start_N = start_N
        self.shares: dict[int, list[tuple[Tensor, Tensor]]] = {}  # step: (sink [N], own [N]) of each layer

    def at(self, step: int) -> Attend:
        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
            self.kept[layer, step] = (k_NKE, v_NKE)
            keys, values = self.kept[layer, 0]
            out, lse = attention_with_lse(q_NHE, keys, values, self.masks[step], self.length)
            own_keys = self.own(layer, step) if step else None
            shares = attention_shares(q_NHE, lse, keys, keys[self.start_N], own_keys[0] if step else None)
            self.shares.setdefault(step, []).append(shares)
            return merge_own(q_NHE, out, lse, *own_keys) if step else out

        return attend


def attention_shares(
    q_NHE: Tensor, lse_NH: Tensor, pivot_NKE: Tensor, sink_NKE: Tensor, own_NKJE: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Shares of attention on the sink token and on the row's own tokens, [N] each, mean over heads.

    `lse_NH`: of the context's scores. `pivot_NKE`: each row's own key in the context; `own_NKJE`: those drafted since.
    """
    grouped = q_NHE.unflatten(1, (pivot_NKE.shape[1], -1)).float()

    def score(key_NKE: Tensor) -> Tensor:
        return (grouped * key_NKE[:, :, None]).sum(-1).flatten(1) * q_NHE.shape[-1] ** -0.5

    context, own = torch.ones_like(lse_NH), torch.zeros_like(lse_NH)
    if own_NKJE is not None:
        context, drafted = own_shares(q_NHE, lse_NH, own_NKJE)
        own = drafted.sum(-1)
    sink = (score(sink_NKE) - lse_NH).exp() * context
    own = own + (score(pivot_NKE) - lse_NH).exp() * context
    return sink.mean(-1), own.mean(-1)


def rms(states_ND: Tensor) -> Tensor:
    return states_ND.float().square().mean(-1).sqrt()


@torch.no_grad()
def roll_out(
    drafter: EagleDrafter,
    taps: Sequence[Tensor],
    tokens_BT: Tensor,
    positions_BT: Tensor,
    start_BT: Tensor,
    rows_M: Tensor,
    depth: int,
    sink_column: int = 0,
) -> Rollout:
    """Greedy drafts of `depth` tokens from each of the flat rows `rows_M` of packed documents.

    `sink_column`: where in its document the target's sink token stands (0 for most; 1 for some).
    """
    length, device = tokens_BT.shape[1], tokens_BT.device
    masks = step_masks(start_BT, depth, drafter.config.window, flex=use_flex(device, length))
    row_start = torch.arange(len(tokens_BT), device=device)[:, None] * length
    sink_N = torch.minimum(start_BT + sink_column, torch.arange(length, device=device)) + row_start
    attention = ProbedAttention(masks, length, sink_N.flatten())
    state = drafter.fuse(taps)
    tokens, positions = tokens_BT.roll(-1, 1).flatten(), positions_BT.flatten()
    drafter.rotary.reserve(int(positions.max()) + depth + 1)
    drafted, sizes = [], []
    for step in range(depth):
        output = drafter(tokens, state, positions + step, attention.at(step), 0)
        state = output.feedback_ND
        hidden = output.hidden_ND[rows_M]
        best = torch.cat([drafter.logits(part).argmax(-1) for part in hidden.split(HEAD_ROWS)])
        drafted.append(drafter.target_ids(best))
        sizes.append(rms(state[rows_M]))
        tokens = torch.zeros_like(tokens)
        tokens[rows_M] = drafted[-1]
    sink, own = (
        torch.stack([torch.stack(x).mean(0)[rows_M] for x in which], 1)
        for which in (
            [[sink for sink, _ in attention.shares[step]] for step in range(depth)],
            [[own for _, own in attention.shares[step]] for step in range(depth)],
        )
    )
    return Rollout(torch.stack(drafted, 1), torch.stack(sizes, 1), sink, own)
