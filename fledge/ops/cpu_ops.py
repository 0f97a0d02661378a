"""The CPU's backend: whole layers in C (`kernels.native`), one call each, with packed weights between fp32 activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fledge.kernels import native
from fledge.kernels.attention.metadata import AttentionMetadata, given
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.linear.fixed_order import rows_apart
from fledge.kernels.row_copy import copy
from fledge.kernels.sample import Choice
from fledge.kernels.step_inputs import DraftInputs
from fledge.ops.base import DrafterLayerModule, ExpertsModule, LayerModule, NetworkModule, NormModule
from fledge.ops.torch_ops import TorchOps


class CpuOps(TorchOps):
    """Of one network. A layer changes the residual stream in place; a row never depends on the others."""

    def __init__(self, network: NetworkModule, cache: PagedKV, *, deterministic: bool = False) -> None:
        """`deterministic`: linears outside of layers that are not packed (a head with weights past fp16) go row by row."""
        super().__init__(cache, *network.rotaries)
        self.deterministic = deterministic
        self.layers = [
            native.NativeLayer(layer, keys, values)
            for layer, keys, values in zip(network.layers, cache.keys, cache.values, strict=True)
        ]
        with_experts = [cast("ExpertsModule", layer.mlp) for layer in network.layers if hasattr(layer.mlp, "experts")]
        self.native_experts = {id(module): native.NativeExperts(module.experts) for module in with_experts}

    @staticmethod
    def serves(network: NetworkModule, cache: PagedKV) -> bool:
        return all(native.NativeLayer.serves(layer, cache.keys[0]) for layer in network.layers)

    def layer(
        self, layer: LayerModule, x_ND: Tensor, meta: AttentionMetadata | None, attention_input: Tensor | None = None, **_: bool
    ) -> Tensor:
        assert meta is not None
        native_layer = self.layers[layer.index]
        batch = meta.kept.get((self, native_layer.rope))  # `meta.once` costs a microsecond more, in every layer
        if batch is None:
            batch = native.NativeBatch(given(meta.host), *self.angles(meta, len(x_ND), native_layer.rope))
            meta.kept[self, native_layer.rope] = batch
        native_layer(batch, x_ND, attention_input)
        if native_layer.has_experts:
            return layer.mlp(x_ND, self, layer.post_attention_layernorm)
        return x_ND

    def experts(
        self, module: ExpertsModule, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
    ) -> Tensor:
        self.native_experts[id(module)](x_ND, weights_NK, experts_NK, residual_ND)
        return residual_ND

    def keep(self, x_ND: Tensor) -> Tensor:
        return copy(x_ND)

    def linear(self, module: nn.Module, x: Tensor, **surroundings: Any) -> Tensor:
        if self.deterministic and getattr(module, "native", None) is None:
            return rows_apart(module, x, **surroundings)
        return super().linear(module, x, **surroundings)

    def norm(self, module: NormModule, x_ND: Tensor) -> Tensor:
        return native.rms_norm(x_ND, module.weight, module.eps)

    def fuse_inputs(
        self, taps: Sequence[Tensor], whole: NormModule | None, each: Sequence[NormModule] | None, dtype: torch.dtype
    ) -> Tensor:
        if whole is not None or each is None:
            return super().fuse_inputs(taps, whole, each, dtype)
        size = taps[0].shape[1]
        fused = taps[0].new_empty(len(taps[0]), size * len(taps))
        for index, (norm, tap) in enumerate(zip(each, taps, strict=True)):
            native.rms_norm(tap.contiguous(), norm.weight, norm.eps, fused[:, index * size : (index + 1) * size])
        return fused

    def draft_inputs(
        self, layer: DrafterLayerModule, embedding: nn.Module, tokens: Tensor | Choice, h_ND: Tensor, **drafting: Any
    ) -> DraftInputs:
        assert not drafting, "captured cycles alone draft from choices"
        assert layer.hidden_norm is not None, "the first layer's"
        embedded, size = embedding(tokens).to(h_ND.dtype), h_ND.shape[1]
        pair = h_ND.new_empty(len(h_ND), 2 * size)
        native.rms_norm(embedded, layer.input_layernorm.weight, layer.input_layernorm.eps, pair[:, :size])
        native.rms_norm(h_ND.contiguous(), layer.hidden_norm.weight, layer.hidden_norm.eps, pair[:, size:])
        # A copy: the layers change it in place.
        return DraftInputs(pair, copy(pair[:, size:] if layer.norm_before_residual else h_ND), None, None)
