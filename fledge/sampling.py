"""Sampling parameters of a request. Names and meanings follow vLLM's `SamplingParams`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from fledge.errors import RequestError

if TYPE_CHECKING:  # the server's HTTP side has no torch
    from torch import Tensor


@runtime_checkable
class TokenMask(Protocol):
    """A logits processor that only bans tokens (a grammar). It works on every device, because the host fills its bit mask."""

    def __call__(self, tokens: Sequence[int], logits: Tensor) -> Tensor: ...

    def fill(self, tokens: Sequence[int], mask_W: Tensor) -> None:
        """Clears the bits of the tokens that must not follow the answer `tokens`; int32, bit v % 32 of word v // 32."""
        ...


# (tokens produced so far, logits of the next one) -> logits
LogitsProcessor = Callable[[Sequence[int], "Tensor"], "Tensor"]

_NUMBERS: dict[str, type] = dict.fromkeys(("max_tokens", "min_tokens", "top_k", "seed", "logprobs"), Integral)
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_NUMBERS |= dict.fromkeys(_FLOATS, Real)
_OPTIONAL = ("seed", "logprobs")
MOST = 2**31 - 1  # largest token count: fits the device's int32 and exceeds any vocabulary or context


@dataclass(frozen=True)
class SamplingParams:
    """How an answer's tokens are chosen. Speculation is lossless with all of these parameters.

    Attributes:
        max_tokens: Maximum number of tokens of the answer.
        min_tokens: Number of tokens before which the answer cannot stop.
        temperature: 0 is greedy.
        top_p: Nucleus sampling; 1 is off.
        top_k: 0 or -1 is off.
        min_p: Drops tokens whose probability is below this fraction of the most likely token's.
        repetition_penalty: Penalty for tokens of the prompt and the answer; 1 is off.
        presence_penalty: Penalty for tokens that are already in the answer.
        frequency_penalty: Penalty for each occurrence of a token in the answer.
        logit_bias: Token id to a value that is added to its logit.
        bad_words: Texts that must not appear in the answer.
        bad_word_ids: The same as token ids; set by the engine (`tokenizer.bad_word_token_ids`).
        stop: Strings that end the answer.
        stop_token_ids: Token ids that end it.
        ignore_eos: Continue after the end token.
        include_stop_str_in_output: Keep the stop string in the text.
        skip_special_tokens: Leave control tokens out of the text.
        seed: The same seed gives the same answer, with and without speculation.
        logprobs: Number of alternative tokens to report with each token.
        logits_processors: Functions (tokens so far, logits) -> logits; on a CPU only.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] = ()
    bad_word_ids: Sequence[Sequence[int]] = ()
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "bad_words", tuple(self.bad_words or ()) if not isinstance(self.bad_words, str) else None)
        object.__setattr__(self, "bad_word_ids", tuple(tuple(word) for word in self.bad_word_ids or ()))
        for name, kinds in _NUMBERS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise RequestError(f"{name} must be {'a whole number' if kinds is Integral else 'a number'}, not {value!r:.40}")
        for name in ("max_tokens", "min_tokens", "top_k"):
            object.__setattr__(self, name, min(getattr(self, name), MOST))
        if not isinstance(self.logit_bias, Mapping | None):
            raise RequestError("logit_bias must map token ids to numbers")
        biases: Iterable[object] = (self.logit_bias or {}).values()
        checks = {
            "stop_token_ids must be token ids": all(isinstance(token, Integral) for token in self.stop_token_ids),
            "bad_words must be a list of texts that are not empty": self.bad_words is not None
            and all(isinstance(word, str) and word.strip() for word in self.bad_words),
            "bad_word_ids must be lists of token ids": all(word and all(map(_is_token, word)) for word in self.bad_word_ids),
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "min_tokens must lie between 0 and max_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "temperature must be 0 (greedy) or positive": 0 <= self.temperature < float("inf"),
            "top_p must lie in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be -1 or 0 (off) or positive": self.top_k >= -1,
            "min_p must lie in [0, 1]": 0 <= self.min_p <= 1,
            "repetition_penalty must lie in [0.01, 100]": 0.01 <= self.repetition_penalty <= 100,
            "presence_penalty must lie in [-2, 2]": -2 <= self.presence_penalty <= 2,
            "frequency_penalty must lie in [-2, 2]": -2 <= self.frequency_penalty <= 2,
            "logit_bias values must lie in [-100, 100]": all(
                isinstance(bias, Real) and -100 <= float(bias) <= 100 for bias in biases
            ),
            "stop strings must be text and not empty": all(isinstance(one, str) and one for one in stop),
            "logprobs must lie between 0 and 20": self.logprobs is None or 0 <= self.logprobs <= 20,
        }
        for rule, holds in checks.items():
            if not holds:
                raise RequestError(rule)

    def for_answer(self, seed: int | None, logits_processors: Sequence[LogitsProcessor]) -> SamplingParams:
        """A copy for another answer to the same request. Its other fields are shared and not checked again."""
        other = copy.copy(self)
        object.__setattr__(other, "seed", seed)
        object.__setattr__(other, "logits_processors", logits_processors)
        return other

    @property
    def greedy(self) -> bool:
        # Below this, logits / temperature overflows, and the distribution has all its mass on one token anyway.
        return self.temperature < 1e-5

    @property
    def truncates(self) -> bool:
        """Whether sampling is restricted to a part of the vocabulary (top-p, top-k, min-p)."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def has_row_options(self) -> bool:
        """Whether there are penalties, biases or bad words, for which `kernels.adjustments` keeps state per row."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty or self.frequency_penalty
        return bool(penalties or self.logit_bias or self.bad_word_ids)

    @property
    def token_masks(self) -> list[TokenMask]:
        """The logits processors that only ban tokens (grammars)."""
        return [process for process in self.logits_processors if isinstance(process, TokenMask)]

    @property
    def adjusts_logits(self) -> bool:
        """Whether anything changes the network's logits: penalties, biases, bans, processors."""
        return bool(self.has_row_options or self.bad_words or self.min_tokens or self.logits_processors)


def _is_token(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def check_params(params: SamplingParams, vocab_size: int, eos_token_ids: Collection[int] = ()) -> None:
    """Refuses parameters that do not fit this vocabulary, before they enter a batch with other requests."""
    named: dict[str, Iterable[object]] = {
        "logit_bias": params.logit_bias or (),
        "stop_token_ids": params.stop_token_ids,
        "bad_word_ids": [token for word in params.bad_word_ids for token in word],
    }
    for name, tokens in named.items():
        for token in tokens:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise RequestError(f"{name} names token {token}, outside the vocabulary of {vocab_size}")
    if params.min_tokens:
        # End tokens are banned until min_tokens is reached, so at least one other token must remain.
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        if len(ends) >= vocab_size:
            raise RequestError("min_tokens cannot be reached: stop_token_ids name every token of the vocabulary")
