"""Attention of drafting rows whose probabilities are not needed: the text's part by a fused kernel that never holds them,
the rows' own few keys beside it, and the two joined by their sums.

Shapes: B texts, T columns, R rows of a text, M rows of all texts, J own keys, K key/value heads, G query heads to each, E size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fledge.drift.texts import PaddedBatch


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
    """A row sees its text up to its own column, as far back as the window reaches from `step` tokens on, and its own keys."""
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
    """Over the texts' own columns: the output and, fp32 [M, H], the logarithm of each row's sum.

    The last row of a text sees its last given key, the row before one key less, and so on.
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
    is_text = num_rows_B > 0  # the kernel wants no empty ones
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
    if log_sum.dim() == 3:  # [B, H, longest], as older releases have it
        place = torch.arange(log_sum.shape[-1], device=rows.device) < rows[:, None]
        return out, log_sum.transpose(1, 2)[place]
    return out, log_sum.t()
