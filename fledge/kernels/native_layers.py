"""Decoder layers in C for the CPU (`cpu/library.c`): all layers of a pass, or a whole draft step, in one call."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import Structure, c_double, c_float, c_int, c_int64, c_long, c_void_p
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fledge.kernels.attention.paged import HostLayouts
from fledge.kernels.formats.gguf_blocks import FORMATS
from fledge.kernels.linear.packed import GgufEmbedding
from fledge.kernels.linear.reference import NormModule
from fledge.kernels.native import PANEL, TENSOR_FORMATS, LinearArguments, address, library

MAX_ROPES = 2  # rotary embeddings of a network; cpu/layer.h
# Format numbers of KV caches; uint8 holds Q8_0 blocks.
CACHE_FORMATS = {
    dtype: FORMATS[name].number for dtype, name in ((torch.float32, "F32"), (torch.float16, "F16"), (torch.uint8, "Q8_0"))
}


class LayerArguments(Structure):
    _fields_ = [
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("eps", c_float),
        ("gelu", c_int),
        ("rope", c_int),
        *((name, LinearArguments) for name in ("qkv", "o", "gate_up", "down")),
    ]


class ExpertArguments(Structure):
    _fields_ = [("gate_up", LinearArguments), ("down", LinearArguments)]


class CacheArguments(Structure):
    _fields_ = [
        *((name, c_long) for name in ("heads", "kv_heads", "head_size", "window")),
        *((name, c_void_p) for name in ("keys", "values")),
        *((name, c_long) for name in ("format", "slot_bytes", "head_bytes")),
    ]


class EmbeddingArguments(Structure):
    _fields_ = [("rows", c_void_p), *((name, c_long) for name in ("format", "row_bytes", "vocab", "size"))]


class TargetArguments(Structure):
    _fields_ = [
        ("embeddings", EmbeddingArguments),
        ("layers", c_void_p),
        ("caches", c_void_p),
        ("num_layers", c_long),
        ("norm", c_void_p),
        ("eps", c_float),
        ("embedding_scale", c_float),
        ("head", LinearArguments),
    ]


class DrafterArguments(Structure):
    _fields_ = [
        ("embeddings", EmbeddingArguments),
        *((name, c_void_p) for name in ("embedding_norm", "hidden_norm", "norm")),
        ("eps", c_float),
        *((name, c_int) for name in ("norm_before_residual", "norm_output")),
        ("layers", c_void_p),
        ("caches", c_void_p),
        *((name, c_long) for name in ("num_layers", "num_taps", "tap_size")),
        ("whole_norm", c_void_p),
        ("tap_norms", c_void_p),
        *((name, LinearArguments) for name in ("fc", "head")),
        ("target_ids", c_void_p),
    ]


class LayerLike(Protocol):
    """The parts of `models.layers.Layer` that are used here."""

    @property
    def input_layernorm(self) -> NormModule: ...

    @property
    def self_attn(self) -> nn.Module: ...

    @property
    def attention_output_norm(self) -> NormModule | None: ...

    @property
    def post_attention_layernorm(self) -> NormModule: ...

    @property
    def mlp(self) -> nn.Module: ...

    @property
    def mlp_output_norm(self) -> NormModule | None: ...


class NativeBatch:
    """The sequences of one pass in C's layout, used by all its layers. `num_more`: see `CpuOps.batch`.

    One array of longs holds C's `Batch`, its `Sequence`s and their runs, with pointers between them. ctypes structures would
    take 1.5 times as long to fill, and a step fills two.
    """

    BATCH, SEQUENCE = 5 + 2 * MAX_ROPES, 5  # sizes in longs; cpu/layer.h, cpu/attention.h

    def __init__(
        self, host: HostLayouts, tables: Sequence[tuple[Tensor, Tensor]], positions_N: Tensor, num_more: int = 0
    ) -> None:
        """`tables`: cosines and sines [positions, E] of each of the network's rotary embeddings."""
        self.rows, layouts = len(positions_N), host.sequences
        positions_N = positions_N.contiguous()
        self.kept: list[Any] = [tables, positions_N]  # kept alive, because C has pointers to them
        first_run = self.BATCH + self.SEQUENCE * len(layouts)
        sequences: list[int] = []
        runs: list[int] = []
        for layout in layouts:
            mask_at = tail = 0
            if layout.tail_mask is not None:
                mask = layout.tail_mask.contiguous()
                mask_at, tail = mask.data_ptr(), mask.shape[1]
                self.kept.append(mask)
            sequences += (layout.query_len, layout.kv_len, first_run + len(runs), mask_at, tail)
            for run in layout.runs(host.page_size, num_more):
                runs += run
        angles = [[table.data_ptr() for table in parts] + [0] * (MAX_ROPES - len(parts)) for parts in zip(*tables, strict=True)]
        sizes = (len(layouts), self.rows, torch.get_num_threads())
        self.numbers = array("l", [0, *angles[0], *angles[1], positions_N.data_ptr(), *sizes, *sequences, *runs])
        self.pointer = self.numbers.buffer_info()[0]
        self.numbers[0] = self.pointer + self.numbers.itemsize * self.BATCH
        for place in range(self.BATCH + 2, first_run, self.SEQUENCE):
            self.numbers[place] = self.pointer + self.numbers.itemsize * self.numbers[place]


