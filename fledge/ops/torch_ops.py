"""The reference backend: plain PyTorch, differentiable, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fledge.kernels.attention.metadata import AttentionMetadata, given
from fledge.kernels.attention.paged import Attend, PagedKV, paged_attention
from fledge.kernels.attention.rope_cache import rotate
from fledge.kernels.draft_inputs import DraftInputs
from fledge.kernels.gate import apply_gate_reference
from fledge.kernels.sample import PartialArgmax, choose
from fledge.ops.base import AttentionModule, DrafterLayerModule, FusedAttentionModule, NormModule, Ops, RotaryModule


class TorchOps(Ops):
    """The reference backend over a paged cache; the host must know the sequences' layout (`AttentionMetadata.from_layouts`)."""

    def __init__(self, cache: PagedKV, *rotaries: RotaryModule) -> None:
        self.cache, self.rotaries = cache, rotaries

    def linear(
        self,
        module: nn.Module,
        x: Tensor,
        *,
        norm: NormModule | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        **hints: bool,
    ) -> Tensor:
        out = module(x if norm is None else norm(x))
        if gated:
            out = apply_gate_reference(out)
        return out if residual is None else residual + out

    def attention(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        heads = qkv_NX.view(*qkv_NX.shape[:-1], -1, module.head_dim)
        qk, v = heads.split((module.num_heads + module.num_kv_heads, module.num_kv_heads), -2)
        if module.q_norm is not None and module.k_norm is not None:
            q, k = qk.split((module.num_heads, module.num_kv_heads), -2)
            qk = torch.cat([module.q_norm(q), module.k_norm(k)], -2)
        qk = rotate(qk, *self.angles(meta, len(qkv_NX), module.rope))
        q, k = qk.split((module.num_heads, module.num_kv_heads), -2)
        return self.attend(module, q, k, v, meta).flatten(-2)

    def attend(
        self, module: AttentionModule, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, meta: AttentionMetadata | None
    ) -> Tensor:
        assert meta is not None
        keys, values = self.cache.keys[module.layer], self.cache.values[module.layer]
        return paged_attention(q_NHE, k_NKE, v_NKE, keys, values, given(meta.host), module.window)

    def angles(self, meta: AttentionMetadata | None, num_tokens: int, rope: int = 0) -> tuple[Tensor, Tensor]:
        assert meta is not None
        positions, highest = given(meta.positions_N), meta.highest_position
        return meta.once((self, "angles", rope), lambda: self.rotaries[rope](positions, highest))

    def norm(self, module: NormModule, x_ND: Tensor) -> Tensor:
        return module(x_ND)

    def head(self, x_ND: Tensor, norm: NormModule, head: nn.Module, *sampling: Any, **options: Any) -> PartialArgmax:
        return choose(self.linear(head, self.norm(norm, x_ND)), *sampling, **options)

    def fuse_inputs(
        self, taps: Sequence[Tensor], whole: NormModule | None, each: Sequence[NormModule] | None, dtype: torch.dtype
    ) -> Tensor:
        fused = torch.cat(tuple(taps), -1).to(dtype)
        if whole is not None:
            fused = whole(fused)
        if each is None:
            return fused
        return torch.cat([norm(part) for norm, part in zip(each, fused.chunk(len(each), -1), strict=True)], -1)

    def draft_inputs(
        self, layer: DrafterLayerModule, embedding: nn.Module, tokens: Tensor | PartialArgmax, h_ND: Tensor, **drafting: Any
    ) -> DraftInputs:
        assert not drafting, "captured cycles alone draft from choices"
        assert layer.hidden_norm is not None, "the first layer's"
        embedded, normed = embedding(tokens).to(h_ND.dtype), layer.hidden_norm(h_ND)
        x = torch.cat([layer.input_layernorm(embedded), normed], -1)
        return DraftInputs(x, normed if layer.norm_before_residual else h_ND, None, None)


class AttendOps(TorchOps):
    """The reference backend with the caller's own attention function: for packed documents in training and rollouts in
    studies. It takes no metadata."""

    def __init__(self, attend: Attend, *angles: tuple[Tensor, Tensor]) -> None:
        """`angles`: cosines and sines of each of the network's rotary embeddings."""
        self.function, self.cos_sin = attend, angles

    def attend(
        self, module: AttentionModule, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, meta: AttentionMetadata | None
    ) -> Tensor:
        return self.function(module.layer, q_NHE, k_NKE, v_NKE, module.window)

    def angles(self, meta: AttentionMetadata | None, num_tokens: int, rope: int = 0) -> tuple[Tensor, Tensor]:
        return self.cos_sin[rope]


def _no_attention(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
    raise AssertionError("a backend without a cache")


# For operations without attention.
PLAIN = AttendOps(_no_attention, (torch.empty(0), torch.empty(0)))
