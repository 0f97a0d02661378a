"""The served target as training sees it: its head and embedding as they are served, and the hidden states of texts."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fledge.drift.texts import TargetText, read_texts
from fledge.kernels.linear.packed import GgufLinear, PackedLinear
from fledge.kernels.quantization import QuantizedLinear, dequantize
from fledge.models.decoder import Decoder
from fledge.training.targets.target import Head, Target, TargetStates
from fledge.training.ttt import TrainBatch

# Of kept hidden states. bf16 has fp32's range, which massive activations of first tokens need, in half of the bytes.
KEPT_DTYPE = torch.bfloat16
# Beginnings that many prompts share, a system prompt say.
PREFIX_TOKENS, MAX_PREFIXES = 128, 16


class ServedTarget(Target):
    """Shares all weights with the engine's decoder, whatever format they are served in."""

    def __init__(self, decoder: Decoder, taps: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.decoder, self.taps, self.clock = decoder, tuple(taps), clock
        self.device = decoder.norm.weight.device
        self.vocab_size, self.hidden_size = decoder.config.vocab_size, decoder.config.hidden_size
        self.embedding = decoder.embed_tokens
        weight = linear_weight(decoder.lm_head, torch.float32 if self.device.type == "cpu" else decoder.dtype)
        # Prefix to (time of the last request with it, its hidden states by layer); the most recently used comes last.
        self.prefixes: dict[tuple[int, ...], tuple[float, list[Tensor]]] = {}
        self.unknown: dict[tuple[int, ...], float] = {}  # no states yet: `read` adds those of texts with the prefix
        self.head, self.lm_head = Head(weight), _PlainHead(weight)

    def states(self, batch: TrainBatch, *, skip_compile: bool = False) -> TargetStates:
        raise AssertionError("hidden states come with the samples")

    def reserve(self, num_positions: int) -> None:
        self.decoder.reserve(num_positions)

    @torch.no_grad()
    def read(self, texts: Sequence[tuple[Sequence[int], int]]) -> list[TargetText]:
        """Runs the target over (tokens, answer start) for samples whose hidden states were not collected."""
        found = [_kept(text) for text in read_texts(self.decoder, texts, self.taps)]
        for length in {len(prefix) for prefix in self.unknown}:
            for (tokens, _), text in zip(texts, found, strict=True):
                if (prefix := tuple(tokens[:length])) in self.unknown:
                    assert text.hidden_TD is not None
                    self._keep_prefix(prefix, [layer[:length].clone() for layer in (*text.taps, text.hidden_TD)])
        return found

    @torch.no_grad()
    def collected(self, tokens: Sequence[int], answer_start: int, start: int, states: Sequence[Tensor]) -> TargetText | None:
        """From states of serving passes, from position `start` on: the taps and, last, the residual stream before the final
        norm. None: they are too few, or what lies before `start`, which the cache had, is not known yet. Never waits for
        the device: requests run meanwhile."""
        states = [state[: len(tokens) - start] for state in states]
        layers = [*states[:-1], self.decoder.norm(states[-1].to(self.decoder.dtype))]
        if start:
            prefix = tuple(tokens[:start])
            if (known := self.prefixes.pop(prefix, None)) is None:
                if start <= PREFIX_TOKENS:
                    self.unknown.pop(prefix, None)
                    while len(self.unknown) >= MAX_PREFIXES:  # no text with the oldest was read
                        del self.unknown[next(iter(self.unknown))]
                    self.unknown[prefix] = self.clock()
                return None
            _, before = known
            self.prefixes[prefix] = (self.clock(), before)
            layers = [torch.cat([kept.to(layer), layer]) for kept, layer in zip(before, layers, strict=True)]
        missing = len(tokens) - len(layers[0])
        if missing > 1:
            return None
        if missing:  # the last token's states are not computed when it ends the answer, and nothing reads them
            layers = [torch.cat([layer, layer.new_zeros(1, layer.shape[1])]) for layer in layers]
        return _kept(TargetText(torch.tensor(tokens), answer_start, layers[:-1], layers[-1]))

    def _keep_prefix(self, prefix: tuple[int, ...], layers: list[Tensor]) -> None:
        asked_at = self.unknown.pop(prefix)
        while len(self.prefixes) >= MAX_PREFIXES:
            del self.prefixes[next(iter(self.prefixes))]
        self.prefixes[prefix] = (asked_at, layers)

    @property
    def oldest(self) -> float:
        """Time of the last request with the least recently used prefix; inf: no prefix is kept."""
        return min((at for at in (*self.unknown.values(), *(at for at, _ in self.prefixes.values()))), default=math.inf)

    def forget_until(self, time: float) -> None:
        """Drops beginnings that no request has had since."""
        self.unknown = {prefix: at for prefix, at in self.unknown.items() if at > time}
        self.prefixes = {prefix: (at, layers) for prefix, (at, layers) in self.prefixes.items() if at > time}

    def release(self) -> None:
        """Learning has stopped: gives up all that is not the engine's."""
        self.forget_until(math.inf)
        del self.head, self.lm_head

    @property
    def num_channels(self) -> int:
        """Of a token's kept states."""
        return (len(self.taps) + 1) * self.hidden_size

    def bytes_per_token(self) -> int:
        return self.num_channels * KEPT_DTYPE.itemsize + 8

    @property
    def num_bytes(self) -> int:
        """Of beginnings at most, and of the head if it is not the engine's own."""
        own = dict(self.decoder.lm_head.named_parameters(recurse=False)).get("weight")
        is_shared = own is not None and own.data_ptr() == self.head.weight.data_ptr()
        beginnings = MAX_PREFIXES * PREFIX_TOKENS * self.num_channels * KEPT_DTYPE.itemsize
        return beginnings + (0 if is_shared else self.head.weight.untyped_storage().nbytes())


def _kept(text: TargetText) -> TargetText:
    # Copies: a slice would keep the whole pass, and tensors of inference mode cannot be trained with.
    hidden = None if text.hidden_TD is None else text.hidden_TD.to(KEPT_DTYPE, copy=True)
    return replace(
        text, tokens_T=text.tokens_T.cpu().clone(), taps=[tap.to(KEPT_DTYPE, copy=True) for tap in text.taps], hidden_TD=hidden
    )


class _PlainHead(nn.Module):
    """The target's head for a drafter that has none of its own, in whatever type the drafter computes."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.weight.dtype), self.weight)


def linear_weight(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """A linear's weights [O, I], unpacked where they are packed or quantised."""
    if isinstance(module, QuantizedLinear):
        weight = dequantize(module.quantized)
        if module.order is not None:  # GPTQ's act-order: column j belongs to input order[j]
            weight = weight[:, module.order.argsort()]
    elif _is_quantised_in_c(module):  # what it gives for unit vectors is its weights
        weight = (module(torch.eye(module.in_features)) - (0 if module.bias is None else module.bias)).t().contiguous()
    else:
        assert isinstance(module.weight, Tensor)
        weight = module.weight.detach()
    return weight if dtype is None else weight.to(dtype)


def _is_quantised_in_c(module: nn.Module) -> TypeGuard[PackedLinear]:
    if isinstance(module, GgufLinear) or not isinstance(module, PackedLinear):
        return False
    return module.native is not None and not module.native.is_plain
