"""The quantities that measure drift, as plain tensor maths: sizes of states, shares of attention, cosine with the target's
states, and the position of the target's attention sink.

Shapes: M drafting rows, H query heads, K key/value heads, S keys, E head size, D hidden size.

A row drafts from position t. The keys it attends to, in the order of their positions:

    0 … sink … | rest of the prompt | accepted answer … | t (the pair it drafts from) | t+1 … (drafted since)
                                                        |<------- own: columns >= t ------------------>|

Key columns that a row may not see (later tokens of the text) carry no attention, so they add nothing to any share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

import torch
from torch import Tensor

from fledge.drift.prompts import own_template
from fledge.drift.texts import PaddedBatch
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.layers import Attend
from fledge.tokenizer import Tokenizer

# Shares of the attention of a row and head: sink + prompt + answer + own = 1; drafted is part of own.
# prompt: without the sink; answer: accepted tokens before the row; own: the pair the row drafts from and the tokens it drafted
# since (the paper's "recent"); drafted: only the tokens it drafted since; entropy: in nats.
ATTENTION = ("sink", "prompt", "answer", "own", "drafted", "entropy")


def attention_scores(q_MHE: Tensor, keys_SKE: Tensor) -> Tensor:
    """Returns the scaled scores [M, H, S] in fp32 of all rows over the same keys."""
    grouped = q_MHE.unflatten(1, (keys_SKE.shape[1], -1)).float()
    return torch.einsum("mkge,ske->mkgs", grouped, keys_SKE.float()).flatten(1, 2) * q_MHE.shape[-1] ** -0.5


def attention_figures(p_MHS: Tensor, pivot_M: Tensor, sink: int | Tensor, prompt_length: int | Tensor) -> Tensor:
    """Returns the shares and the entropy, [M, H, ATTENTION]. `pivot_M`: the column of the pair that each row drafts from.
    `prompt_length`: number of prompt columns. `sink` and `prompt_length`: one value for all rows or one per row.
    """
    column = torch.arange(p_MHS.shape[-1], device=p_MHS.device)
    pivot = pivot_M[:, None]
    sink, prompt_length = (x[:, None] if isinstance(x, Tensor) else x for x in (sink, prompt_length))
    is_own = column >= pivot
    is_sink = (column == sink) & ~is_own
    in_prompt = column < prompt_length
    rest = ~is_own & ~is_sink
    parts = torch.stack([is_sink, rest & in_prompt, rest & ~in_prompt, is_own, column > pivot], -1)
    # One product sums every part: several times faster than masking the probabilities for each.
    shares = torch.bmm(p_MHS, parts.to(p_MHS.dtype))
    return torch.cat([shares, torch.special.entr(p_MHS).sum(-1, keepdim=True)], -1)


def rms(states_ND: Tensor) -> Tensor:
    """Returns the size of each state: ‖x‖₂ / √d."""
    return states_ND.float().square().mean(-1).sqrt()


def cosine(a_ND: Tensor, b_ND: Tensor) -> Tensor:
    return torch.cosine_similarity(a_ND.float(), b_ND.float(), dim=-1)


def slope(values: Sequence[float | None]) -> float:
    """Returns the least-squares slope per step of the values of steps 1, 2, …; skips None values (no row got that far)."""
    points = [(step, value) for step, value in enumerate(values) if value is not None]
    return linear_regression(*zip(*points, strict=True)).slope if len(points) >= 2 else 0.0


# The attention sink is measured from the target's attention, not assumed to be column 0.
# Tokens of each text that are used: a few dozen suffice to find the sink, and the cost grows with the square.
SINK_TOKENS = 256
# A column is called a sink if its share is at least this many times the share under uniform attention.
CLEAR_RATIO = 5.0
# The text for finding the sink when no other texts are available; the sink's position hardly depends on the text.
# One question only: an engine runs it at start, where it takes 0.15 s of 2 s on a CPU.
ASKED = ("My sister bakes bread every Saturday. Last week it did not rise, though the flour and the oven were as always. Why?",)


@dataclass(frozen=True)
class Sink:
    column: int
    share: float  # of the attention of each text's second half, mean over heads, layers and texts
    uniform: float  # one column's share if attention were uniform
    by_layer: list[float]
    runner_up: int
    runner_up_share: float

    @property
    def clear(self) -> bool:
        return self.share >= CLEAR_RATIO * self.uniform


def find_own_sink(decoder: Decoder, tokenizer: Tokenizer) -> Sink:
    """Finds the sink with a short question in the target's chat template, for use when no texts are available yet."""
    return find_sink(decoder, [own_template(tokenizer, [{"role": "user", "content": text}]) for text in ASKED])


