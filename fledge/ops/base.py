"""What a network asks of a backend. The layer loops are in `models`; a backend decides which kernels run them.

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
    """What `Ops.attend` knows of an attention module; latent attention is no more than that, and brings its own heads."""

    layer: int
    window: int | None  # keys further back than so many tokens, its own included, are not seen


class FusedAttentionModule(AttentionModule, Protocol):
    """`models.layers.Attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int  # which of the network's rotary embeddings

    @property
    def q_norm(self) -> NormModule | None: ...

    @property
    def k_norm(self) -> NormModule | None: ...


class LayerModule(LayerLike, Protocol):
    """`models.layers.Layer`."""

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
    """`models.drafter.DrafterLayer`."""

    norm_before_residual: bool

    @property
    def hidden_norm(self) -> NormModule | None:
        """Of the state that a token is paired with; the first layer has one."""
        ...


class RotaryModule(Protocol):
    """`models.layers.Rotary`: cosines and sines by position."""

    table: Tensor

    def reserve(self, num_positions: int) -> None: ...

    def __call__(self, positions_N: Tensor, highest: int | None = None) -> tuple[Tensor, Tensor]: ...

    def device_table(self, num_positions: int, device: torch.device) -> Tensor: ...


class ExpertModule(Protocol):
    """`models.layers.MLP`."""

    @property
    def gate_up_proj(self) -> nn.Module: ...

    @property
    def down_proj(self) -> nn.Module: ...

    def gated(self, x_ND: Tensor, ops: Ops) -> Tensor: ...


class ExpertsModule(Protocol):
    """`models.moe.SparseMLP`."""

    @property
    def experts(self) -> Sequence[ExpertModule]: ...

    stacked: tuple[Tensor | QuantizedWeight, Tensor | QuantizedWeight] | None


class NetworkModule(Protocol):
    """`models.decoder.Decoder` or `models.drafter.EagleDrafter`."""

    @property
    def rotaries(self) -> Sequence[RotaryModule]:
        """By the number that a layer's attention names."""
        ...

    @property
    def layers(self) -> Sequence[LayerModule]: ...


class TargetModule(NetworkModule, Protocol):
    """`models.decoder.Decoder`."""

    @property
    def norm(self) -> NormModule: ...

    @property
    def lm_head(self) -> nn.Module: ...

    def embed(self, tokens: Tensor) -> Tensor: ...

    def run(
        self, x_ND: Tensor, meta: AttentionMetadata | None, ops: Ops, taps: Sequence[int] = ()
    ) -> tuple[Tensor, Sequence[Tensor]]: ...


class DrafterModule(NetworkModule, Protocol):
    """`models.drafter.EagleDrafter`."""

    @property
    def layers(self) -> Sequence[DrafterLayerModule]: ...

    @property
    def norm(self) -> NormModule: ...

    @property
    def embedding(self) -> nn.Module: ...

    def inputs(self, tokens: Tensor | PartialArgmax, h_ND: Tensor, ops: Ops, **drafting: Any) -> DraftInputs: ...

    def run(self, inputs: DraftInputs, meta: AttentionMetadata | None, ops: Ops) -> Tensor: ...


def device_tables(network: NetworkModule, num_positions: int, device: torch.device) -> list[Tensor]:
    """Angles by position, of each of the network's rotary embeddings, for kernels."""
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
        """[residual +] [swiglu] ( module( [norm] x ) ). `pdl_barrier`: see `kernels.linear.dispatch`."""

    @abstractmethod
    def attention(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        """[N, H * E], from the fused projection: norms of the heads, rotation, new keys into the cache, attention."""

    @abstractmethod
    def attend(
        self, module: AttentionModule, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, meta: AttentionMetadata | None
    ) -> Tensor:
        """[N, H, E], from heads that are normed and rotated: new keys into the cache, attention."""

    @abstractmethod
    def angles(self, meta: AttentionMetadata | None, num_tokens: int, rope: int = 0) -> tuple[Tensor, Tensor]:
        """Cosines and sines [N, 1, rotated size] of the new tokens' positions, for modules that rotate themselves.

        `rope`: which of the network's rotary embeddings.
        """

    @abstractmethod
    def norm(self, module: NormModule, x_ND: Tensor) -> Tensor: ...

    def add_norm(self, module: NormModule, x_ND: Tensor, residual_ND: Tensor) -> Tensor:
        """residual + norm(x)"""
        return residual_ND + self.norm(module, x_ND)

    def experts(
        self, module: ExpertsModule, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor
    ) -> Tensor:
        """residual + Σ_k weight_k expert_k(x). A row's result does not depend on where its neighbours go."""
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
        """What a drafter's `fc` reads: the auxiliary hidden states side by side, normed together (`whole`) or one by one."""

    @abstractmethod
    def draft_inputs(
        self, layer: DrafterLayerModule, embedding: nn.Module, tokens: Tensor | PartialArgmax, h_ND: Tensor, **drafting: Any
    ) -> DraftInputs:
        """What a drafter's first layer reads: normed embedding and state side by side, and the residual stream.

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
        """A whole layer (`models.layers.Layer`): through the ops above, unless a backend runs it in one call.

        `in_place`: the residual stream that came in is not read again.
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
        """All layers of a network: from embeddings (they may be overwritten) to the states before the final norm, and taps.

        Tap i is the residual stream after i layers. `attention_input`: of the first layer.

        `num_pdl_barriers`: the layers that let their attention start only after everything before them (a PDL barrier).
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
        """A pass of a target: logits of the rows `wanted`, taps (see `layers`), and the states before the final norm."""
        x_ND, tapped = network.run(network.embed(tokens_N), meta, self, taps)
        hidden = self.norm(network.norm, x_ND)
        if len(wanted) < len(tokens_N):
            hidden = hidden[torch.tensor(wanted, device=hidden.device, dtype=torch.long)]
        return self.linear(network.lm_head, hidden), tapped, x_ND

    def draft_step(
        self, network: DrafterModule, tokens_N: Tensor, h_ND: Tensor, meta: AttentionMetadata | None
    ) -> tuple[Tensor, Tensor]:
        """One step of a drafter: the states before and after its final norm."""
        x_ND = network.run(network.inputs(tokens_N, h_ND, self), meta, self)
        return x_ND, self.norm(network.norm, x_ND)
