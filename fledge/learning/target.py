"""The served target in the role of the training target: its served head and embedding, and hidden states of texts."""

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

# Type of kept hidden states. bf16 has fp32's range, which massive activations of first tokens need, in half of the bytes.
KEPT_DTYPE = torch.bfloat16
# Prefixes that many prompts share, such as a system prompt.
PREFIX_TOKENS, MAX_PREFIXES = 128, 16
# Fewest tokens that must remain of a long text whose prefix was cached. Its hidden states still depend on the missing prefix.
LEAST_CUT_TOKENS = 16
# Longest text whose hidden states are computed again if they were not collected. On a CPU this many (the length of a sample)
# take 0.1 s; a GPU reads 8,192 in less.
MOST_READ_TOKENS = {"cpu": 256, "cuda": 8192}


def training_dtype(device: torch.device) -> torch.dtype:
    """Returns the type of a training step's matrix products, independent of the type in which the target is served."""
    return torch.float32 if device.type == "cpu" else torch.bfloat16


class ServedTarget(Target):
    """Shares all weights with the engine's decoder, whatever format they are served in."""

    def __init__(self, decoder: Decoder, taps: Sequence[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.decoder, self.taps, self.clock = decoder, tuple(taps), clock
        self.device = decoder.norm.weight.device
        self.vocab_size, self.hidden_size = decoder.config.vocab_size, decoder.config.hidden_size
        self.embedding = decoder.embed_tokens
        weight = linear_weight(decoder.lm_head, training_dtype(self.device))
        # Prefix to (time of the last request with it, its hidden states by layer), in order of last use.
        self.prefixes: dict[tuple[int, ...], tuple[float, list[Tensor]]] = {}
        self.unknown: dict[tuple[int, ...], float] = {}  # prefixes without states; `read` adds them from texts that have them
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
        """Makes a text from `states`, which serving passes gave from position `start` on: the taps and, last, the residual
        stream before the final norm. Also returns how many tokens after the first are left out to keep only `max_states`.

        Returns None if there are too few states, or if those before `start`, which was a prefix-cache hit, are not known yet.
        Never waits for the device, because requests are running.
        """
        states = [state[: len(tokens) - start] for state in states]
        if len(tokens) - start - len(states[0]) > 1 or not len(states[0]):
            return None
        layers = [*states[:-1], self.decoder.norm(states[-1].to(self.decoder.dtype))]
        before = self._prefix(tuple(tokens[:start])) if 0 < start <= PREFIX_TOKENS else None
        num_skipped = 0
        if start and before is None and len(tokens) > max_states:
            # A long text is cut anyway, so only the first token's states are needed; they depend on that token alone.
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
            # If the last token ends the answer, its states are not computed; nothing reads them.
            layers = [torch.cat([layer, layer.new_zeros(1, layer.shape[1])]) for layer in layers]
        shown = torch.tensor([tokens[0], *tokens[1 + num_skipped :]])
        return _kept(TargetText(shown, max(1, answer_start - num_skipped), layers[:-1], layers[-1])), num_skipped

    @property
    def unknown_first_tokens(self) -> list[int]:
        """First tokens of long texts whose states must still be computed."""
        return [prefix[0] for prefix in self.unknown if len(prefix) == 1]

    def _prefix(self, prefix: tuple[int, ...]) -> list[Tensor] | None:
        """Returns the states of a prefix if they are known, and marks it as the most recently used one."""
        if (known := self.prefixes.pop(prefix, None)) is None:
            return None
        self.prefixes[prefix] = (self.clock(), known[1])
        return known[1]

    def _ask_for(self, prefix: tuple[int, ...]) -> None:
        self.unknown.pop(prefix, None)
        while len(self.unknown) >= MAX_PREFIXES:  # drop the one that was requested longest ago
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
        """Drops prefixes that no request has had since `time`."""
        self.unknown = {prefix: at for prefix, at in self.unknown.items() if at > time}
        self.prefixes = {prefix: (at, layers) for prefix, (at, layers) in self.prefixes.items() if at > time}

    def release(self) -> None:
        """Frees everything that does not belong to the engine, after learning has stopped."""
        self.forget_until(math.inf)
        del self.head, self.lm_head

    @property
    def num_channels(self) -> int:
        """Channels of one token's kept states."""
        return (len(self.taps) + 1) * self.hidden_size

    def bytes_per_token(self) -> int:
        return self.num_channels * KEPT_DTYPE.itemsize + 8

    @property
    def head_bytes(self) -> int:
        """Memory of the head; 0 if it is the engine's own."""
        own = dict(self.decoder.lm_head.named_parameters(recurse=False)).get("weight")
        is_shared = own is not None and own.data_ptr() == self.head.weight.data_ptr()
        return 0 if is_shared else self.head.weight.untyped_storage().nbytes()


def _kept(text: TargetText) -> TargetText:
    # Copies, because a slice would keep the whole pass in memory and inference-mode tensors cannot be used in training.
    hidden = None if text.hidden_TD is None else text.hidden_TD.to(KEPT_DTYPE, copy=True)
    return replace(
        text, tokens_T=text.tokens_T.cpu().clone(), taps=[tap.to(KEPT_DTYPE, copy=True) for tap in text.taps], hidden_TD=hidden
    )


class _PlainHead(nn.Module):
    """The target's head for a drafter without its own; casts its input to the type of the weights."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD, requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.to(self.weight.dtype), self.weight)


def linear_weight(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """Returns a linear's weights [O, I], unpacked if they are packed or quantised."""
    if isinstance(module, QuantizedLinear):
        weight = dequantize(module.quantized)
        if module.order is not None:  # GPTQ's act-order: column j belongs to input order[j]
            weight = weight[:, module.order.argsort()]
    elif _is_quantised_in_c(module):  # its outputs for unit vectors are its weights
        weight = (module(torch.eye(module.in_features)) - (0 if module.bias is None else module.bias)).t().contiguous()
    else:
        assert isinstance(module.weight, Tensor)
        weight = module.weight.detach()
    return weight if dtype is None else weight.to(dtype)


def _is_quantised_in_c(module: nn.Module) -> TypeGuard[PackedLinear]:
    if isinstance(module, GgufLinear) or not isinstance(module, PackedLinear):
        return False
    return module.native is not None and not module.native.is_plain