@torch.no_grad()
def find_sink(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Sink:
    """Returns the column with the highest average attention over all heads and layers.

    Only the queries of each text's second half count: early tokens can attend to few others.
    """
    shares: list[Tensor] = []  # per text: [layers, columns]
    uniform = []
    shortest = min(min(len(text) for text in texts), SINK_TOKENS)
    for text in texts:
        tokens = torch.tensor(list(text[:SINK_TOKENS]), device=decoder.norm.weight.device)
        column = torch.arange(len(tokens), device=tokens.device)
        asking = column[len(tokens) // 2 :]
        layers: list[Tensor] = []

        decoder(tokens, column, _watching(layers, column, asking, shortest), (), len(tokens))
        shares.append(torch.stack(layers))
        uniform.append(float((1 / (asking + 1.0)).mean()))
    by_layer = torch.stack(shares).mean(0)
    mean = by_layer.mean(0)
    best = mean.topk(min(2, len(mean)))
    first = int(best.indices[0])
    return Sink(
        first,
        float(best.values[0]),
        sum(uniform) / len(uniform),
        by_layer[:, first].tolist(),
        int(best.indices[-1]),
        float(best.values[-1]),
    )


def _watching(layers: list[Tensor], column: Tensor, asking: Tensor, shortest: int) -> Attend:
    """Returns a causal `attend` that appends each layer's shares of attention, of rows `asking` on the first columns."""

    def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
        seen = column <= asking[:, None]
        if window is not None:
            seen = seen & (asking[:, None] - column < window)
        scores = attention_scores(q_NHE[asking], k_NKE).masked_fill(~seen[:, None], -torch.inf)
        layers.append(scores.softmax(-1).mean((0, 1))[:shortest])
        return causal_attend()(layer, q_NHE, k_NKE, v_NKE, window)

    return attend


# --- attention of drafting rows whose probabilities are not needed --------------------------------------------------------
#
# A fused kernel attends to the text's keys without materialising the probabilities; the rows' own few keys are attended to
# separately, and the two results are merged by their log-sums.
# Shapes: B texts, T columns, R rows of a text, M rows of all texts, J own keys, K key/value heads, G query heads per KV head.


def can_attend_rows(q_BRHE: Tensor, window: int | None, step: int) -> bool:
    return q_BRHE.is_cuda and q_BRHE.dtype in (torch.float16, torch.bfloat16) and (window is None or window > step)


def attend_rows(
    batch: PaddedBatch,
    q_BRHE: Tensor,
    keys_BTKE: Tensor,
    values_BTKE: Tensor,
    own_keys_BRJKE: Tensor,
    own_values_BRJKE: Tensor,
    *,
    window: int | None,
    step: int,
) -> Tensor:
    """Attention of all rows: to own keys, and to the text up to the row's column (with a window: from row + `step` back)."""
    is_row = batch.is_row_BR
    num_rows_B = batch.num_rows_B
    seen_B = batch.prompt_length_B - 1 + num_rows_B  # columns that the last row of a text sees
    is_seen = torch.arange(keys_BTKE.shape[1], device=seen_B.device) < seen_B[:, None]
    q = q_BRHE[is_row]
    text, log_sum = text_attention(q, keys_BTKE[is_seen], values_BTKE[is_seen], num_rows_B, seen_B, window, step)
    own_keys, own_values = own_keys_BRJKE[is_row].float(), own_values_BRJKE[is_row].float()
    by_group = q.unflatten(1, (own_keys.shape[2], -1)).float() * q.shape[-1] ** -0.5
    scores = torch.einsum("mkge,mjke->mkgj", by_group, own_keys).flatten(1, 2)  # [M, H, J]
    total = torch.logaddexp(log_sum, scores.logsumexp(-1))
    weights = (scores - total[..., None]).exp().unflatten(1, by_group.shape[1:3])
    own = torch.einsum("mkgj,mjke->mkge", weights, own_values).flatten(1, 2)
    out = text.float() * (log_sum - total).exp()[..., None] + own
    return torch.zeros_like(q_BRHE).masked_scatter_(is_row[:, :, None, None], out.to(q_BRHE.dtype))


def text_attention(
    q_MHE: Tensor, keys_NKE: Tensor, values_NKE: Tensor, num_rows_B: Tensor, seen_B: Tensor, window: int | None, step: int
) -> tuple[Tensor, Tensor]:
    """Attends to the columns of the texts. Returns the output and the log-sum-exp of each row's scores (fp32 [M, H]).

    The last row of a text sees all the given keys, the row before it one key fewer, and so on.
    """
    run = _fused if q_MHE.is_cuda else text_attention_reference
    return run(q_MHE, keys_NKE, values_NKE, num_rows_B, seen_B, window, step)


def text_attention_reference(
    q_MHE: Tensor, keys_NKE: Tensor, values_NKE: Tensor, num_rows_B: Tensor, seen_B: Tensor, window: int | None, step: int
) -> tuple[Tensor, Tensor]:
    group = q_MHE.shape[1] // keys_NKE.shape[1]
    outs, sums = [], []
    rows, columns = num_rows_B.tolist(), seen_B.tolist()
    for q, k, v in zip(q_MHE.split(rows), keys_NKE.split(columns), values_NKE.split(columns), strict=True):
        column = torch.arange(len(k), device=k.device)
        row = torch.arange(len(k) - len(q), len(k), device=k.device)[:, None]
        seen = column <= row
        if window is not None:
            seen &= row + step - column < window
        k, v = (x.repeat_interleave(group, 1).float() for x in (k, v))
        scores = torch.einsum("mhe,the->mht", q.float() * q.shape[-1] ** -0.5, k).masked_fill(~seen[:, None], -torch.inf)
        outs.append(torch.einsum("mht,the->mhe", scores.softmax(-1), v).to(q.dtype))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums)


def _fused(
    q_MHE: Tensor, keys_NKE: Tensor, values_NKE: Tensor, num_rows_B: Tensor, seen_B: Tensor, window: int | None, step: int
) -> tuple[Tensor, Tensor]:
    is_text = num_rows_B > 0  # the kernel does not take texts without rows
    rows, seen = num_rows_B[is_text], seen_B[is_text]
    if not bool(is_text.all()):
        keep = is_text.repeat_interleave(seen_B)
        keys_NKE, values_NKE = keys_NKE[keep], values_NKE[keep]
    begins_q, begins_k = (torch.cat([x.new_zeros(1), x.cumsum(0)]).int() for x in (rows, seen))
    reach = {} if window is None else {"window_size_left": window - 1 - step, "window_size_right": 0}
    longest = int(rows.max()), int(seen.max())
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        q_MHE.contiguous(),
        keys_NKE.contiguous(),
        values_NKE.contiguous(),
        begins_q,
        begins_k,
        *longest,
        0.0,
        True,
        False,
        **reach,
    )
    if log_sum.dim() == 3:  # [B, H, longest] in older PyTorch releases
        place = torch.arange(log_sum.shape[-1], device=rows.device) < rows[:, None]
        return out, log_sum.transpose(1, 2)[place]
    return out, log_sum.t()
