"""Drafts from every answer position of known texts with the drafter's own tokens, as in serving, and measures probes meanwhile.

Greedy acceptance depends only on the target's greedy text: one rollout from each of its positions gives what any
speculative run over it accepts, at every depth up to that of the rollout (`metrics.walk`). Sampled acceptance also depends
only on the target's sampled text: given that the target wrote y, a draft drawn from q was y and accepted with probability
min(1, q(y)/p(y)). A rollout at a temperature therefore follows the text and returns those probabilities.

    row t, step 0:  pair (x_{t+1}, g_t) at position t, drafts x_{t+2}
    row t, step j:  pair (own draft, fed-back state) at t+j; sees the step-0 keys of columns <= t and its own of steps 1…j

Only answer rows draft; the prompt passes through the drafter once, for its keys. All texts roll out as one batch.
Shapes: B texts, T columns, R rows of a text (M: of all texts, flat), J draft steps, D hidden size, H heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fledge.drift.probes import attend_rows, attention_figures, can_attend_rows, cosine, rms
from fledge.drift.texts import PaddedBatch, TargetText
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend

# Attention probabilities held in memory at once: 64 M floats are 256 MB.
PROBABILITIES_AT_ONCE = 1 << 26
HEAD_ROWS = 4096  # rows per pass of the drafter's head
TARGET_HEAD_ROWS = 1024  # rows per pass of the target's head, whose vocabulary is larger


@dataclass(frozen=True)
class Rollout:
    """The result of a rollout: M rows, in the order of the texts."""

    text_M: Tensor  # the text of each row
    drafted_MJ: Tensor  # target ids
    # Probability that a draft is accepted, given that those before it were; greedy: 1 if it is the target's token.
    accept_prob_MJ: Tensor
    inside_MJ: Tensor  # whether the text reaches that far; nothing is accepted past its end
    rms_MJ: Tensor  # size of the state that each step passes to the next
    cosine_MJ: Tensor  # of that state with the fused target state that it replaces
    cosine_hidden_MJ: Tensor | None  # of the input of the drafter's head with the input of the target's head there
    attention: list[Tensor] | None  # per step, mean over layers: [M, H, ATTENTION]

    @property
    def on_path_MJ(self) -> Tensor:
        """Whether all drafts before a step were accepted, so that its state has seen only tokens that the target wrote."""
        accepted = (self.accept_prob_MJ > 0).long().cumprod(1)
        return torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], 1).bool()

    @property
    def matched_M(self) -> list[int]:
        """The number of drafts from each row that are the target's next tokens (greedy)."""
        return self.accept_prob_MJ.long().cumprod(1).sum(1).tolist()


