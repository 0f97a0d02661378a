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
# Of a long text whose beginning the cache had: hidden states know what was before, but some of the text must be left.
LEAST_CUT_TOKENS = 16
# Tokens of a text that are worth computing again, if its hidden states were not collected. On a CPU as many as a sample may
# have take 0.1 s; a GPU reads 8,192 in less.
MOST_READ_TOKENS = {"cpu": 256, "cuda": 8192}


def training_dtype(device: torch.device) -> torch.dtype:
    """Of a training step's matrix products, whatever the target is served in."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class ServedTarget(Target):
    """Shares all weights with the engine's decoder, whatever format they are served in."""

    def __init__(self, decoder: Decoder, taps: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.decoder, self.taps, self.clock = decoder, tuple(taps), clock
        self.device = decoder.norm.weight.device
        self.vocab_size, self.hidden_size = decoder.config.vocab_size, decoder.config.hidden_size
        self.embedding = decoder.embed_tokens
        weight = linear_weight(decoder.lm_head, training_dtype(self.device))
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
    def collected(
        self, tokens: Sequence[int], answer_start: int, start: int, states: Sequence[Tensor], max_states: int
    ) -> tuple[TargetText, int] | None:
        """From states of serving passes, from position `start` on: the taps and, last, the residual stream before the final
        norm. With the number of tokens after the first that are left out of it, because `max_states` are kept.

        None: they are too few, or what lies before `start`, which the cache had, is not known yet. Never waits for the
        device: requests run meanwhile.
        """
        states = [state[: len(tokens) - start] for state in states]
        if len(tokens) - start - len(states[0]) > 1 or not len(states[0]):
            return None
        layers = [*states[:-1], self.decoder.norm(states[-1].to(self.decoder.dtype))]
        before = self._prefix(tuple(tokens[:start])) if 0 < start <= PREFIX_TOKENS else None
        num_skipped = 0
        if start and before is None and len(tokens) > max_states:
            # A long text is cut anyway. A first token's states depend on nothing but the token.
            before, num_skipped = self._prefix((tokens[0],)), start - 1
            if before is None:
                self._ask_for((tokens[0],))
            elif len(tokens) - start < LEAST_CUT_TOKENS:
                before = None
        if start and before is None:
            if start <= PREFIX_TOKENS:
                self._ask_for(tuple(tokens[:start]))
            return None
        if before is not None:
            layers = [torch.cat([kept.to(layer), layer]) for kept, layer in zip(before, layers, strict=True)]
        if len(tokens) - num_skipped > len(layers[0]):
            # The last token's states are not computed when it ends the answer, and nothing reads them.
            layers = [torch.cat([layer, layer.new_zeros(1, layer.shape[1])]) for layer in layers]
        shown = torch.tensor([tokens[0], *tokens[1 + num_skipped :]])
        return _kept(TargetText(shown, max(1, answer_start - num_skipped), layers[:-1], layers[-1])), num_skipped

    @property
    def unknown_first_tokens(self) -> list[int]:
        """Of long texts: their states are to be computed."""
        return [prefix[0] for prefix in self.unknown if len(prefix) == 1]

    def _prefix(self, prefix: tuple[int, ...]) -> list[Tensor] | None:
        """Its states, if they are known; it is the most recently used one then."""
        if (known := self.prefixes.pop(prefix, None)) is None:
            return None
        self.prefixes[prefix] = (self.clock(), known[1])
        return known[1]

    def _ask_for(self, prefix: tuple[int, ...]) -> None:
        self.unknown.pop(prefix, None)
        while len(self.unknown) >= MAX_PREFIXES:  # no text with the oldest was read
            del self.unknown[next(iter(self.unknown))]
        self.unknown[prefix] = self.clock()

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
    def head_bytes(self) -> int:
        """Of the head, if it is not the engine's own."""
        own = dict(self.decoder.lm_head.named_parameters(recurse=False)).get("weight")
        is_shared = own is not None and own.data_ptr() == self.head.weight.data_ptr()
        return 0 if is_shared else self.head.weight.untyped_storage().nbytes()


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