class NativeLayer:
    """The C arguments of one layer: its weights and its cache. For a layer with experts, the part before the experts."""

    def __init__(self, layer: LayerLike, keys_KSE: Tensor, values_KSE: Tensor) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        linears = [attention.qkv_proj, attention.o_proj]
        linears += [] if hasattr(mlp, "experts") else [mlp.gate_up_proj, mlp.down_proj]
        input_norm = None if getattr(layer, "first", False) else layer.input_layernorm
        post_norm = layer.post_attention_layernorm
        outputs = [layer.attention_output_norm, layer.mlp_output_norm]
        norms = [input_norm, post_norm, attention.q_norm, attention.k_norm, *outputs]
        self.kept = (linears, norms, keys_KSE, values_KSE)  # kept alive, because C has pointers to them
        self.arguments = LayerArguments(
            *(address(None if norm is None else norm.weight) for norm in norms),
            post_norm.eps,
            getattr(mlp, "activation", "silu") == "gelu_tanh",
            attention.rope,
            *(linear.native.arguments for linear in linears),
        )
        num_kv_heads, slots, width = keys_KSE.shape
        slot_bytes = width * keys_KSE.element_size()
        self.cache = CacheArguments(
            attention.num_heads,
            num_kv_heads,
            attention.head_dim,
            attention.window or 0,
            keys_KSE.data_ptr(),
            values_KSE.data_ptr(),
            CACHE_FORMATS[keys_KSE.dtype],
            slot_bytes,
            slots * slot_bytes,
        )

    @staticmethod
    def serves(layer: LayerLike, keys_KSE: Tensor) -> bool:
        """Whether C can run the layer: all linears are packed, the cache has a known dtype, gates fill whole panels."""
        attention, mlp = layer.self_attn, layer.mlp
        mlps = [*mlp.experts, *([] if mlp.shared_expert is None else [mlp.shared_expert])] if hasattr(mlp, "experts") else [mlp]
        linears = [getattr(attention, "qkv_proj", None), attention.o_proj]
        linears += [linear for one in mlps for linear in (one.gate_up_proj, one.down_proj)]
        packed = all(getattr(linear, "native", None) is not None for linear in linears)
        return packed and keys_KSE.dtype in CACHE_FORMATS and all(one.down_proj.in_features % PANEL == 0 for one in mlps)