class RolloutAttention:
    """The `attend` of one rollout: keeps each layer's step-0 keys of the texts, and each row's own keys of later steps."""

    def __init__(self, batch: PaddedBatch, sink: int, probe: bool) -> None:
        self.batch, self.probe = batch, probe
        self.sink_B = sink - batch.first_B
        self.column = torch.arange(batch.tokens_BT.shape[1], device=batch.tokens_BT.device)
        self.context: dict[int, tuple[Tensor, Tensor]] = {}  # layer: keys and values [B, T, K, E]
        self.own: dict[int, tuple[Tensor, Tensor]] = {}  # layer: keys and values [B, R, steps, K, E]
        self.figures: list[list[Tensor]] = []  # per step, one per layer

    def at(self, step: int) -> Attend:
        self.figures.append([])

        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
            shape = self.batch.tokens_BT.shape if step == 0 else self.batch.row_BR.shape
            q, k, v = (x.unflatten(0, shape) for x in (q_NHE, k_NKE, v_NKE))
            if step == 0:
                self.context[layer] = (k, v)
                if self.probe:
                    self._rows(layer, self.batch.at(q, self.batch.row_BR), None, window, step)
                return self._causal(q, k, v, window).flatten(0, 1)
            new = [x[:, :, None] for x in (k, v)]
            if layer in self.own:
                new = [torch.cat([kept, x], 2) for kept, x in zip(self.own[layer], new, strict=True)]
            self.own[layer] = (new[0], new[1])
            if not self.probe and can_attend_rows(q, window, step):
                context = self.context[layer]
                return attend_rows(self.batch, q, *context, *self.own[layer], window=window, step=step).flatten(0, 1)
            return self._rows(layer, q, self.own[layer], window, step).flatten(0, 1)

        return attend

    def _causal(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, window: int | None) -> Tensor:
        """Causal attention. Padding is on the right, so no row of a text attends to it."""
        mask = None
        if window is not None and window < len(self.column):
            ago = self.column[:, None] - self.column
            mask = (ago >= 0) & (ago < window)
        group = q_BTHE.shape[2] // k_BTKE.shape[2]
        k, v = (x.repeat_interleave(group, 2).transpose(1, 2) for x in (k_BTKE, v_BTKE))
        out = F.scaled_dot_product_attention(q_BTHE.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None)
        return out.transpose(1, 2)

    def _rows(self, layer: int, q_BRHE: Tensor, own: tuple[Tensor, Tensor] | None, window: int | None, step: int) -> Tensor:
        """Attention of the drafting rows from materialised probabilities, in chunks of at most `PROBABILITIES_AT_ONCE`."""
        keys, values = (x.float() for x in self.context[layer])
        num_texts, num_rows, num_heads, size = q_BRHE.shape
        q = q_BRHE.unflatten(2, (keys.shape[2], -1)).float() * size**-0.5  # [B, R, K, G, E]
        at_once = max(1, PROBABILITIES_AT_ONCE // (num_texts * num_heads * (len(self.column) + step)))
        outputs, figures = [], []
        for at in range(0, num_rows, at_once):
            part = slice(at, at + at_once)
            scores = torch.einsum("bmkge,btke->bmkgt", q[:, part], keys)
            if own is not None:
                drafted = torch.einsum("bmkge,bmjke->bmkgj", q[:, part], own[0][:, part].float())
                scores = torch.cat([scores, drafted], -1)
            hidden = ~self._seen(part, step, window)[:, :, None, None]
            p = scores.masked_fill_(hidden, -torch.inf).softmax(-1)
            if self.probe:
                figures.append(self._probed(p.flatten(2, 3), part))
            if own is not None:
                out = torch.einsum("bmkgt,btke->bmkge", p[..., : len(self.column)], values)
                out += torch.einsum("bmkgj,bmjke->bmkge", p[..., len(self.column) :], own[1][:, part].float())
                outputs.append(out.flatten(2, 3).to(q_BRHE.dtype))
        if self.probe:
            self.figures[step].append(torch.cat(figures, 1)[self.batch.is_row_BR])
        return torch.cat(outputs, 1) if outputs else q_BRHE

    def _probed(self, p_BRHS: Tensor, part: slice) -> Tensor:
        pivot = self.batch.row_BR[:, part]
        sink, prompt = (x[:, None].expand_as(pivot).flatten() for x in (self.sink_B, self.batch.prompt_length_B))
        return attention_figures(p_BRHS.flatten(0, 1), pivot.flatten(), sink, prompt).unflatten(0, p_BRHS.shape[:2])

    def _seen(self, part: slice, step: int, window: int | None) -> Tensor:
        """Returns which keys each row sees, the text's and then its own: [B, R, T + step]."""
        row = self.batch.row_BR[:, part, None]
        seen = self.column <= row
        own = torch.ones(*row.shape[:2], step, dtype=torch.bool, device=row.device)
        if window is not None:
            seen = seen & (row + step - self.column < window)
            own = own & (step - 1 - torch.arange(step, device=row.device) < window)
        return torch.cat([seen, own], -1)


@torch.no_grad()
def roll_out(
    drafter: EagleDrafter,
    texts: TargetText | Sequence[TargetText],
    depth: int,
    *,
    sink: int = 0,
    noise: float = 0.0,
    seed: int = 0,
    probe: bool = True,
    target_p: Tensor | None = None,
    temperature: float = 0.0,
) -> Rollout:
    """Drafts `depth` steps from every answer row of the texts.

    `noise` α: each state that enters a draft step gets Gaussian noise of α times its own RMS; the context stays clean.
    `temperature`: that at which the texts were sampled. `target_p` [M, J]: the probability that the target gave to the token
    that each draft has to equal (`target_probabilities`).
    A drafter without its own embedding or head must already share the target's (`EagleDrafter.share`).
    """
    batch = PaddedBatch([texts] if isinstance(texts, TargetText) else texts, drafter)
    device, is_row = batch.tokens_BT.device, batch.is_row_BR
    generator = torch.Generator(device).manual_seed(seed)

    def noisy(state: Tensor) -> Tensor:
        if not noise:
            return state
        drawn = torch.randn(state.shape, generator=generator, device=device)
        return state + (noise * rms(state)[..., None] * drawn).to(state.dtype)

    attention = RolloutAttention(batch, sink, probe)
    entering = batch.fused_BTD
    if noise:
        at_rows = torch.arange(len(entering), device=device)[:, None], batch.row_BR
        entering = entering.index_put(at_rows, noisy(entering[at_rows]))
    positions = batch.first_B[:, None] + torch.arange(entering.shape[1], device=device)
    highest = batch.highest_position + depth
    output = drafter(batch.paired_BT.flatten(), entering.flatten(0, 1), positions.flatten(), attention.at(0), highest)
    at_columns = (x.unflatten(0, batch.tokens_BT.shape) for x in (output.hidden_ND, output.feedback_ND))
    hidden, state = (batch.at(x, batch.row_BR).flatten(0, 1) for x in at_columns)

    target_hidden = batch.hidden_BTD
    if target_hidden is not None and target_hidden.shape[-1] != hidden.shape[-1]:
        target_hidden = None  # different sizes cannot be compared
    row_positions = batch.first_B[:, None] + batch.row_BR
    steps: list[dict[str, Tensor]] = []
    token = batch.tokens_BT  # of the step before: drafted (greedy) or the text's (sampled)
    for step in range(depth):
        if step:
            output = drafter(token.flatten(), noisy(state), (row_positions + step).flatten(), attention.at(step), highest)
            hidden, state = output.hidden_ND, output.feedback_ND
        there = batch.row_BR + step + 1  # the column whose target state this step's output replaces
        wanted = batch.at(batch.tokens_BT, there + 1)
        inside = there + 1 < batch.length_B[:, None]
        best, probability = _drafts(drafter, hidden, wanted.flatten(), temperature)
        drafted = best.view_as(wanted)
        found = {"drafted": drafted, "inside": inside, "rms": rms(state).view_as(wanted)}
        if temperature:
            assert probability is not None
            assert target_p is not None, "of sampled texts"
            p = torch.zeros_like(inside, dtype=torch.float32).masked_scatter_(is_row, target_p[:, step])
            found["accept_prob"] = (probability.view_as(wanted) / p.clamp_min(1e-30)).clamp_max(1) * inside
        else:
            found["accept_prob"] = (drafted == wanted) & inside
        token = wanted if temperature else drafted
        found["cosine"] = cosine(state, batch.at(batch.fused_BTD, there).flatten(0, 1)).view_as(wanted)
        if target_hidden is not None:
            found["cosine_hidden"] = cosine(hidden, batch.at(target_hidden, there).flatten(0, 1)).view_as(wanted)
        steps.append(found)
    stacked = {f"{name}_MJ": torch.stack([one[name][is_row] for one in steps], 1) for name in steps[0]}
    return Rollout(
        text_M=torch.arange(len(is_row), device=device)[:, None].expand_as(is_row)[is_row],
        cosine_hidden_MJ=stacked.pop("cosine_hidden_MJ", None),
        attention=[torch.stack(layers).mean(0) for layers in attention.figures] if probe else None,
        **stacked,
    )


def _drafts(drafter: EagleDrafter, hidden_MD: Tensor, wanted_M: Tensor, temperature: float) -> tuple[Tensor, Tensor | None]:
    """Returns each row's most likely token and, at a temperature, the probability of the wanted one (0 outside the draft
    vocabulary)."""
    best, probabilities = [], []
    lookup = None
    for hidden, wanted in zip(hidden_MD.split(HEAD_ROWS), wanted_M.split(HEAD_ROWS), strict=True):
        logits = drafter.logits(hidden)
        best.append(drafter.target_ids(logits.argmax(-1)))
        if temperature:
            if lookup is None:
                ids = drafter.target_ids(torch.arange(logits.shape[-1], device=logits.device))
                lookup = torch.full((drafter.config.vocab_size,), -1, device=logits.device)
                lookup[ids] = torch.arange(len(ids), device=logits.device)
            draft_id = lookup[wanted]
            q = (logits.float() / temperature).softmax(-1).gather(1, draft_id.clamp_min(0)[:, None])[:, 0]
            probabilities.append(q * (draft_id >= 0))
    return torch.cat(best), torch.cat(probabilities) if temperature else None


@torch.no_grad()
def target_probabilities(decoder: Decoder, texts: Sequence[TargetText], depth: int, temperature: float) -> Tensor:
    """Returns [M, J]: the target's probability, at the sampling temperature of the texts, of the token that draft j of each row
    has to equal. 1 past a text's end, where nothing is accepted anyway."""
    parts = []
    for text in texts:
        first = text.answer_start  # row 0 drafts x_{start + 1}, which the target predicts from its state at `start`
        assert text.hidden_TD is not None, "the target has read them"
        states, wanted = text.hidden_TD[first:-1], text.tokens_T[first + 1 :]
        found = [
            (decoder.logits(state).float() / temperature).softmax(-1).gather(1, token[:, None])[:, 0]
            for state, token in zip(states.split(TARGET_HEAD_ROWS), wanted.split(TARGET_HEAD_ROWS), strict=True)
        ]
        p = torch.cat([*found, torch.ones(depth, device=states.device)])
        parts.append(p.unfold(0, depth, 1)[: text.num_rows])
    return torch.cat(parts)
