"""The target's pass on CPU with packed weights: the same network, a layer a call."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fledge.kernels import native
from fledge.kernels.paged_attention import PagedAttend, PagedKV
from fledge.models.decoder import Decoder, DecoderOutput
from fledge.speculation.rows import copy


class LeanDecoder:
    def __init__(self, decoder: Decoder, cache: PagedKV) -> None:
        self.decoder = decoder
        self.layers = [
            native.NativeLayer(layer.self_attn, layer.mlp, layer.input_layernorm, layer.post_attention_layernorm, keys, values)
            for layer, keys, values in zip(decoder.layers, cache.keys, cache.values, strict=True)
        ]

    @staticmethod
    def serves(decoder: Decoder, cache: PagedKV) -> bool:
        return all(native.NativeLayer.serves(layer.self_attn, layer.mlp, cache.keys[0]) for layer in decoder.layers)

    def __call__(
        self, tokens_N: Tensor, positions_N: Tensor, attend: PagedAttend, taps: Sequence[int], highest_position: int
    ) -> DecoderOutput:
        decoder, captured = self.decoder, {}
        x = decoder.embed(tokens_N).contiguous()
        batch = native.NativeBatch(attend, *decoder.rotary(positions_N, highest_position))
        for index, layer in enumerate(self.layers):
            if index in taps:
                captured[index] = copy(x)
            layer(batch, x)
        if len(self.layers) in taps:
            captured[len(self.layers)] = x
        return DecoderOutput(native.rms_norm(x, decoder.norm.weight, decoder.norm.eps), [captured[i] for i in taps])


def lean(decoder: Decoder, cache: PagedKV) -> LeanDecoder | None:
    return LeanDecoder(decoder, cache) if LeanDecoder.serves(decoder, cache) else None
