"""The decoder's pass with fused kernels over a paged cache: five launches a layer for few rows, no host decisions, fit for
a graph.

It runs the same modules' weights as `Decoder.forward` and must equal it; on CPU the kernels are their torch references.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor, nn

from fledge.config import RopeConfig
from fledge.kernels.decode_attention import decode_attention
from fledge.kernels.fused_linear import Norm, fused_linear
from fledge.kernels.head_choice import head_choice
from fledge.kernels.paged_attention import PagedKV
from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight
from fledge.kernels.quantized_linear import quantized_linear
from fledge.kernels.rope_attention import Norms, rope_attention
from fledge.kernels.rope_cache import rope_cache
from fledge.kernels.sample import Choice, Draws
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.layers import MLP, Attention, RMSNorm, Rotary

# The layers that let their attention start only after everything before them. One is enough: what attention reads early (the
# settled keys, where sequences stand) was complete before the first. Benchmarks change it.
HOLDING_LAYERS = 1

# Tokens a block of `BlockAttend`. Few blocks split their keys to fill the device: two numbers of splits, for two kernels.
BLOCK_TOKENS = 64
FEW_BLOCKS, FEW_BLOCKS_SPLITS = 16, 8

# (attention module, its fused projection [N, (H + 2K) * E]) -> [N, H * E]; rotates, stores keys and values, attends
FusedAttend = Callable[[Attention, Tensor], Tensor]


class FusedDecoder:
    def __init__(self, decoder: Decoder, cache: PagedKV, max_positions: int) -> None:
        self.decoder, self.cache = decoder, cache
        config = decoder.config
        self.rope_table = rope_table(config.head_dim, config.max_positions, config.rope, max_positions, cache.keys.device)
        self.norm = norm_of(decoder.norm)

    def __call__(self, x_ND: Tensor, attend: FusedAttend, taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """From embeddings to the states before the final norm, and the tapped residual streams."""
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(self.decoder.layers):
            if index in taps:
                captured[index] = x_ND
            holds = index < HOLDING_LAYERS
            qkv = self.linear(layer.self_attn.qkv_proj, x_ND, norm=norm_of(layer.input_layernorm), before_attention=holds)
            attended = attend(layer.self_attn, qkv)
            x_ND = after_attention(layer, x_ND, attended, in_place=index not in taps, linear=self.linear)
        captured[len(self.decoder.layers)] = x_ND
        return x_ND, [captured[index] for index in taps]

    @staticmethod
    def linear(module: nn.Module, x: Tensor, **surroundings) -> Tensor:
        return linear(module, x, **surroundings)

    def choose(self, x_ND: Tensor, draws: Draws | None = None, num_new: int = 1) -> Choice:
        """The token after each row, from the states before the final norm; see `kernels.sample.choose`."""
        return head_choice(x_ND, self.norm, weight_of(self.decoder.lm_head), draws, num_new)


def after_attention(
    layer: nn.Module, residual: Tensor, attended: Tensor, *, in_place: bool, linear: Callable[..., Tensor]
) -> Tensor:
    """The rest of a decoder or drafter layer: output projection and MLP, each added to the residual stream.

    `in_place`: nobody else reads the residual stream that came in.
    """
    residual = linear(layer.self_attn.o_proj, attended, residual_MO=residual, in_place=in_place)
    mlp: MLP = layer.mlp
    gated = linear(mlp.gate_up_proj, residual, norm=norm_of(layer.post_attention_layernorm), gated=True)
    return linear(mlp.down_proj, gated, residual_MO=residual, in_place=True)


def linear(module: nn.Linear | QuantizedLinear, x: Tensor, **surroundings) -> Tensor:
    run = quantized_linear if isinstance(module, QuantizedLinear) else fused_linear
    return run(x, weight_of(module), module.bias, **surroundings)


def weight_of(module: nn.Linear | QuantizedLinear) -> Tensor | QuantizedWeight:
    return module.quantized if isinstance(module, QuantizedLinear) else module.weight


def norm_of(module: RMSNorm) -> Norm:
    return Norm(module.weight, module.eps)


def rope_table(head_dim: int, trained: int, rope: RopeConfig, num_positions: int, device: torch.device) -> Tensor:
    rotary = Rotary(head_dim, trained, rope)
    rotary.reserve(num_positions)
    return rotary.table.to(device).contiguous()


def head_norms(attention: Attention) -> Norms | None:
    if attention.q_norm is None:
        return None
    return attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps


@dataclass
class ChainAttend:
    """A chain of new tokens of each of B sequences over the cache (see `kernels.rope_attention`)."""

    cache: PagedKV
    rope_table: Tensor
    page_table_BP: Tensor
    starts_B: Tensor
    counts_B: Tensor

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        return rope_attention(
            qkv,
            self.rope_table,
            self.starts_B,
            self.counts_B,
            self.cache.keys[attention.layer],
            self.cache.values[attention.layer],
            self.page_table_BP,
            self.cache.page_size,
            norms=head_norms(attention),
            window=attention.window,
        )


@dataclass
class PromptAttend:
    """Whole prompts lying one after the other, over themselves; their keys and values go into the cache."""

    cache: PagedKV
    rope_table: Tensor
    positions_N: Tensor
    slots_N: Tensor
    lengths: list[int]  # what lies behind them belongs to no prompt
    offsets: Tensor  # the running sum of the lengths from 0, int32, on the device
    longest: int  # no prompt is longer

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        heads = store_rotated(self, attention, qkv)
        sizes = [attention.num_heads, attention.num_kv_heads, attention.num_kv_heads]
        q, k, v = heads.split(sizes, 1)
        if not attends_by_device_lengths(q):
            lengths = [length for length in (*self.lengths, len(q) - sum(self.lengths)) if length]
            return causal_attend(lengths)(attention.layer, q, k, v, attention.window).flatten(-2)
        reach = -1 if attention.window is None else attention.window - 1
        bounds = (self.offsets, self.offsets, self.longest, self.longest)
        return _varlen_attn()(q, k, v, *bounds, window_size=(reach, 0)).flatten(-2)


def attends_by_device_lengths(q: Tensor) -> bool:
    """Whether attention over whole prompts reads their lengths from the device; else the host's decide what is launched."""
    return q.is_cuda and q.dtype in (torch.float16, torch.bfloat16) and _varlen_attn() is not None


