"""Drafts from every answer position of a known text, with the drafter's own tokens, as when serving; probed on the way.

Greedy acceptance depends on the target's greedy text alone: one rollout from each of its positions tells what any
speculative run over it accepts, at every depth up to the one rolled out (`acceptance.walk`).

    row t, step 0:  pair (x_{t+1}, g_t) at position t, drafts x_{t+2}
    row t, step j:  pair (own draft, fed-back state) at t+j; sees the step-0 keys of columns <= t and its own of steps 1…j

Only the answer's rows are drafted from; the prompt passes once, to give its keys. A long prompt therefore costs one pass.
Shapes: T tokens of the text, M rows, J draft steps, D hidden size, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drift.probes import AttentionFigures, attention_figures, attention_scores, cosine, rms
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend

# Attention probabilities held at once, in numbers: 64 M floats are 256 MB.
PROBABILITIES_AT_ONCE = 1 << 26
HEAD_ROWS = 4096  # rows that the head is applied to at once


@dataclass(frozen=True)
class TargetText:
    """A text whose answer the target wrote greedily, with the states that a drafter reads and one to compare with."""

    tokens_T: Tensor
    answer_start: int
    taps: list[Tensor]  # one [T, D] per tapped layer
    hidden_TD: Tensor | None = None  # what the target's head reads; None: not kept

    @property
    def rows_M(self) -> Tensor:
        """Row t drafts x_{t+2}…: the first answer token comes from the target's own pass over the prompt."""
        return torch.arange(self.answer_start - 1, max(self.answer_start - 1, len(self.tokens_T) - 2))

    @classmethod
    @torch.no_grad()
    def of(cls, decoder: Decoder, tokens: Sequence[int], answer_start: int, taps: Sequence[int]) -> TargetText:
        tokens_T = torch.tensor(list(tokens), device=decoder.norm.weight.device)
        positions = torch.arange(len(tokens_T), device=tokens_T.device)
        hidden, captured = decoder(tokens_T, positions, causal_attend(), taps, len(tokens_T))
        return cls(tokens_T, answer_start, captured, hidden)


@dataclass(frozen=True)
class Rollout:
    drafted_MJ: Tensor  # target ids
    hit_MJ: Tensor  # the draft is the target's token there; False past the text's end
    inside_MJ: Tensor  # the text reaches that far
    rms_MJ: Tensor  # size of the state that each step gives to the next
    cosine_MJ: Tensor  # of that state with the fused target state it stands in for
    cosine_hidden_MJ: Tensor | None  # of what the drafter's head reads with what the target's reads there
    attention: list[AttentionFigures] | None  # per step, mean over layers

    @property
    def on_path_MJ(self) -> Tensor:
        """The state of a step has seen only tokens that the target wrote: all drafts before it are hits."""
        hits = self.hit_MJ.long().cumprod(1)
        return torch.cat([torch.ones_like(hits[:, :1]), hits[:, :-1]], 1).bool()

    @property
    def matched_M(self) -> list[int]:
        return self.hit_MJ.long().cumprod(1).sum(1).tolist()


