"""The sampling options of a batch's rows (penalties, bias, bans, grammar masks) as device tensors, read by `kernels.adjust`.

The host fills a row when a request with options takes it. From then on the device counts the answer's tokens itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fledge.errors import RequestError
from fledge.kernels.bits import num_words, pack_bits
from fledge.kernels.triton_support import by_device, jit, let_next_start, next_power_of_2, overlap, tl, wait_for_inputs

MAX_BAD_WORDS = 16  # bad words of several tokens; single tokens are banned by their bias
MAX_BAD_WORD_TOKENS = 8
MAX_COUNT = 32767  # int16
# Bits of `options_R`. Tensors of options that a row does not use are not read and may hold values of the row's last request.
PENALTIES, BIAS, BAD_WORDS = 1, 2, 4


class Adjustments(NamedTuple):
    """One entry per row of the running batch. `count_tokens` changes `counts_RV`; the host sets the rest."""

    options_R: Tensor  # int32: PENALTIES | BIAS | BAD_WORDS
    repetition_R: Tensor  # float32
    presence_R: Tensor  # float32
    frequency_R: Tensor  # float32
    counts_RV: Tensor  # int16: how often each token is in the answer
    prompt_RW: Tensor  # int32 bits: tokens of the prompt
    bias_RV: Tensor  # float32; -inf: banned
    bad_words_RBL: Tensor  # int32, right-aligned, -1: no token
    has_mask_R: Tensor  # int32: 1 if `mask_RTW` applies
    mask_RTW: Tensor  # int32 bits: the tokens that the grammar allows at each verified position

    @classmethod
    def empty(cls, num_rows: int, num_positions: int, vocab_size: int, device: torch.device | str) -> Adjustments:
        """Tensors for `num_rows` rows without options. `num_positions`: most verified rows of a sequence."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        words = num_words(vocab_size)
        return cls(
            options_R=zeros(),
            repetition_R=zeros(dtype=torch.float32) + 1,
            presence_R=zeros(dtype=torch.float32),
            frequency_R=zeros(dtype=torch.float32),
            counts_RV=zeros(vocab_size, dtype=torch.int16),
            prompt_RW=zeros(words),
            bias_RV=zeros(vocab_size, dtype=torch.float32),
            bad_words_RBL=zeros(MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS) - 1,
            has_mask_R=zeros(),
            mask_RTW=zeros(num_positions, words) - 1,
        )


@dataclass(frozen=True)
class RowOptions:
    """The sampling options of a request that takes a row."""

    row: int
    prompt: Sequence[int] = ()
    answer: Sequence[int] = ()  # the answer so far, if the request was preempted
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[Sequence[int]] = ()

    @property
    def uses_penalties(self) -> bool:
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


def check_bad_words(words: Sequence[Sequence[int]]) -> None:
    """Raises if there are more or longer bad words than a row can hold."""
    longer = [word for word in words if len(word) > 1]
    if len(longer) > MAX_BAD_WORDS or max(map(len, longer), default=0) > MAX_BAD_WORD_TOKENS:
        raise RequestError(
            f"bad_words: at most {MAX_BAD_WORDS} words of several tokens are supported, of at most {MAX_BAD_WORD_TOKENS} "
            "tokens each (a word counts twice if a space before it changes its tokens)"
        )


def clear_rows(adjustments: Adjustments, rows_B: Tensor) -> None:
    """Clears the options of rows for new requests. Capturable."""
    adjustments.options_R.index_fill_(0, rows_B, 0)
    adjustments.has_mask_R.index_fill_(0, rows_B, 0)


