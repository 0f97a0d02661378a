"""The GPU's backend: fused kernels over a paged cache, five launches per layer for few rows, no host decisions, so capturable.

On CPU tensors the kernels' torch references run, so that tests can run a captured pass eagerly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.kernels.attention.decode_attention import decode_attention
from fledge.kernels.attention.launch_config import arrival_counts
from fledge.kernels.attention.metadata import AttentionForm, AttentionMetadata, given
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.attention.prefill_attention import prefill_attention
from fledge.kernels.attention.rope_attention import rope_attention
from fledge.kernels.attention.rope_cache import Norms, rope_cache, store_kv
from fledge.kernels.draft_inputs import DraftInputs, draft_inputs, fuse_inputs
from fledge.kernels.linear.dispatch import head_choice, linear
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight
from fledge.kernels.rms_norm import rms_norm
from fledge.kernels.sample import PartialArgmax
from fledge.kernels.triton_support import use_triton
from fledge.ops.base import AttentionModule, DrafterLayerModule, FusedAttentionModule, NormModule, Ops


class CudaOps(Ops):
    """The GPU backend of one network, with its cache and its tables of cosines and sines."""

    def __init__(self, cache: PagedKV, *rope_tables: Tensor) -> None:
        """`rope_tables`: `device_tables` for all positions that will occur."""
        self.cache, self.rope_tables = cache, rope_tables
        # Not shared with other backends: another engine's attention may run at the same time in another stream.
        self.arrivals = arrival_counts(cache.keys.device)

    def linear(self, module: nn.Module, x: Tensor, *, residual: Tensor | None = None, **surroundings: Any) -> Tensor:
        x, surroundings = self._in_order(module, x, surroundings)
        return linear(x, weight_of(module), bias_of(module), residual_MO=residual, **surroundings)

    def attention(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        assert meta is not None
        if meta.form is AttentionForm.HOST:
            meta = meta.as_packed(self.cache.page_size)
        if meta.form is AttentionForm.DECODE:
            return rope_attention(
                qkv_NX,
                self.rope_tables[module.rope],
                given(meta.starts_B),
                given(meta.counts_B),
                *self._cache_of(module),
                given(meta.page_table_BP),
                self.cache.page_size,
                norms=head_norms(module),
                window=module.window,
                arrivals=self.arrivals,
            )
        heads = self._store_rotated(module, qkv_NX, meta)
        return self._attend_stored(module, heads[:, : module.num_heads], meta).flatten(-2)

    def attend(
        self, module: AttentionModule, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, meta: AttentionMetadata | None
    ) -> Tensor:
        assert meta is not None
        _, slots = meta.tokens(len(q_NHE), self.cache.page_size)
        store_kv(k_NKE, v_NKE, slots, *self._cache_of(module))
        return self._attend_stored(module, q_NHE, meta)

    def angles(self, meta: AttentionMetadata | None, num_tokens: int, rope: int = 0) -> tuple[Tensor, Tensor]:
        assert meta is not None
        positions, _ = meta.tokens(num_tokens, self.cache.page_size)
        return meta.once((self, "angles", rope), lambda: self.rope_tables[rope][:, positions].unsqueeze(-2).unbind(0))

    def norm(self, module: NormModule, x_ND: Tensor) -> Tensor:
        if use_triton(x_ND):
            return rms_norm(x_ND, module.weight, module.eps)
        return F.rms_norm(x_ND, module.weight.shape, module.weight, module.eps)

    def head(self, x_ND: Tensor, norm: NormModule, head: nn.Module, *sampling: Any, **options: Any) -> PartialArgmax:
        return head_choice(x_ND, norm, weight_of(head), *sampling, **options)

    def fuse_inputs(
        self, taps: Sequence[Tensor], whole: NormModule | None, each: Sequence[NormModule] | None, dtype: torch.dtype
    ) -> Tensor:
        return fuse_inputs(taps, whole, each)

    def draft_inputs(
        self, layer: DrafterLayerModule, embedding: nn.Module, tokens: Tensor | PartialArgmax, h_ND: Tensor, **drafting: Any
    ) -> DraftInputs:
        assert layer.hidden_norm is not None, "the first layer's"
        norms = (layer.input_layernorm, layer.hidden_norm, drafting.pop("output_norm", None))
        weight = embedding.weight
        assert isinstance(weight, Tensor)
        return draft_inputs(h_ND, tokens, weight, *norms, norm_before_residual=layer.norm_before_residual, **drafting)

    def _in_order(self, module: nn.Module, x: Tensor, surroundings: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Reorders inputs for a weight with act-order; the norm is applied before."""
        order = getattr(module, "order", None)
        if order is None:
            return x, surroundings
        norm = surroundings.get("norm")
        x = x if norm is None else self.norm(norm, x)
        return x[:, order], surroundings | {"norm": None}

    def _cache_of(self, module: AttentionModule) -> tuple[Tensor, Tensor]:
        return self.cache.keys[module.layer], self.cache.values[module.layer]

    def _store_rotated(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata) -> Tensor:
        """Rotates heads and stores keys and values in the cache; returns the heads [N, H + 2K, E]."""
        positions, slots = meta.tokens(len(qkv_NX), self.cache.page_size)
        rope_cache(qkv_NX, self.rope_tables[module.rope], positions, slots, *self._cache_of(module), head_norms(module))
        return qkv_NX.view(len(qkv_NX), -1, module.head_dim)

    def _attend_stored(self, module: AttentionModule, q_NHE: Tensor, meta: AttentionMetadata) -> Tensor:
        """Attention [N, H, E] over the cache, in which the new keys and values are stored already."""
        if meta.form is AttentionForm.PREFILL:
            keys, values = self._cache_of(module)
            where = (given(meta.page_table_BP), given(meta.offsets_C), given(meta.starts_B), self.cache.page_size)
            return prefill_attention(q_NHE, keys, values, *where, window=module.window)
        positions, lengths, bits, tail = meta.positions_N, meta.lengths_B, meta.tail_bits_BT, meta.tail
        if meta.form is AttentionForm.DECODE:
            positions, _ = meta.tokens(len(q_NHE), self.cache.page_size)
            lengths, bits, tail = meta.chain_as_tree(len(q_NHE))
        else:
            assert meta.form is AttentionForm.TREE, f"{meta.form} has no kernel here"
        batch = len(given(lengths))
        attended = decode_attention(
            q_NHE.unflatten(0, (batch, -1)),
            *self._cache_of(module),
            given(meta.page_table_BP),
            given(lengths),
            self.cache.page_size,
            tail_bits_BT=bits,
            tail=0 if bits is None else tail,
            positions_BT=given(positions).view(batch, -1),
            window=module.window,
        )
        return attended.flatten(0, 1)


def weight_of(module: nn.Module) -> Tensor | QuantizedWeight:
    weight = module.quantized if isinstance(module, QuantizedLinear) else module.weight
    assert not isinstance(weight, nn.Module)
    return weight


def bias_of(module: nn.Module) -> Tensor | None:
    bias = module.bias
    assert not isinstance(bias, nn.Module)
    return bias


def head_norms(module: FusedAttentionModule) -> Norms | None:
    if module.q_norm is None or module.k_norm is None:
        return None
    return module.q_norm.weight, module.k_norm.weight, module.q_norm.eps