class RolloutAttention:
    """The `attend` of one rollout: keeps the text's step-0 keys of each layer, and each row's own later ones."""

    def __init__(self, rows_M: Tensor, num_tokens: int, sink: int, prompt_length: int, probe: bool) -> None:
        self.rows, self.sink, self.prompt_length, self.probe = rows_M, sink, prompt_length, probe
        self.column = torch.arange(num_tokens, device=rows_M.device)
        self.context: dict[int, tuple[Tensor, Tensor]] = {}
        self.own: dict[int, tuple[Tensor, Tensor]] = {}  # layer: keys and values [M, steps, K, E]
        self.figures: list[list[AttentionFigures]] = []  # per step, one per layer

    def at(self, step: int) -> Attend:
        self.figures.append([])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
            if step == 0:
                self.context[layer] = (k, v)
                if self.probe:
                    self._rows(layer, q[self.rows], None, window, step)
                return causal_attend()(layer, q, k, v, window)
            new = [x[:, None] for x in (k, v)]
            if layer in self.own:
                new = [torch.cat([kept, x], 1) for kept, x in zip(self.own[layer], new, strict=True)]
            self.own[layer] = (new[0], new[1])
            return self._rows(layer, q, self.own[layer], window, step)

        return attend

    def _rows(self, layer: int, q_MHE: Tensor, own: tuple[Tensor, Tensor] | None, window: int | None, step: int) -> Tensor:
        """Attention of the drafting rows, from materialised probabilities; in pieces where they would be too many."""
        keys, values = self.context[layer]
        size = max(1, PROBABILITIES_AT_ONCE // (q_MHE.shape[1] * (len(self.column) + step)))
        outputs, figures = [], []
        for at in range(0, len(q_MHE), size):
            part = slice(at, at + size)
            scores = attention_scores(q_MHE[part], keys)
            if own is not None:
                scores = torch.cat([scores, attention_scores(q_MHE[part], own[0][part])], -1)
            p = scores.masked_fill(~self._seen(part, step, window)[:, None], -torch.inf).softmax(-1)
            if self.probe:
                figures.append(attention_figures(p, self.rows[part], self.sink, self.prompt_length))
            if own is not None:
                outputs.append(_weighted(p, values, own[1][part]).to(q_MHE.dtype))
        if self.probe:
            self.figures[step].append(AttentionFigures.cat(figures))
        return torch.cat(outputs) if outputs else q_MHE

    def _seen(self, part: slice, step: int, window: int | None) -> Tensor:
        """Which keys each row sees, the text's and then its own: [M, T + step]."""
        rows = self.rows[part, None]
        own = rows + 1 + torch.arange(step, device=rows.device)
        positions = torch.cat([self.column.expand(len(rows), -1), own], 1)
        seen = positions <= rows + step
        seen[:, : len(self.column)] = self.column <= rows
        return seen if window is None else seen & (rows + step - positions < window)


def _weighted(p_MHS: Tensor, values_TKE: Tensor, own_MJKE: Tensor) -> Tensor:
    p = p_MHS.unflatten(1, (values_TKE.shape[1], -1))
    num_context = len(values_TKE)
    out = torch.einsum("mkgs,ske->mkge", p[..., :num_context], values_TKE.float())
    return (out + torch.einsum("mkgj,mjke->mkge", p[..., num_context:], own_MJKE.float())).flatten(1, 2)


@torch.no_grad()
def roll_out(
    drafter: EagleDrafter,
    text: TargetText,
    depth: int,
    *,
    sink: int = 0,
    noise: float = 0.0,
    seed: int = 0,
    probe: bool = True,
) -> Rollout:
    """`noise` α: each state that enters a draft step gets Gaussian noise of α times its own RMS; the context stays clean.

    The drafter must have been lent the target's embedding and head where it has none (`EagleDrafter.share`).
    """
    tokens, device = text.tokens_T, text.tokens_T.device
    rows, length = text.rows_M.to(device), len(tokens)
    generator = torch.Generator().manual_seed(seed)

    def noisy(state_MD: Tensor) -> Tensor:
        if not noise:
            return state_MD
        drawn = torch.randn(state_MD.shape, generator=generator).to(device)
        return state_MD + (noise * rms(state_MD)[:, None] * drawn).to(state_MD.dtype)

    fused = drafter.fuse(text.taps)
    attention = RolloutAttention(rows, length, sink, text.answer_start, probe)
    entering = fused
    if noise:
        entering = fused.clone()
        entering[rows] = noisy(fused[rows])
    # The last token has no successor yet: its row is never drafted from.
    paired = torch.cat([tokens[1:], tokens[-1:]])
    output = drafter(paired, entering, torch.arange(length, device=device), attention.at(0), length)
    hidden, state = output.hidden_ND[rows], output.feedback_ND[rows]

    comparable = text.hidden_TD is not None and hidden.shape[-1] == text.hidden_TD.shape[-1]
    padded_tokens = torch.cat([tokens, tokens.new_full((depth + 2,), -1)])
    drafted, sizes, cosines, cosines_hidden = [], [], [], []
    for step in range(depth):
        if step:
            output = drafter(drafted[-1], noisy(state), rows + step, attention.at(step), length + depth)
            hidden, state = output.hidden_ND, output.feedback_ND
        best = [drafter.logits(part).argmax(-1) for part in hidden.split(HEAD_ROWS)]
        drafted.append(drafter.target_ids(torch.cat(best)))
        sizes.append(rms(state))
        there = (rows + step + 1).clamp_max(length - 1)  # the position whose target state this step's output stands in for
        cosines.append(cosine(state, fused[there]))
        if comparable:
            cosines_hidden.append(cosine(hidden, text.hidden_TD[there]))
    drafted_MJ = torch.stack(drafted, 1)
    ahead = rows[:, None] + 2 + torch.arange(depth, device=device)
    return Rollout(
        drafted_MJ=drafted_MJ,
        hit_MJ=drafted_MJ == padded_tokens[ahead.clamp_max(len(padded_tokens) - 1)],
        inside_MJ=ahead < length,
        rms_MJ=torch.stack(sizes, 1),
        cosine_MJ=torch.stack(cosines, 1),
        cosine_hidden_MJ=torch.stack(cosines_hidden, 1) if comparable else None,
        attention=[_mean_over_layers(layers) for layers in attention.figures] if probe else None,
    )


def _mean_over_layers(layers: list[AttentionFigures]) -> AttentionFigures:
    if len(layers) == 1:
        return layers[0]
    names = AttentionFigures.__dataclass_fields__
    return AttentionFigures(*(torch.stack([getattr(one, name) for one in layers]).mean(0) for name in names))
