"""Training targets: they compute tapped and last hidden states over packed documents, without gradients."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fledge.config import ModelConfig
from fledge.drift.texts import in_groups
from fledge.errors import ModelError
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.models.decoder import Decoder, DecoderLayer
from fledge.ops.base import LayerModule
from fledge.ops.torch_ops import AttendOps
from fledge.training.distributed import DistributedContext
from fledge.training.targets.continuations import continuations, until_stop
from fledge.training.ttt import Mask, TrainBatch, packed_attend, packed_mask


@dataclass(frozen=True)
class Head:
    """A target's head, which turns its last hidden state into logits."""

    weight: Tensor  # [V, D]
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None  # logits are cap·tanh(logits / cap)

    def rows(self, token_ids: Tensor) -> Head:
        """Returns the head restricted to some tokens."""
        bias = self.bias[token_ids] if self.bias is not None else None
        return replace(self, weight=self.weight[token_ids].contiguous(), bias=bias)

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


class TargetStates(NamedTuple):
    taps: Sequence[Tensor]  # one [N, D] per tapped layer
    hidden_ND: Tensor  # after the final norm: the input of the head


class Target:
    """Interface of the models for which drafters are trained."""

    head: Head
    embedding: nn.Module
    lm_head: nn.Module
    vocab_size: int
    hidden_size: int
    requires_collective: bool = False  # whether all processes must take part in every pass

    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        """Returns the target's states over a batch. `skip_compile`: do not compile, for a batch shape that hardly recurs."""
        raise NotImplementedError

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        """Returns the greedy answer to each prompt, including its stop token."""
        raise NotImplementedError

    def reserve(self, num_positions: int) -> None:
        """Extends the rotary tables to `num_positions`, so that no pass has to read the highest position from the device."""

    def without_compiler(self) -> None:
        """Switches compilation off, after it has failed."""

    def prefetch(self, batch: TrainBatch) -> None:
        """Announces a batch that `states` will be called with soon. Called from another thread than `states`."""

    def close(self) -> None:
        """Frees resources; `states` will not be called again."""


class Document(NamedTuple):
    key: str  # hash of its tokens: the same text has the same key in any packing
    first: int  # flat index of its first token in the batch
    tokens: np.ndarray


def documents(batch: TrainBatch) -> Iterator[Document]:
    """Yields the documents of a packed batch, without padding (zeros)."""
    flat = batch.tokens_BT.cpu().numpy().reshape(-1)
    for first, length in _spans(batch):
        tokens = flat[first : first + length]
        if tokens.any():
            yield Document(hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest(), first, tokens)


def _spans(batch: TrainBatch) -> list[tuple[int, int]]:
    """Returns (flat index of the first token, length) of each document, including padding."""
    start = batch.start_BT.cpu()
    firsts = (start == torch.arange(start.shape[1])).flatten().nonzero().flatten().tolist()
    return [(first, end - first) for first, end in zip(firsts, [*firsts[1:], start.numel()], strict=True)]


class DecoderTarget(Target):
    """A target run by Fledge's decoder. All layers share one compiled graph, so that compiling takes seconds at any depth."""

    def __init__(self, decoder: Decoder, taps: Sequence[int], *, compile: bool = False, sharded: bool = False) -> None:
        """`sharded`: whether the decoder comes from `load_sharded`."""
        decoder.check_taps(taps)
        self.decoder, self.taps = decoder.eval().requires_grad_(False), tuple(taps)
        self.config: ModelConfig = decoder.config
        self.head = Head(decoder.lm_head.weight.detach())
        self.embedding, self.lm_head = decoder.embed_tokens, decoder.lm_head
        self.vocab_size, self.hidden_size = decoder.config.vocab_size, decoder.config.hidden_size
        self.device = decoder.norm.weight.device
        self._layers: list[dict[str, Tensor]] = [dict(layer.named_parameters()) for layer in decoder.layers]
        # Layers differ in weights and perhaps in window or experts: one template layer without weights serves each kind.
        config = decoder.config
        windows = config.windows or (None,) * config.num_layers
        self._kinds = [(windows[layer], config.has_experts(layer)) for layer in range(config.num_layers)]
        with torch.device("meta"):
            self._template = {kind: DecoderLayer(config, self._kinds.index(kind)) for kind in set(self._kinds)}
        self._layer = torch.compile(_layer, dynamic=False) if compile else _layer
        self.requires_collective = sharded

    @torch.no_grad()
    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        decoder, length = self.decoder, batch.tokens_BT.shape[1]
        flex = self.device.type == "cuda"
        masks = {window: packed_mask(batch.start_BT, window, flex=flex) for window, _ in self._template}
        x = decoder.embed(batch.tokens_BT.flatten())
        positions = batch.positions_BT.flatten()
        angles: list[tuple[Tensor, Tensor]] = [
            rotary(positions, 0 if rotary.table.shape[1] else None) for rotary in decoder.rotaries
        ]
        if self.requires_collective:
            ops = AttendOps(packed_attend(masks, length), *angles)
        else:
            run_layer = _layer if skip_compile else self._layer

            def run(index: int, x: Tensor) -> Tensor:
                kind, weights, layer = self._kinds[index], self._layers[index], decoder.layers[index]
                attention = layer.self_attn
                if kind[1]:  # not compiled: experts are chosen on the host, or by kernels that read the layer's stacked experts
                    return layer(x, None, AttendOps(packed_attend(masks, length), *angles))
                cos, sin = angles[attention.rope]
                return run_layer(self._template[kind], weights, x, cos, sin, masks[attention.window], length)

            ops = _WholeLayers(run)
        x, taps = decoder.run(x, None, ops, self.taps)
        return TargetStates(taps, decoder.norm(x))

    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        return continuations(self.decoder, prompts, max_new_tokens, stop_ids)

    def reserve(self, num_positions: int) -> None:
        self.decoder.reserve(num_positions)

    def without_compiler(self) -> None:
        self._layer = _layer