class NativeLayers:
    """Runs all layers of a network in one call, on the residual stream in place. Thirty calls took 0.25 ms more per pass."""

    def __init__(self, layers: Sequence[NativeLayer]) -> None:
        self.kept = tuple(layers)
        self.layers = (LayerArguments * len(layers))(*(layer.arguments for layer in layers))
        self.caches = (CacheArguments * len(layers))(*(layer.cache for layer in layers))
        self.pointers = ctypes.addressof(self.layers), ctypes.addressof(self.caches), len(layers)

    def __call__(
        self, batch: NativeBatch, x_ND: Tensor, normed: Tensor | None = None, taps: Sequence[int] = ()
    ) -> Sequence[Tensor]:
        """Returns copies of the stream after each of `taps` layers. `normed`: the first attention's input if it has no norm."""
        order = sorted(taps)
        tapped = x_ND.new_empty(len(taps), *x_ND.shape) if taps else None
        run = library().for_rows(batch.rows).run_layers
        numbers = (c_long * len(order))(*order)
        if run(*self.pointers, batch.pointer, x_ND.data_ptr(), address(normed), numbers, len(order), address(tapped), None):
            raise MemoryError("no memory for a decoder layer")
        if tapped is None:
            return ()
        return _in_order(tapped.unbind(), taps)


def _in_order(states: Sequence[Tensor], taps: Sequence[int]) -> Sequence[Tensor]:
    """Orders the states as in `taps`; C writes them in ascending order of layers."""
    order = sorted(taps)
    return states if order == list(taps) else [states[order.index(tap)] for tap in taps]


def embedding_arguments(embedding: nn.Module) -> EmbeddingArguments:
    if isinstance(embedding, GgufEmbedding):
        blocks = embedding.blocks
        number = FORMATS[blocks.format].number
        return EmbeddingArguments(blocks.address, number, blocks.row_bytes, blocks.outputs, blocks.inputs)
    weight = embedding.weight
    number, row_bytes = FORMATS[TENSOR_FORMATS[weight.dtype]].number, weight.stride(0) * weight.element_size()
    return EmbeddingArguments(weight.data_ptr(), number, row_bytes, *weight.shape)


class NativeTarget:
    """Runs a target in C: from tokens to logits in one call."""

    def __init__(self, network: Any, layers: NativeLayers) -> None:
        """`network`: a `models.decoder.Decoder`."""
        self.kept = (network, layers)  # kept alive, because C has pointers to them
        scale = network.config.embedding_scale
        norm, head = network.norm, network.lm_head.native.arguments
        self.size, self.num_logits = head.inputs, head.outputs
        parts = (norm.weight.data_ptr(), norm.eps, 1.0 if scale is None else scale, head)
        self.arguments = TargetArguments(embedding_arguments(network.embed_tokens), *layers.pointers, *parts)
        self.pointer = ctypes.addressof(self.arguments)

    @staticmethod
    def serves(network: Any) -> bool:
        embedding = network.embed_tokens
        is_known = isinstance(embedding, GgufEmbedding) or embedding.weight.dtype in TENSOR_FORMATS
        return is_known and network.dtype == torch.float32 and getattr(network.lm_head, "native", None) is not None

    def __call__(
        self, batch: NativeBatch, tokens_N: Tensor, taps: Sequence[int], wanted: Sequence[int]
    ) -> tuple[Tensor, Sequence[Tensor], Tensor]:
        order, tokens_N = sorted(taps), tokens_N.contiguous()
        states = torch.empty(len(order) + 1, batch.rows, self.size)
        *tapped, x = states.unbind()
        logits = torch.empty(len(wanted), self.num_logits)
        lists = [array("l", numbers) for numbers in (order, wanted)]
        (tap_at, num_taps), (wanted_at, num_wanted) = (numbers.buffer_info() for numbers in lists)
        run, out = library().for_rows(batch.rows).run_target, (x.data_ptr(), logits.data_ptr())
        inputs = (self.pointer, batch.pointer, tokens_N.data_ptr())
        failed = run(*inputs, tap_at, num_taps, states.data_ptr(), wanted_at, num_wanted, *out)
        if failed:
            raise MemoryError("no memory for a pass") if failed == 1 else IndexError("a token beyond the vocabulary")
        return logits, _in_order(tapped, taps), x


