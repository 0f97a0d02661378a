"""The CPU's backend: all layers of a pass in one call of C (`kernels.native_layers`), fp32 between packed linears."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from fledge.errors import UserError
from fledge.kernels import native
from fledge.kernels.attention.metadata import AttentionMetadata, given
from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.native_layers import NativeBatch, NativeDrafter, NativeExperts, NativeLayer, NativeLayers, NativeTarget
from fledge.ops.base import (
    DrafterModule,
    ExpertsModule,
    LayerModule,
    NetworkModule,
    NormModule,
    Ops,
    TargetModule,
    device_tables,
)
from fledge.ops.cuda_ops import CudaOps
from fledge.ops.torch_ops import TorchOps


class CpuOps(TorchOps):
    """The CPU backend of one network. A layer changes the residual stream in place; a row never depends on other rows."""

    def __init__(self, network: NetworkModule, cache: PagedKV) -> None:
        super().__init__(cache, *network.rotaries)
        linears = [getattr(module, "native", None) for module in cast("nn.Module", network).modules()]
        native.stream_past_caches([linear for linear in linears if linear is not None])
        single = [NativeLayer(*parts) for parts in zip(network.layers, cache.keys, cache.values, strict=True)]
        self.native_layers = NativeLayers(single)
        with_experts = [cast("ExpertsModule", layer.mlp) for layer in network.layers if hasattr(layer.mlp, "experts")]
        self.native_experts = {id(module): NativeExperts(module.experts) for module in with_experts}
        # With experts, each layer is a call of its own, because Python routes tokens to experts in between.
        self.single_layers = [NativeLayers([layer]) for layer in single] if with_experts else []
        self.native_target: NativeTarget | None = None
        self.native_drafter: NativeDrafter | None = None

    @staticmethod
    def serves(network: NetworkModule, cache: PagedKV) -> bool:
        return all(NativeLayer.serves(layer, cache.keys[0]) for layer in network.layers)

    def batch(self, meta: AttentionMetadata | None, num_more: int = 0) -> NativeBatch:
        """The pass's sequences in C's layout. `num_more`: how many tokens C appends to each sequence by itself; their highest
        position is in `meta`."""
        meta = given(meta)
        positions, highest = given(meta.positions_N), meta.highest_position
        num_positions = 1 + (int(positions.max()) if highest is None else highest)
        for rotary in self.rotaries:
            rotary.reserve(num_positions)
        tables = [(rotary.table[0], rotary.table[1]) for rotary in self.rotaries]
        return NativeBatch(given(meta.host), tables, positions, num_more)

    def layers(
        self,
        layers: Sequence[LayerModule],
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        taps: Sequence[int] = (),
        attention_input: Tensor | None = None,
        **hints: int,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        if self.single_layers:
            return super().layers(layers, x_ND, meta, taps, attention_input, **hints)
        return x_ND, self.native_layers(self.batch(meta), x_ND, attention_input, taps)

    def layer(
        self,
        layer: LayerModule,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        attention_input: Tensor | None = None,
        *,
        in_place: bool = False,
        pdl_barrier: bool = False,
    ) -> Tensor:
        """Runs a layer of a network with experts."""
        meta = given(meta)
        x_ND = x_ND if in_place else x_ND.clone()
        self.single_layers[layer.index](meta.once(self, lambda: self.batch(meta)), x_ND, attention_input)
        return layer.mlp(x_ND, self, layer.post_attention_layernorm) if id(layer.mlp) in self.native_experts else x_ND

    def experts(
        self, module: ExpertsModule, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
    ) -> Tensor:
        self.native_experts[id(module)](x_ND, weights_NK, experts_NK, residual_ND)
        return residual_ND

    def target_pass(
        self,
        network: TargetModule,
        tokens_N: Tensor,
        meta: AttentionMetadata | None,
        taps: Sequence[int],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """Runs a target, without experts in one call: separate calls for embedding, norm and head added 0.1-0.2 ms to 4-6."""
        if self.single_layers or not NativeTarget.serves(network):
            return super().target_pass(network, tokens_N, meta, taps, wanted)
        if self.native_target is None:
            self.native_target = NativeTarget(network, self.native_layers)
        return self.native_target(self.batch(meta), tokens_N, taps, wanted)

    def drafter(self, network: DrafterModule) -> NativeDrafter:
        """The drafter in C, made on first use: the target's embedding and head are lent to a drafter only after packing."""
        if self.native_drafter is None:
            self.native_drafter = NativeDrafter(network, self.native_layers)
        return self.native_drafter

    def draft_step(
        self, network: DrafterModule, tokens_N: Tensor, h_ND: Tensor, meta: AttentionMetadata | None
    ) -> tuple[Tensor, Tensor]:
        return self.drafter(network).step(self.batch(meta), tokens_N, h_ND)

    def linear(self, module: nn.Module, x: Tensor, **surroundings: Any) -> Tensor:
        if getattr(module, "native", None) is None:  # a head beyond fp16's range: torch's order of sums depends on the batch
            return torch.cat([self._row(module, x, i, **surroundings) for i in range(len(x))]) if len(x) else x
        return super().linear(module, x, **surroundings)

    def _row(self, module: nn.Module, x: Tensor, index: int, *, residual: Tensor | None = None, **surroundings: Any) -> Tensor:
        # A copy, because torch's order of sums may depend on the row's address too.
        row = residual if residual is None else residual[index : index + 1]
        return super().linear(module, x[index : index + 1].clone(), residual=row, **surroundings)

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


def eager_ops(network: NetworkModule, cache: PagedKV, *, deterministic: bool = False, num_positions: int = 0) -> Ops:
    """The backend for a network in the eager executor.

    `deterministic`: a row's result must not depend on other rows even without a C compiler, which costs speed then.

    `num_positions`: above every token's position; used only if `deterministic`.
    """
    if CpuOps.serves(network, cache):
        return CpuOps(network, cache)
    if cache.keys.dtype == torch.uint8 and deterministic:
        raise UserError("--kv-cache-dtype q8_0 with --deterministic needs a model that the C kernels support; use float16")
    if deterministic:
        return CudaOps(cache, *device_tables(network, num_positions, cache.keys.device))
    return TorchOps(cache, *network.rotaries)
