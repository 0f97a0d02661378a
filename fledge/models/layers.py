"""Norm, rotary embedding, attention projections, MLP and the layer made of them, shared by targets and drafters.

Shapes: N tokens (of all sequences, flat), D hidden size, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.config import RopeConfig
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import Attend as Attend
from fledge.kernels.gate import apply_gate
from fledge.ops.base import Ops

if TYPE_CHECKING:
    from fledge.models.mla import LatentAttention
    from fledge.models.moe import SparseMLP

Module = TypeVar("Module", bound=nn.Module)


def module_list(modules: Iterable[Module]) -> Sequence[Module]:
    """An `nn.ModuleList` that is typed as a sequence of its members' type."""
    return cast("Sequence[Module]", nn.ModuleList(modules))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the norm's output, that is of the network's activations."""
        return self.weight.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ExactNorm(RMSNorm):
    """A norm whose weight stays in fp32 whatever the network's dtype: Gemma stores weights minus 1, and adding 1 in bf16 would
    round them."""

    like: Tensor

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.register_buffer("like", torch.empty(0), persistent=False)

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps).to(x.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ExactNorm:
        exact = self.weight.data
        super()._apply(fn, recurse)
        if not exact.is_meta:
            self.weight.data = exact.to(self.weight.device)
        return self


class Rotary(nn.Module):
    """Cosines and sines by position, half-split layout (the first half of a head pairs with the second)."""

    inverse_frequencies: Tensor
    table: Tensor

    def __init__(self, head_dim: int, max_positions: int, rope: RopeConfig, rotated: int | None = None) -> None:
        """`rotated`: how many numbers of a head are rotated; the rest, at the end of each half, get angles of zero."""
        super().__init__()
        self.head_dim, self.max_positions, self.rope, self.rotated = head_dim, max_positions, rope, rotated or head_dim
        inverse_frequencies, self.attention_factor = _inverse_frequencies(self.rotated, max_positions, rope)
        self.register_buffer("inverse_frequencies", inverse_frequencies, persistent=False)
        self.register_buffer("table", torch.empty(2, 0, head_dim), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:
        """Moves with the network to its device but keeps its dtype: in bf16, angles at high positions would be off by turns."""
        exact = {name: buffer for name, buffer in self.named_buffers() if not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            self._buffers[name] = buffer.to(self.get_buffer(name).device)
        return self

    def reserve(self, num_positions: int) -> None:
        """Grows the table; call before capturing a graph, which must not allocate."""
        if num_positions <= self.table.shape[1]:
            return
        num_positions = max(num_positions, min(2 * self.table.shape[1], self.max_positions), 512)
        inverse = self.inverse_frequencies
        angles = torch.arange(num_positions, device=inverse.device, dtype=torch.float32)[:, None] * inverse.float()
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        rest = (self.head_dim - self.rotated) // 2
        cos, sin = F.pad(cos, (0, rest), value=1.0), F.pad(sin, (0, rest))
        # The sine includes the rotation's sign: see `rope_cache.rotate`.
        self.table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)])

    def device_table(self, num_positions: int, device: torch.device) -> Tensor:
        """A separate table for kernels on the device, with at least `num_positions` positions."""
        own = Rotary(self.head_dim, self.max_positions, self.rope, self.rotated)
        own.reserve(num_positions)
        return own.table.to(device).contiguous()

    def forward(self, positions_N: Tensor, highest: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines of positions. `highest`: the highest position, if known, which avoids a synchronisation."""
        if positions_N.numel():
            self.reserve((int(positions_N.max()) if highest is None else highest) + 1)
        cos, sin = self.table[:, positions_N].unsqueeze(-2).unbind(0)
        return cos, sin


