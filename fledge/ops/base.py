"""The backend interface: the operations that a network calls. A backend decides which kernels run them.

Shapes: N tokens (of all sequences, flat), D hidden size, H query heads, K key/value heads, E head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.draft_inputs import DraftInputs
from fledge.kernels.linear.reference import NormModule as NormModule
from fledge.kernels.moe import experts_reference, experts_triton
from fledge.kernels.native_layers import LayerLike
from fledge.kernels.quantization import QuantizedWeight
from fledge.kernels.sample import PartialArgmax, SamplingState
from fledge.kernels.triton_support import use_triton


class AttentionModule(Protocol):
    """The parts of an attention module that `Ops.attend` needs. Latent attention has only these and computes heads itself."""

    layer: int
    window: int | None  # how many of the latest keys a token sees, its own included; None: all


class FusedAttentionModule(AttentionModule, Protocol):
    """The interface of `models.layers.Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int  # index of the network's rotary embedding

    @property
    def q_norm(self) -> NormModule | None: ...

    @property
    def k_norm(self) -> NormModule | None: ...


class LayerModule(LayerLike, Protocol):
    """The interface of `models.layers.Layer`."""

    index: int

    def __call__(
        self,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        ops: Ops,
        attention_input: Tensor | None = None,
        *,
        pdl_barrier: bool = False,
    ) -> Tensor: ...


class DrafterLayerModule(LayerModule, Protocol):
    """The interface of `models.drafter.DrafterLayer`."""

    norm_before_residual: bool

    @property
    def hidden_norm(self) -> NormModule | None:
        """The norm of the state that a token is paired with; only the first layer has one."""
        ...


class RotaryModule(Protocol):
    """The interface of `models.layers.Rotary`: cosines and sines by position."""

    table: Tensor

    def reserve(self, num_positions: int) -> None: ...

    def __call__(self, positions_N: Tensor, highest: int | None = None) -> tuple[Tensor, Tensor]: ...

    def device_table(self, num_positions: int, device: torch.device) -> Tensor: ...


class ExpertModule(Protocol):
    """The interface of `models.layers.MLP`."""

    @property
    def gate_up_proj(self) -> nn.Module: ...

    @property
    def down_proj(self) -> nn.Module: ...

    def gated(self, x_ND: Tensor, ops: Ops) -> Tensor: ...


class ExpertsModule(Protocol):
    """The interface of `models.moe.SparseMLP`."""

    @property
    def experts(self) -> Sequence[ExpertModule]: ...

    stacked: tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight] | None


class NetworkModule(Protocol):
    """The interface that `models.decoder.Decoder` and `models.drafter.EagleDrafter` share."""

    @property
    def rotaries(self) -> Sequence[RotaryModule]:
        """The rotary embeddings, indexed by `FusedAttentionModule.rope`."""
        ...

    @property
    def layers(self) -> Sequence[LayerModule]: ...


class TargetModule(NetworkModule, Protocol):
    """The interface of `models.decoder.Decoder`."""

    @property
    def norm(self) -> NormModule: ...

    @property
    def lm_head(self) -> nn.Module: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def run(
        self, x_ND: Tensor, meta: AttentionMetadata | None, ops: Ops, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]: ...


class DrafterModule(NetworkModule, Protocol):
    """The interface of `models.drafter.EagleDrafter`."""

    @property
    def layers(self) -> Sequence[DrafterLayerModule]: ...

    @property
    def norm(self) -> NormModule: ...

    @property
    def embedding(self) -> nn.Module: ...

    def inputs(self, tokens: Tensor | PartialArgmax, h_ND: Tensor, ops: Ops, **drafting: Any) -> DraftInputs: ...

    def run(self, inputs: DraftInputs, meta: AttentionMetadata | None, ops: Ops) -> Tensor: ...


def device_tables(network: NetworkModule, num_positions: int, device: torch.device) -> list[Tensor]:
    """The tables of cosines and sines by position of the network's rotary embeddings, for kernels."""
    return [rotary.device_table(num_positions, device) for rotary in network.rotaries]


class Ops(ABC):
    @abstractmethod
    def linear(
        self,
        module: nn.Module,
        x: Tensor,
        *,
        norm: NormModule | None = None,
        gated: bool = False,
        residual: Tensor | None = None,
        pdl_barrier: bool = False,
    ) -> Tensor:
        """Computes [residual +] [swiglu] ( module( [norm] x ) ). `pdl_barrier`: see `kernels.linear.dispatch`."""

    @abstractmethod
    def attention(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        """Attention [N, H * E] from the fused projection: norms and rotates heads, stores new keys and values, attends."""

    @abstractmethod
    def attend(
        self, module: AttentionModule, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, meta: AttentionMetadata | None
    ) -> Tensor:
        """Attention [N, H, E] from heads that are normed and rotated: stores new keys and values, attends."""

    @abstractmethod
    def angles(self, meta: AttentionMetadata | None, num_tokens: int, rope: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, rotated size] of the new tokens' positions, for modules that rotate themselves.

        `rope`: index of the network's rotary embedding.
        """

    @abstractmethod
    def norm(self, module: NormModule, x_ND: Tensor) -> Tensor: ...

    def add_norm(self, module: NormModule, x_ND: Tensor, residual_ND: Tensor) -> Tensor:
        """residual + norm(x)"""
        return residual_ND + self.norm(module, x_ND)

    def experts(
        self, module: ExpertsModule, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
    ) -> Tensor:
        """residual + Σ_k weight_k expert_k(x). A row's result does not depend on the experts of other rows."""
        if module.stacked is not None and use_triton(x_ND):
            return experts_triton(*module.stacked, x_ND, weights_NK, experts_NK.int(), residual_ND)

        def run(expert: ExpertModule, x: Tensor) -> Tensor:
            return self.linear(expert.down_proj, expert.gated(x, self))

        functions = [partial(run, expert) for expert in module.experts]
        return experts_reference(functions, x_ND, weights_NK, experts_NK, residual_ND)

    @abstractmethod
    def head(
        self,
        x_ND: Tensor,
        norm: NormModule,
        head: nn.Module,
        draws: SamplingState | None = None,
        num_new: int = 1,
        ahead: int = 0,
        ids_V: Tensor | None = None,
    ) -> PartialArgmax:
        """The token after each row, from the states before the final norm; see `kernels.sample.choose`."""

    @abstractmethod
    def fuse_inputs(
        self, taps: Sequence[Tensor], whole: NormModule | None, each: Sequence[NormModule] | None, dtype: torch.dtype
    ) -> Tensor:
        """The input of a drafter's `fc`: concatenated auxiliary states, normed together (`whole`) or one by one (`each`)."""

    @abstractmethod
    def draft_inputs(
        self, layer: DrafterLayerModule, embedding: nn.Module, tokens: Tensor | PartialArgmax, h_ND: Tensor, **drafting: Any
    ) -> DraftInputs:
        """The inputs of a drafter's first layer: normed embedding and state, concatenated, and the residual stream.

        `drafting`: see `kernels.draft_inputs.draft_inputs`.
        """

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
        """Runs a layer (`models.layers.Layer`) with the operations above, unless a backend runs it in one call.

        `in_place`: `x_ND` may be overwritten.
        """
        return layer(x_ND, meta, self, attention_input, pdl_barrier=pdl_barrier)

    def layers(
        self,
        layers: Sequence[LayerModule],
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        taps: Sequence[int] = (),
        attention_input: Tensor | None = None,
        *,
        num_pdl_barriers: int,
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Runs all layers: from embeddings (which may be overwritten) to the states before the final norm, and the taps.

        Tap i is the residual stream after i layers. `attention_input`: for the first layer.

        `num_pdl_barriers`: how many layers, from the first, start attention only after everything before it (a PDL barrier).
        """
        captured: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            if index in taps:
                captured[index] = x_ND
            read = None if index else attention_input
            x_ND = self.layer(layer, x_ND, meta, read, in_place=index not in taps, pdl_barrier=index < num_pdl_barriers)
        captured[len(layers)] = x_ND
        return x_ND, [captured[index] for index in taps]

    def target_pass(
        self,
        network: TargetModule,
        tokens_N: Tensor,
        meta: AttentionMetadata | None,
        taps: Sequence[int],
        wanted: Sequence[int],
    ) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        """Runs a target: returns logits of the rows `wanted`, taps (see `layers`), and the states before the final norm."""
        x_ND, tapped = network.run(network.embed(tokens_N), meta, self, taps)
        hidden = self.norm(network.norm, x_ND)
        if len(wanted) < len(tokens_N):
            hidden = hidden[torch.tensor(wanted, device=hidden.device, dtype=torch.long)]
        return self.linear(network.lm_head, hidden), tapped, x_ND

    def draft_step(
        self, network: DrafterModule, tokens_N: Tensor, h_ND: Tensor, meta: AttentionMetadata | None
    ) -> tuple[Tensor, Tensor]:
        """Runs a draft step: returns the states before and after the final norm."""
        x_ND = network.run(network.inputs(tokens_N, h_ND, self), meta, self)
        return x_ND, self.norm(network.norm, x_ND)