class NativeExperts:
    """Runs the experts of one layer in C."""

    def __init__(self, experts: Sequence[Any]) -> None:
        self.experts = experts  # kept alive, because C has pointers to them
        linears = ((expert.gate_up_proj.native.arguments, expert.down_proj.native.arguments) for expert in experts)
        self.arguments = (ExpertArguments * len(experts))(*linears)

    def __call__(self, x_ND: Tensor, weights_NK: Tensor, experts_NK: Tensor, residual_ND: Tensor) -> None:
        """Adds the experts' output to the residual stream in place."""
        (rows, per_row), num_experts = experts_NK.shape, len(self.experts)
        parts = (x_ND, experts_NK, weights_NK, residual_ND)
        assert all(part.is_contiguous() for part in parts)
        pointers = [part.data_ptr() for part in parts]
        run = library().for_rows(rows).run_experts
        if run(self.arguments, num_experts, *pointers, rows, per_row, torch.get_num_threads()):
            raise MemoryError("no memory for experts")


class NativeDrafter:
    """Runs an EAGLE network in C: a draft step, or a whole chain of one sequence, in one call."""

    def __init__(self, network: Any, layers: NativeLayers) -> None:
        """`network`: a `models.drafter.EagleDrafter`."""
        first, config = network.layers[0], network.config
        norms = (first.input_layernorm, first.hidden_norm, network.norm)
        linears = [getattr(linear, "native", None) for linear in (network.fc, network.head)]
        self.drafts_chains = None not in linears
        tap_norms = network.fc_norm and (c_void_p * len(network.fc_norm))(*(norm.weight.data_ptr() for norm in network.fc_norm))
        target_ids = network.target_ids(torch.arange(config.draft_vocab_size))
        self.kept = (network, norms, layers, tap_norms, target_ids)  # kept alive, because C has pointers to them
        self.arguments = DrafterArguments(
            embedding_arguments(network.embedding),
            *(norm.weight.data_ptr() for norm in norms),
            network.norm.eps,
            first.norm_before_residual,
            config.norm_output,
            *layers.pointers,
            len(config.aux_layer_ids),
            config.target_hidden_size,
            network.input_norm and network.input_norm.weight.data_ptr(),
            tap_norms and ctypes.addressof(tap_norms),
            *(LinearArguments() if linear is None else linear.arguments for linear in linears),
            target_ids.data_ptr(),
        )
        self.arguments.head.streamed = 0  # may be set in the target's head, but every draft step reads it again
        self.pointer = ctypes.addressof(self.arguments)

    def step(self, batch: NativeBatch, tokens_N: Tensor, h_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Runs a draft step; returns the residual stream after the layers, and its norm."""
        h_ND = h_ND.contiguous()
        x, post = torch.empty_like(h_ND), torch.empty_like(h_ND)
        run = library().for_rows(batch.rows).run_drafter
        failed = run(self.pointer, batch.pointer, tokens_N.data_ptr(), h_ND.data_ptr(), x.data_ptr(), post.data_ptr())
        if failed:
            raise MemoryError("no memory for a draft step") if failed == 1 else IndexError("a token beyond the vocabulary")
        return x, post

    def chain(
        self,
        batch: NativeBatch,
        tokens_N: Tensor,
        taps: Sequence[Tensor],
        first_row: int,
        limit: int,
        threshold: float,
        covered: float,
    ) -> tuple[list[int], list[float]]:
        """Syncs one sequence, from `first_row` of the taps on, and drafts greedily; returns tokens and their probabilities.

        See `draft_chain` in `cpu/library.c`.
        """
        starts = (c_void_p * len(taps))(*(tap.data_ptr() + first_row * tap.stride(0) * tap.element_size() for tap in taps))
        tokens, confidences = (c_int64 * limit)(), (c_double * limit)()
        draft = library().for_rows(batch.rows).draft_chain
        count = draft(self.pointer, batch.pointer, tokens_N.data_ptr(), starts, limit, threshold, covered, tokens, confidences)
        if count <= 0:
            raise IndexError("a token beyond the vocabulary") if count else MemoryError("no memory for a draft")
        return tokens[:count], confidences[:count]
