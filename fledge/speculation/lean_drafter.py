"""The drafter's pass on CPU with packed weights: the same network, a layer a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fledge.kernels import native
from fledge.kernels.paged_attention import PagedAttend, PagedKV
from fledge.models.drafter import DrafterOutput, EagleDrafter
from fledge.speculation.rows import copy


class LeanDrafter:
    def __init__(self, network: EagleDrafter, cache: PagedKV) -> None:
        self.network = network
        self.layers = [
            native.NativeLayer(
                layer.self_attn,
                layer.mlp,
                None if layer.first else layer.input_layernorm,
                layer.post_attention_layernorm,
                keys,
                values,
            )
            for layer, keys, values in zip(network.layers, cache.keys, cache.values, strict=True)
        ]

    @staticmethod
    def serves(network: EagleDrafter, cache: PagedKV) -> bool:
        return all(native.NativeLayer.serves(layer.self_attn, layer.mlp, cache.keys[0]) for layer in network.layers)

    def fuse(self, taps: Sequence[Tensor]) -> Tensor:
        network = self.network
        if network.input_norm is not None or network.fc_norm is None:
            return network.fuse(taps)
        size = network.config.target_hidden_size
        fused = taps[0].new_empty(len(taps[0]), size * len(taps))
        for index, (norm, tap) in enumerate(zip(network.fc_norm, taps, strict=True)):
            native.rms_norm(tap.contiguous(), norm.weight, norm.eps, fused[:, index * size : (index + 1) * size])
        return network.fc(fused)

    def __call__(
        self, tokens_N: Tensor, h_ND: Tensor, positions_N: Tensor, attend: PagedAttend, highest_position: int
    ) -> DrafterOutput:
        network = self.network
        first, size = network.layers[0], network.config.hidden_size
        embedded = network.embed_tokens(tokens_N).to(h_ND.dtype)
        pair = h_ND.new_empty(len(h_ND), 2 * size)
        native.rms_norm(embedded, first.input_layernorm.weight, first.input_layernorm.eps, pair[:, :size])
        native.rms_norm(h_ND.contiguous(), first.hidden_norm.weight, first.hidden_norm.eps, pair[:, size:])
        x = copy(pair[:, size:] if first.norm_before_residual else h_ND)
        batch = native.NativeBatch(attend, *network.rotary(positions_N, highest_position))
        self.layers[0](batch, x, pair)
        for layer in self.layers[1:]:
            layer(batch, x)
        post = native.rms_norm(x, network.norm.weight, network.norm.eps)
        return DrafterOutput(post, post if network.config.norm_output else x)


def lean(network: EagleDrafter, cache: PagedKV) -> LeanDrafter | None:
    return LeanDrafter(network, cache) if LeanDrafter.serves(network, cache) else None