def reset_rows(adjustments: Adjustments, new: Sequence[RowOptions]) -> None:
    """Sets the options of rows for new requests: one upload and a few index operations, none of which waits for the device."""
    if not new:
        return
    words = adjustments.prompt_RW.shape[1]
    options, factors = np.zeros(len(new), dtype=np.int64), np.zeros((len(new), 3))
    bits = np.zeros((len(new), words + words % 2), dtype=np.int32)
    bad = np.full((len(new), MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, dtype=np.int64)
    counted, biased = [np.zeros((3, 0), dtype=np.int64)], [(np.zeros((2, 0), dtype=np.int64), np.zeros(0))]
    for index, one in enumerate(new):
        bias, longer = dict(one.bias), [word for word in one.bad_words if len(word) > 1]
        bias |= {word[0]: -np.inf for word in one.bad_words if len(word) == 1}
        factors[index] = one.repetition, one.presence, one.frequency
        if one.uses_penalties:
            options[index] |= PENALTIES
            bits[index, :words] = pack_bits(one.prompt, words)
            ids, counts = np.unique(np.asarray(one.answer, dtype=np.int64), return_counts=True)
            counted.append(np.stack([np.full(len(ids), one.row), ids, counts.clip(max=MAX_COUNT)]))
        if bias:
            options[index] |= BIAS
            ids = np.fromiter(bias, dtype=np.int64)
            biased.append((np.stack([np.full(len(ids), one.row), ids]), np.fromiter(bias.values(), dtype=np.float64)))
        if longer:
            options[index] |= BAD_WORDS
            for place, word in enumerate(longer):
                bad[index, place, MAX_BAD_WORD_TOKENS - len(word) :] = word
    rows = np.array([one.row for one in new], dtype=np.int64)
    places, values = np.concatenate([ids for ids, _ in biased], 1), np.concatenate([values for _, values in biased])
    arrays = [rows, options, factors, bits.view(np.int64), bad, np.concatenate(counted, 1), places, values]
    rows_B, options_B, factors_B3, bits_BW, bad_BBL, counted_3K, places_2K, values_K = _upload(
        arrays, adjustments.options_R.device
    )
    a = adjustments
    for tensor, value in (
        (a.options_R, options_B),
        *zip((a.repetition_R, a.presence_R, a.frequency_R), factors_B3.unbind(1), strict=True),
        (a.prompt_RW, bits_BW.view(torch.int32)[:, :words]),
        (a.bad_words_RBL, bad_BBL),
    ):
        tensor.index_copy_(0, rows_B, value.to(tensor.dtype))
    for tensor in (a.counts_RV, a.bias_RV, a.has_mask_R):
        tensor.index_fill_(0, rows_B, 0)
    a.counts_RV.index_put_(tuple(counted_3K[:2]), counted_3K[2].to(a.counts_RV.dtype))
    a.bias_RV.index_put_(tuple(places_2K), values_K.to(a.bias_RV.dtype))


def _upload(arrays: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    """Uploads arrays of eight-byte numbers in one copy."""
    whole = torch.from_numpy(np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays]))
    if device.type != "cpu":
        whole = whole.pin_memory().to(device, non_blocking=True)
    parts = whole.split([array.size for array in arrays])
    return [
        (part.view(torch.float64) if array.dtype == np.float64 else part).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


def count_tokens_reference(adjustments: Adjustments, tokens_BT: Tensor, counts_B: Tensor, rows_B: Tensor | None = None) -> None:
    """Adds the first `counts_B` tokens of each row to the counts of its answer. `rows_B` None: the first rows."""
    rows = torch.arange(len(tokens_BT), device=tokens_BT.device) if rows_B is None else rows_B
    counts = adjustments.counts_RV
    for t in range(tokens_BT.shape[1]):
        tokens = tokens_BT[:, t].long()
        now = counts[rows, tokens]
        counts[rows, tokens] = torch.where((counts_B > t) & (now < MAX_COUNT), now + 1, now)


def count_tokens_triton(adjustments: Adjustments, tokens_BT: Tensor, counts_B: Tensor, rows_B: Tensor | None = None) -> None:
    batch, num_new = tokens_BT.shape
    assert tokens_BT.is_contiguous()
    _count_tokens[(batch,)](
        adjustments.counts_RV,
        tokens_BT,
        counts_B,
        rows_B if rows_B is not None else counts_B,
        VOCAB=adjustments.counts_RV.shape[1],
        NEW=num_new,
        PADDED=next_power_of_2(num_new),
        MOST=MAX_COUNT,
        HAS_ROWS=rows_B is not None,
        num_warps=1,
        **overlap(tokens_BT),
    )


count_tokens = by_device(count_tokens_triton, count_tokens_reference)


@jit
def _count_tokens(
    answer_counts_ptr,
    tokens_ptr,
    counts_ptr,
    rows_ptr,
    VOCAB: tl.constexpr,
    NEW: tl.constexpr,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    index = tl.program_id(0).to(tl.int64)
    wait_for_inputs(PDL)
    row = index
    if HAS_ROWS:
        row = tl.load(rows_ptr + index)
    at = tl.arange(0, PADDED)
    emitted = (at < NEW) & (at < tl.load(counts_ptr + index))
    tokens = tl.load(tokens_ptr + index * NEW + at, mask=emitted, other=-1)
    # For a token that was emitted several times, each occurrence stores the same sum.
    times = tl.zeros([PADDED], tl.int32)
    for t in tl.static_range(NEW):
        token = tl.load(tokens_ptr + index * NEW + t)
        times += ((tokens == token) & (t < tl.load(counts_ptr + index))).to(tl.int32)
    place = answer_counts_ptr + row * VOCAB + tokens
    now = tl.load(place, mask=emitted, other=0).to(tl.int32)
    tl.store(place, tl.minimum(now + times, MOST).to(tl.int16), mask=emitted)
