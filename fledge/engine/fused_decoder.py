"""The decoder's pass with fused kernels over a paged cache: nine launches a layer, no host decisions, fit for a graph.

It runs the same modules' weights as `Decoder.forward` and must equal it; on CPU the kernels are their torch references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.kernels.decode_attention import decode_attention
from fledge.kernels.paged_attention import PagedKV
from fledge.kernels.rms_norm import add_rms_norm
from fledge.kernels.rope_cache import rope_cache
from fledge.kernels.swiglu import swiglu
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.layers import Attention, Rotary

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

# (attention module, rotated heads [N, H + 2K, E]) -> [N, H, E]; the new keys and values are in the cache already
FusedAttend = Callable[[Attention, Tensor], Tensor]


class FusedDecoder:
    def __init__(self, decoder: Decoder, cache: PagedKV, max_positions: int) -> None:
        self.decoder, self.cache = decoder, cache
        config = decoder.config
        # Own table, in fp32: casting a network to bf16 also casts its buffers, and angles need the precision.
        rotary = Rotary(config.head_dim, config.max_positions, config.rope)
        rotary.reserve(max_positions)
        self.rope_table = rotary.table.to(cache.keys.device).contiguous()

    def __call__(
        self, tokens_N: Tensor, positions_N: Tensor, slots_N: Tensor, attend: FusedAttend, taps: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """The hidden states that the head reads, and the tapped residual streams. Slot -1: the token is not stored."""
        captured: dict[int, Tensor] = {}
        residual, delta = self.decoder.embed(tokens_N), None
        for index, layer in enumerate(self.decoder.layers):
            norm, attention = layer.input_layernorm, layer.self_attn
            normed = add_rms_norm(residual, delta, norm.weight, norm.eps)
            if index in taps:
                captured[index] = residual.clone()
            qkv = attention.qkv_proj(normed)
            norms = None
            if attention.q_norm is not None:
                norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps)
            keys, values = self.cache.keys[index], self.cache.values[index]
            rope_cache(qkv, self.rope_table, positions_N, slots_N, keys, values, norms)
            attended = attend(attention, qkv.view(qkv.shape[0], -1, attention.head_dim))
            norm = layer.post_attention_layernorm
            normed = add_rms_norm(residual, attention.o_proj(attended.flatten(-2)), norm.weight, norm.eps)
            delta = layer.mlp.down_proj(swiglu(layer.mlp.gate_up_proj(normed)))
        norm = self.decoder.norm
        hidden = add_rms_norm(residual, delta, norm.weight, norm.eps)
        if len(self.decoder.layers) in taps:
            captured[len(self.decoder.layers)] = residual
        return hidden, [captured[index] for index in taps]


@dataclass
class CacheAttend:
    """T new tokens of each of B sequences over the cache (see `kernels.decode_attention`)."""

    cache: PagedKV
    page_table_BP: Tensor
    kv_lens_B: Tensor
    positions_BT: Tensor
    tail_bits_BT: Tensor | None = None
    tail: int = 0

    def __call__(self, attention: Attention, heads: Tensor) -> Tensor:
        q = heads[:, : attention.num_heads].unflatten(0, self.positions_BT.shape)
        return decode_attention(
            q,
            self.cache.keys[attention.layer],
            self.cache.values[attention.layer],
            self.page_table_BP,
            self.kv_lens_B,
            self.cache.page_size,
            tail_bits_BT=self.tail_bits_BT,
            tail=self.tail,
            positions_BT=self.positions_BT,
            window=attention.window,
        ).flatten(0, 1)


class PromptAttend:
    """Whole prompts lying one after the other, over themselves."""

    def __init__(self, lengths: Sequence[int], offsets: Tensor) -> None:
        """`offsets`: the running sum of the lengths from 0, int32, on the device."""
        self.lengths, self.offsets, self.longest = list(lengths), offsets, max(lengths)

    def __call__(self, attention: Attention, heads: Tensor) -> Tensor:
        sizes = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        q, k, v = heads.split(sizes, 1)
        if not (q.is_cuda and varlen_attn is not None and q.dtype in (torch.float16, torch.bfloat16)):
            return causal_attend(self.lengths)(attention.layer, q, k, v, attention.window)
        reach = -1 if attention.window is None else attention.window - 1
        return varlen_attn(q, k, v, self.offsets, self.offsets, self.longest, self.longest, window_size=(reach, 0), **_GROUPED)


# Newer releases ask for the word before heads may be grouped; older ones group without it.
_GROUPED = {"enable_gqa": True} if varlen_attn is not None and "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