def _inverse_frequencies(head_dim: int, max_positions: int, rope: RopeConfig) -> tuple[Tensor, float]:
    if rope.kind == "none":  # angles of zero leave heads unchanged
        return torch.zeros(head_dim // 2), 1.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    inverse = 1.0 / rope.theta**exponents
    original = rope.original_max_positions or max_positions
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "dynamic" and max_positions > original:
        # NTK scaling by the configured length, not by the current one, because the cache holds rotated keys.
        stretch = rope.factor * max_positions / original - (rope.factor - 1)
        inverse = 1.0 / (rope.theta * stretch ** (head_dim / (head_dim - 2))) ** exponents
    elif rope.kind == "llama3":
        wavelengths = 2 * math.pi / inverse
        smooth = (original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        inverse = (1 - smooth) * inverse / rope.factor + smooth * inverse
    elif rope.kind == "longrope":
        factors = rope.long_factor if max_positions > original else rope.short_factor
        return (inverse / torch.tensor(factors, dtype=torch.float64)).float(), rope.attention_factor or 1.0
    elif rope.kind == "yarn":
        return _yarn(head_dim, rope, inverse, original)
    return inverse.float(), 1.0


def yarn_magnitude(scale: float, mscale: float = 1.0) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0


def _yarn(head_dim: int, rope: RopeConfig, inverse: Tensor, original: int) -> tuple[Tensor, float]:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 1e-3)
    stretched = ramp.clamp(0, 1)
    inverse = inverse / rope.factor * stretched + inverse * (1 - stretched)
    factor = rope.attention_factor
    if factor is None:
        if rope.mscale and rope.mscale_all_dim:
            factor = yarn_magnitude(rope.factor, rope.mscale) / yarn_magnitude(rope.factor, rope.mscale_all_dim)
        else:
            factor = yarn_magnitude(rope.factor)
    return inverse.float(), float(factor)


class Attention(nn.Module):
    """Grouped-query attention. `input_size` differs from the output size in a drafter's first layer only."""

    def __init__(
        self,
        layer: int,
        input_size: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        output_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        rope: int = 0,
        norm: type[RMSNorm] = RMSNorm,
    ) -> None:
        """`rope`: index of the network's rotary embedding."""
        super().__init__()
        self.layer, self.window, self.rope = layer, window, rope
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.qkv_proj = nn.Linear(input_size, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=output_bias)
        self.q_norm = norm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None
        self.k_norm = norm(head_dim, qk_norm_eps) if qk_norm_eps is not None else None

    def forward(
        self,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        ops: Ops,
        norm: RMSNorm | None = None,
        *,
        pdl_barrier: bool = False,
    ) -> Tensor:
        """Returns the input of `o_proj`, [N, H * E]."""
        return ops.attention(self, ops.linear(self.qkv_proj, x_ND, norm=norm, pdl_barrier=pdl_barrier), meta)


class MLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: str = "silu") -> None:
        super().__init__()
        self.activation = activation
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x_ND: Tensor, ops: Ops, norm: RMSNorm, output_norm: RMSNorm | None = None) -> Tensor:
        """Returns residual stream + [output_norm] MLP(norm(residual stream))."""
        gated = self.gated(x_ND, ops, norm)
        if output_norm is None:
            return ops.linear(self.down_proj, gated, residual=x_ND)
        return ops.add_norm(output_norm, ops.linear(self.down_proj, gated), x_ND)

    def gated(self, x_ND: Tensor, ops: Ops, norm: RMSNorm | None = None) -> Tensor:
        if self.activation == "silu":
            return ops.linear(self.gate_up_proj, x_ND, norm=norm, gated=True)
        return apply_gate(ops.linear(self.gate_up_proj, x_ND, norm=norm), gelu=True)


class Layer(nn.Module):
    """Attention and MLP, each added to the residual stream: a layer of a target or of a drafter.

    Subclasses create its parts.
    """

    input_layernorm: RMSNorm
    self_attn: Attention | LatentAttention
    attention_output_norm: RMSNorm | None  # applied to attention's output
    post_attention_layernorm: RMSNorm  # applied to the MLP's input
    mlp: MLP | SparseMLP
    mlp_output_norm: RMSNorm | None  # applied to the MLP's output

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.attention_output_norm = self.mlp_output_norm = None

    def forward(
        self,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        ops: Ops,
        attention_input: Tensor | None = None,
        *,
        pdl_barrier: bool = False,
    ) -> Tensor:
        """Runs the layer; called by `Ops.layer`.

        `attention_input`: attention's input instead of the normed residual stream (in a drafter's first layer).
        `pdl_barrier`: see `Ops.linear`.
        """
        inputs = (x_ND, meta, ops, self.input_layernorm) if attention_input is None else (attention_input, meta, ops)
        attended = self.self_attn(*inputs, pdl_barrier=pdl_barrier)
        if self.attention_output_norm is None:
            x_ND = ops.linear(self.self_attn.o_proj, attended, residual=x_ND)
        else:
            x_ND = ops.add_norm(self.attention_output_norm, ops.linear(self.self_attn.o_proj, attended), x_ND)
        return self.mlp(x_ND, ops, self.post_attention_layernorm, self.mlp_output_norm)