def load_sharded(load: Callable[[], Decoder], dist: DistributedContext, device: torch.device) -> Decoder:
    """Returns a decoder whose layers are sharded over all processes; each layer is gathered for its computation and freed
    after it. All processes must then run the same passes.

    `load`: loads the decoder on the host. Layers move to the device one by one, so that a device never holds more than its
    share and one layer. Processes load one after the other, so that the host holds only one whole target at a time.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.type, (dist.size,))

    def spread() -> Decoder:
        decoder = load()
        for layer in decoder.layers:
            # Set explicitly: each layer is an FSDP root, and by default roots keep their weights after the first pass.
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        for name, part in decoder.named_children():
            if name != "layers":
                part.to(device)
        return decoder

    return dist.in_turn(spread)


def _layer(
    template: DecoderLayer, weights: dict[str, Tensor], x: Tensor, cos: Tensor, sin: Tensor, mask: Mask, length: int
) -> Tensor:
    attend = packed_attend({template.self_attn.window: mask}, length)
    # A layer selects its rotary embedding by index.
    angles = [(cos, sin)] * (template.self_attn.rope + 1)
    return functional_call(template, weights, (x, None, AttendOps(attend, *angles)))


class _WholeLayers(AttendOps):
    """Runs each layer by one call of a function, which may be compiled."""

    def __init__(self, run: Callable[[int, Tensor], Tensor]) -> None:
        """`run`: called with a layer's index and its input."""
        self.run = run

    def layer(
        self,
        layer: LayerModule,
        x_ND: Tensor,
        meta: AttentionMetadata | None,
        attention_input: Tensor | None = None,
        **hints: bool,
    ) -> Tensor:
        return self.run(layer.index, x_ND)


class TransformersTarget(Target):
    """A target run by transformers: any causal language model. Documents are unpacked into right-padded rows, because these
    need no special mask in any architecture."""

    def __init__(self, model: Any, taps: Sequence[int]) -> None:
        self.model, self.taps = model.eval().requires_grad_(False), tuple(taps)
        text = model.config.get_text_config()
        self.config = text
        num_layers = text.num_hidden_layers
        if bad := [i for i in self.taps if not 0 <= i < num_layers]:
            raise ModelError(
                f"the target has {num_layers} layers; through transformers it can be tapped after layers "
                f"0…{num_layers - 1}, not {bad}"
            )
        self.lm_head = head = model.get_output_embeddings()
        self.embedding = embedding = model.get_input_embeddings()
        self.device = embedding.weight.device
        self.vocab_size, self.hidden_size = embedding.weight.shape[0], text.hidden_size
        scale = 1.0 / getattr(text, "logits_scaling", 1.0) * getattr(text, "logit_scale", 1.0)
        self.head = Head(
            head.weight.detach(),
            head.bias.detach() if head.bias is not None else None,
            scale,
            getattr(text, "final_logit_softcapping", None),
        )
        self._decoder = model.get_decoder()
        self._takes_positions = "position_ids" in inspect.signature(self._decoder.forward).parameters
        self._check_head()

    @torch.no_grad()
    def _check_head(self) -> None:
        """Checks that the head alone gives the model's logits, because the loss applies the head itself to some rows."""
        tokens = torch.arange(1, 9, device=self.device)[None] % self.vocab_size
        expected = self.model(tokens, use_cache=False).logits.float()
        found = self.head(self._decoder(tokens, use_cache=False).last_hidden_state).float()
        if (expected - found).abs().max() > 0.02 * expected.abs().max():
            raise ModelError(
                f"{type(self.model).__name__}: its logits are not its head applied to its last hidden state, which "
                "training relies on; this architecture cannot be a target"
            )

    @torch.no_grad()
    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        tokens, positions = batch.tokens_BT.flatten(), batch.positions_BT.flatten()
        hidden = torch.zeros(len(tokens), self.hidden_size, device=tokens.device, dtype=self.head.weight.dtype)
        taps = [torch.zeros_like(hidden) for _ in self.taps]
        spans = _spans(batch)
        for group in in_groups([length for _, length in spans], max(batch.tokens_BT.shape[1], 8192)):
            index, real = (x.to(self.device) for x in _padded([spans[number] for number in group]))
            extra = {"position_ids": positions[index]} if self._takes_positions else {}
            out = self._decoder(tokens[index], output_hidden_states=True, use_cache=False, **extra)
            for buffer, layer in zip(taps, self.taps, strict=True):
                buffer[index[real]] = out.hidden_states[layer][real]
            hidden[index[real]] = out.last_hidden_state[real]
        return TargetStates(taps, hidden)

    @torch.no_grad()
    def continuations(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        """Generates one prompt at a time."""
        answers = []
        for prompt in prompts:
            tokens = torch.tensor([list(prompt)], device=self.device)
            out = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=list(stop_ids) or None,
                pad_token_id=0,
            )
            answers.append(until_stop(out[0, len(prompt) :].tolist(), stop_ids))
        return answers


def _padded(spans: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Returns the documents as rows of flat indices, and a mask of those that are not padding."""
    firsts, lengths = torch.tensor(spans)[..., None].unbind(1)
    column = torch.arange(int(lengths.max()))
    # Padding repeats the document's last token. It comes after all real tokens, so causal attention never sees it.
    return firsts + torch.minimum(column, lengths - 1), column < lengths
