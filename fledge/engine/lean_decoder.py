"""The target's decode pass on CPU with packed weights: the same network, with native steps between the linears."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels import native
from fledge.kernels.packed_linear import PackedLinear
from fledge.kernels.paged_attention import PagedAttend
from fledge.models.decoder import Decoder, DecoderOutput

# Longer stretches of a prompt are better off with torch's threaded attention.
MAX_NEW_TOKENS = 16


class LeanDecoder:
    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Packed linears throughout, no norms on queries and keys, and a compiler on the machine."""
        layer = decoder.layers[0]
        linears = (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
        packed = all(isinstance(linear, PackedLinear) for linear in linears)
        return packed and not decoder.config.qk_norm and native.library() is not None

    def fits(self, attend: PagedAttend) -> bool:
        """Short causal passes over consecutive slots; trees and long prompts go the general way."""
        return all(isinstance(region, slice) for region in attend.regions) and all(
            layout.tail_mask is None and layout.query_len <= MAX_NEW_TOKENS for layout in attend.layouts
        )

    def __call__(
        self, tokens_N: Tensor, positions_N: Tensor, attend: PagedAttend, taps: Sequence[int], highest_position: int
    ) -> DecoderOutput:
        decoder, config = self.decoder, self.decoder.config
        eps, captured = config.rms_norm_eps, {}
        x = decoder.embed(tokens_N).clone()
        cos, sin = (part.reshape(len(tokens_N), -1) for part in decoder.rotary(positions_N, highest_position))
        delta = None
        attended = x.new_empty(len(tokens_N), config.num_heads * config.head_dim)
        for index, layer in enumerate(decoder.layers):
            if index in taps:
                captured[index] = x.clone() if delta is None else x + delta
            attention = layer.self_attn
            qkv = attention.qkv_proj(native.add_rms_norm(x, delta, layer.input_layernorm.weight, eps))
            keys, values = attend.cache.keys[index], attend.cache.values[index]
            row = 0
            for layout, region in zip(attend.layouts, attend.regions, strict=True):
                part = slice(row, row + layout.query_len)
                row += layout.query_len
                native.attend(
                    qkv[part], cos[part], sin[part], keys, values,
                    region.start, layout.kv_len, config.num_heads, attention.window, attended[part],
                )  # fmt: skip
            normed = native.add_rms_norm(x, attention.o_proj(attended), layer.post_attention_layernorm.weight, eps)
            delta = layer.mlp.down_proj(native.swiglu(layer.mlp.gate_up_proj(normed)))
        if len(decoder.layers) in taps:
            captured[len(decoder.layers)] = x + delta
        return DecoderOutput(native.add_rms_norm(x, delta, decoder.norm.weight, eps), [captured[i] for i in taps])


def lean(decoder: Decoder, device: torch.device) -> LeanDecoder | None:
    return LeanDecoder(decoder) if device.type == "cpu" and LeanDecoder.serves(decoder) else None
