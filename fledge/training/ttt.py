"""Training-time test: unrolls the drafter over K draft steps for all positions of packed documents at once.

Row t at step j, within one document:

    step        token        state                position   is scored against the target at
    0           x_{t+1}      g_t                  t          t+1      (predicts x_{t+2})
    j           x_{t+1+j}    step j−1 of row t    t+j        t+1+j    (predicts x_{t+2+j})

Its attention sees the step-0 keys of rows ≤ t and its own keys of steps 1…j. The former is ordinary causal attention, the
latter j dot products; the two are merged exactly by their log-sum-exps. No mask grows with K.

Shapes: B packed rows of T tokens (N = B·T), H query heads, K key/value heads, E head size.
A document is a run of adjacent tokens; `start_BT` holds, for every token, the column of its document's first token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Attend

BLOCK = 128  # tokens per FlexAttention block; the last one of a row may be shorter
# FlexAttention's kernel for training. By default, rows of fewer than 128 tokens would use the decoding kernel, which takes at
# most 128 queries per key head: 100 tokens with two query heads per key head do not compile.
KERNEL = {"BACKEND": "TRITON"}

Mask = BlockMask | Tensor  # blocks for FlexAttention; else [B, 1, T, T], True where attention is allowed

# Compiled, because uncompiled FlexAttention materialises all scores. Inside a compiled caller it is inlined.
_compiled_flex_attention = torch.compile(flex_attention, dynamic=False)


# --- attention over packed documents: FlexAttention on CUDA, plain maths elsewhere --------------------------------------


def document_starts(document_BT: Tensor) -> Tensor:
    """Returns, for every token, the column of its document's first token (int32)."""
    columns = torch.arange(document_BT.shape[1], device=document_BT.device, dtype=torch.int32)
    is_first = torch.ones_like(document_BT, dtype=torch.bool)
    is_first[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    return torch.where(is_first, columns, 0).cummax(1).values.int()


def packed_mask(start_BT: Tensor, window: int | None = None, ahead: int = 0, *, flex: bool) -> Mask:
    """Returns a mask that is causal within each document.

    `window` and `ahead`: a query that is `ahead` positions after its row (a later draft step) sees the keys less than
    `window` positions before it, as in serving.
    """
    length = start_BT.shape[1]
    if window is not None and window >= length + ahead:
        window = None

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        allowed = (kv <= q) & (kv >= start_BT[b, q])
        return allowed if window is None else allowed & (q + ahead - kv < window)

    if not flex:
        column = torch.arange(length, device=start_BT.device)
        rows = torch.arange(len(start_BT), device=start_BT.device)[:, None, None]
        return visible(rows, rows, column[:, None], column[None, :])[:, None]

    # The needed blocks follow from each block's first and last document start, without a T×T mask.
    block = torch.arange(-(-length // BLOCK), device=start_BT.device)
    q_block, kv_block = block[:, None], block[None, :]
    last = (block * BLOCK + BLOCK - 1).clamp_max(length - 1)  # of each block
    first_start, last_start = start_BT[:, ::BLOCK, None], start_BT[:, last, None]
    needed = (kv_block <= q_block) & (kv_block * BLOCK + BLOCK - 1 >= first_start)
    full = (kv_block < q_block) & (kv_block * BLOCK >= last_start)
    if window is not None:
        nearest = q_block * BLOCK + ahead - (kv_block * BLOCK + BLOCK - 1)
        furthest = q_block * BLOCK + BLOCK - 1 + ahead - kv_block * BLOCK
        needed &= nearest < window
        full &= furthest < window
    return BlockMask.from_kv_blocks(
        *_listed(needed & ~full),
        *_listed(needed & full),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(length, length),
    )


def _listed(blocks_BQK: Tensor) -> tuple[Tensor, Tensor]:
    """Returns how many blocks each query block has, and lists that begin with the indices of these blocks."""
    chosen = blocks_BQK[:, None].int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def attention_with_lse(q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, mask: Mask, length: int) -> tuple[Tensor, Tensor]:
    """Returns the output [N, H, E] and the log-sum-exp of the scores [N, H] (at least fp32)."""
    q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
    if isinstance(mask, BlockMask):
        attention: Callable[..., Any] = (
            flex_attention if torch.compiler.is_compiling() or not q.is_cuda else _compiled_flex_attention
        )
        out, aux = attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(lse=True), kernel_options=KERNEL)
        lse = aux.lse
    else:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        lse = scores.logsumexp(-1)
        out = ((scores - lse[..., None]).exp() @ v.to(wide)).to(q.dtype)
    return out.transpose(1, 2).flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def packed_attend(masks: dict[int | None, Mask], length: int) -> Attend:
    """Returns the decoder's attention over packed rows. `masks`: one per window size of its layers."""

    def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
        mask = masks[window]
        if isinstance(mask, BlockMask):
            return attention_with_lse(q_NHE, k_NKE, v_NKE, mask, length)[0]
        q, k, v = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in (q_NHE, k_NKE, v_NKE))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return attend


# --- the unroll ---------------------------------------------------------------------------------------------------------


class UnrollAttention:
    """The `attend` of one unroll: keeps each layer's step-0 keys, and each row's own keys of later steps."""

    def __init__(self, masks: Sequence[Mask], length: int) -> None:
        self.masks, self.length = masks, length  # one mask per step: a window moves with the query
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (layer, step): keys and values

    def at(self, step: int) -> Attend:
        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
            self.kept[layer, step] = (k_NKE, v_NKE)
            out, lse = attention_with_lse(q_NHE, *self.kept[layer, 0], self.masks[step], self.length)
            return merge_own(q_NHE, out, lse, *self.own(layer, step)) if step else out

        return attend

    def own(self, layer: int, step: int) -> tuple[Tensor, Tensor]:
        """Returns keys and values of steps 1…step: [N, K, step, E] each."""
        keys, values = zip(*(self.kept[layer, j] for j in range(1, step + 1)), strict=True)
        return torch.stack(keys, 2), torch.stack(values, 2)


def merge_own(q_NHE: Tensor, out_NHE: Tensor, lse_NH: Tensor, keys_NKJE: Tensor, values_NKJE: Tensor) -> Tensor:
    """Attends to the context (given by its output and log-sum-exp) and each row's own J keys in one softmax."""
    context, own = own_shares(q_NHE, lse_NH, keys_NKJE)
    own = own.unflatten(1, (keys_NKJE.shape[1], -1)).to(values_NKJE.dtype)  # [N, K, group, J]
    drafted = (own[..., None] * values_NKJE[:, :, None]).sum(-2).flatten(1, 2)
    return (context[..., None] * out_NHE + drafted).to(q_NHE.dtype)


def own_shares(q_NHE: Tensor, lse_NH: Tensor, keys_NKJE: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the shares of attention on the context [N, H] and on each own key [N, H, J]; they sum to one."""
    grouped = q_NHE.unflatten(1, (keys_NKJE.shape[1], -1))  # [N, K, group, E]
    scores = (grouped[:, :, :, None].to(lse_NH.dtype) * keys_NKJE[:, :, None]).sum(-1).flatten(1, 2)
    scores = scores * q_NHE.shape[-1] ** -0.5
    total = torch.logaddexp(lse_NH, scores.logsumexp(-1))
    return (lse_NH - total).exp(), (scores - total[..., None]).exp()


def step_masks(start_BT: Tensor, steps: int, window: int | None, *, flex: bool) -> list[Mask]:
    if window is None:
        return [packed_mask(start_BT, flex=flex)] * steps
    return [packed_mask(start_BT, window, ahead, flex=flex) for ahead in range(steps)]


class Unroll(nn.Module):
    """Runs K steps of a drafter (K: the number of masks); its parameters are the drafter's.

    `compute_dtype`: the weights are cast to it at each step, so that the gradients of the steps are summed in the weights'
    own type (fp32). `recompute`: keep one state per step instead of all activations.
    """

    def __init__(self, drafter: EagleDrafter, compute_dtype: torch.dtype | None = None, *, recompute: bool = False) -> None:
        super().__init__()
        self.network = _Network(drafter)
        self.compute_dtype, self.recompute = compute_dtype, recompute

    def forward(self, taps: Sequence[Tensor], tokens_BT: Tensor, positions_BT: Tensor, masks: Sequence[Mask]) -> list[Tensor]:
        """Returns the head's input at each step: [N, D]. The rotary table must already reach the highest position + K."""
        attention = UnrollAttention(masks, tokens_BT.shape[1])
        state, hidden = self._call("fuse", taps), []
        for step in range(len(masks)):
            # Tokens that wrap around the row's end belong to rows without a loss at this step.
            tokens = tokens_BT.roll(-1 - step, 1).flatten()
            inputs = (tokens, state, positions_BT.flatten() + step, attention.at(step), 0)
            if self.recompute:
                output = checkpoint(self._call, "forward", *inputs, use_reentrant=False)
            else:
                output = self._call("forward", *inputs)
            hidden.append(output.hidden_ND)
            state = output.feedback_ND
        return hidden

    def _call(self, method: str, *inputs: Any) -> Any:
        if self.compute_dtype is None:
            return self.network(method, *inputs)
        cast = {name: weight.to(self.compute_dtype) for name, weight in self.network.named_parameters()}
        return functional_call(self.network, cast, (method, *inputs))


class _Network(nn.Module):
    """Wraps the drafter's methods in one `forward`, because `functional_call` only calls `forward`."""

    def __init__(self, drafter: EagleDrafter) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self, method: str, *inputs: Any) -> Any:
        return self.drafter.fuse(*inputs) if method == "fuse" else self.drafter(*inputs)


@dataclass(frozen=True)
class TrainBatch:
    """A packed batch with its scored positions. It is computed on the host, so that no step waits for the device."""

    tokens_BT: Tensor
    positions_BT: Tensor
    start_BT: Tensor  # int32, see `document_starts`
    scored_R: Tensor  # flat index s of the target positions whose next token has a loss; padded to a multiple
    valid_KR: Tensor  # bool: whether row s−1−j is in the document, so that step j is scored at s
    num_valid_K: Tensor  # fp32
    num_outside_K: Tensor  # fp32: positions without loss because their token is outside the draft vocabulary

    @classmethod
    def plan(
        cls,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        document_BT: Tensor,
        loss_BT: Tensor,
        steps: int,
        multiple: int,
        vocabulary_V: Tensor | None = None,
    ) -> TrainBatch:
        """Builds a batch from CPU tensors. `multiple`: scored positions are padded to a multiple of it, so that shapes recur.

        `vocabulary_V`: whether each target token is in the draft vocabulary; positions whose next token is not have no loss.
        None: all positions have a loss.
        """
        start = document_starts(document_BT)
        length = tokens_BT.shape[1]
        column = torch.arange(length)
        has_next = torch.zeros_like(loss_BT, dtype=torch.bool)
        has_next[:, :-1] = loss_BT[:, 1:].bool() & (document_BT[:, 1:] == document_BT[:, :-1]) & (document_BT[:, 1:] > 0)
        scored = has_next.flatten().nonzero().flatten()
        steps_before = (column - start).flatten()[scored]  # how many rows of the document lie before s
        valid = steps_before[None, :] >= 1 + torch.arange(steps)[:, None]
        num_outside = torch.zeros(steps)
        if vocabulary_V is not None:
            inside = vocabulary_V[tokens_BT.flatten()[scored + 1]]
            num_outside = valid[:, ~inside].sum(1).float()
            scored, valid = scored[inside], valid[:, inside]
        padding = -len(scored) % multiple if len(scored) else multiple
        return cls(
            tokens_BT=tokens_BT,
            positions_BT=positions_BT,
            start_BT=start,
            scored_R=torch.cat([scored, scored.new_zeros(padding)]),
            valid_KR=torch.cat([valid, valid.new_zeros(steps, padding)], 1),
            num_valid_K=valid.sum(1).float(),
            num_outside_K=num_outside,
        )

    def to(self, device: torch.device) -> TrainBatch:
        tensors = [getattr(self, f.name) for f in fields(self)]
        if device.type == "cuda":
            tensors = [x.pin_memory() for x in tensors]
        return TrainBatch(*(x.to(device, non_blocking=True) for x in tensors))