@dataclass
class ChunkAttend:
    """A piece of one long prompt, over what the cache holds of it and over itself."""

    cache: PagedKV
    rope_table: Tensor
    positions_N: Tensor
    slots_N: Tensor
    page_table_P: Tensor
    length: Tensor  # int32 [1]: of the prompt, up to the piece's end

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        heads = store_rotated(self, attention, qkv)
        return decode_attention(
            heads[None, :, : attention.num_heads],
            self.cache.keys[attention.layer],
            self.cache.values[attention.layer],
            self.page_table_P[None],
            self.length,
            self.cache.page_size,
            positions_BT=self.positions_N[None],
            window=attention.window,
        )[0].flatten(-2)


@dataclass
class BlockAttend:
    """New tokens of several sequences over the cache, in blocks of BLOCK_TOKENS of one sequence; short ones start late."""

    cache: PagedKV
    rope_table: Tensor
    positions_N: Tensor
    slots_N: Tensor
    places_N: Tensor  # where a token lies among the places of all blocks
    page_tables_BP: Tensor
    lengths_B: Tensor  # int32: of the text up to the block's end; 0: an empty block

    def __call__(self, attention: Attention, qkv: Tensor) -> Tensor:
        heads = store_rotated(self, attention, qkv)[:, : attention.num_heads]
        num_blocks = len(self.lengths_B)
        q = heads.new_zeros(num_blocks * BLOCK_TOKENS, *heads.shape[1:]).index_copy_(0, self.places_N, heads)
        positions = None
        if attention.window is not None:
            positions = self.positions_N.new_zeros(len(q)).index_copy_(0, self.places_N, self.positions_N)
        attended = decode_attention(
            q.view(num_blocks, BLOCK_TOKENS, *q.shape[1:]),
            self.cache.keys[attention.layer],
            self.cache.values[attention.layer],
            self.page_tables_BP,
            self.lengths_B,
            self.cache.page_size,
            positions_BT=None if positions is None else positions.view(num_blocks, -1),
            window=attention.window,
            splits=FEW_BLOCKS_SPLITS if num_blocks <= FEW_BLOCKS else 1,
        )
        return attended.view(len(q), -1)[self.places_N]


def store_rotated(attend: PromptAttend | ChunkAttend | BlockAttend, attention: Attention, qkv: Tensor) -> Tensor:
    """The rotated heads [N, H + 2K, E]; keys and values are in the cache."""
    keys, values = attend.cache.keys[attention.layer], attend.cache.values[attention.layer]
    rope_cache(qkv, attend.rope_table, attend.positions_N, attend.slots_N, keys, values, head_norms(attention))
    return qkv.view(qkv.shape[0], -1, attention.head_dim)


@cache
def _varlen_attn() -> Callable[..., Tensor] | None:
    """None where torch has none. Imported on first use: it brings torch's compiler, 2 s that a CPU need not wait for."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    # Newer releases ask for the word before heads may be grouped; older ones group without it.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn
