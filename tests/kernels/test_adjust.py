"""Logits adjusted on the device equal those of `speculation.distribution`, which works with lists, for every option."""

from __future__ import annotations

import random

import pytest
import torch

from fledge.errors import RequestError
from fledge.kernels.accept import RowState
from fledge.kernels.adjust import adjust_reference, adjust_triton
from fledge.kernels.adjustments import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_COUNT,
    Adjustments,
    RowOptions,
    check_bad_words,
    clear_rows,
    count_tokens_reference,
    count_tokens_triton,
    reset_rows,
)
from fledge.kernels.bits import num_words, pack_bits, unpack_bits
from fledge.sampling import SamplingParams
from fledge.speculation.distribution import adjust
from tests.kernels.support import KERNELS, running

VOCAB, ROWS, TEXT = 2090, 7, 60  # two blocks of the vocabulary, and a partly used last word of the bitmap
STOPS = [2, 33, 2089]
OPTIONS = {
    "none": {},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": -0.37},
    "penalties": {"repetition_penalty": 0.8, "presence_penalty": 1.1, "frequency_penalty": 0.53},
    "bias": {"logit_bias": {0: 3.3, 31: -100.0, 2089: 0.1}},
    "min_tokens": {"min_tokens": 6},
    "bad_words": {"bad_word_ids": "from the text"},
    "grammar": {"grammar": True},
    "nothing left": {"grammar": True, "min_tokens": 99},
}
MIXED = [
    ["penalties", "bias"],
    ["repetition", "min_tokens", "bad_words"],
    ["frequency", "bias", "min_tokens", "bad_words", "grammar"],
]


class Row:
    """A random request: its text, its draft and its options, as lists."""

    def __init__(self, rng: random.Random, names: list[str], depth: int) -> None:
        # Few ids, so that tokens repeat.
        self.prompt, self.answer, self.draft = (
            [rng.randrange(40) for _ in range(size)] for size in (rng.randint(1, 20), rng.randint(0, 12), depth)
        )
        options = {key: value for name in names for key, value in OPTIONS[name].items()}
        self.grammar = options.pop("grammar", False)
        self.allowed = [rng.sample(range(VOCAB), 200) for _ in range(depth + 1)]
        if "nothing left" in names:  # the grammar is complete at the second position: only stop tokens are allowed
            self.allowed[min(1, depth)] = STOPS
        if "bad_word_ids" in options:
            whole = self.prompt + self.answer + self.draft
            words = []
            for end in range(len(whole) - depth, len(whole) + 1):
                for size in (1, 2, 5, 7):  # some are longer than the text
                    words.append([*[39] * max(size - end, 0), *whole[max(end - size, 0) : end], rng.randrange(40)])
            options["bad_word_ids"] = [*rng.sample(words, min(len(words), 14)), [35], [36]]
        self.params = SamplingParams(max_tokens=200, **options)

    def expected(self, logits_TV: torch.Tensor) -> torch.Tensor:
        rows = []
        for t, logits in enumerate(logits_TV):
            params = self.params
            if self.grammar:

                def process(_answer, logits, t=t):
                    return torch.full_like(logits, -torch.inf).index_copy(0, ids := torch.tensor(self.allowed[t]), logits[ids])

                params = SamplingParams(**{**vars(params), "logits_processors": [process]})
            rows.append(adjust(logits, params, self.prompt, self.answer + self.draft[:t], STOPS))
        return torch.stack(rows)

    def options(self, row: int) -> RowOptions:
        params = self.params
        penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        return RowOptions(row, self.prompt, self.answer, *penalties, params.logit_bias or {}, params.bad_word_ids)


def on_device(rows: list[Row], where: list[int], depth: int, device: str) -> tuple[RowState, Adjustments, torch.Tensor]:
    """The rows' tensors on the device. All other values in them come from earlier requests."""
    adjustments = Adjustments.empty(ROWS, depth + 2, VOCAB, device)
    others = [Row(random.Random(index), ["penalties", "bias", "bad_words"], depth) for index in range(ROWS)]
    reset_rows(adjustments, [other.options(index) for index, other in enumerate(others)])
    adjustments.has_mask_R.fill_(1)
    reset_rows(adjustments, [row.options(at) for row, at in zip(rows, where, strict=True)])
    texts, drafts = torch.randint(0, 40, (ROWS, TEXT)), torch.randint(0, 40, (ROWS, depth + 1))
    lengths, answered, least = (torch.zeros(ROWS, dtype=torch.int32) for _ in range(3))
    for row, at in zip(rows, where, strict=True):
        whole = row.prompt + row.answer
        texts[at, : len(whole)], drafts[at, :depth] = torch.tensor(whole), torch.tensor(row.draft, dtype=torch.int64)
        lengths[at], answered[at], least[at] = len(whole), len(row.answer), row.params.min_tokens
        adjustments.has_mask_R[at] = int(row.grammar)
        for t in range(depth + 1):
            adjustments.mask_RTW[at, t] = torch.from_numpy(pack_bits(row.allowed[t], num_words(VOCAB)))
    state = RowState(
        active=torch.ones(ROWS, dtype=torch.int32),
        token=torch.zeros(ROWS, dtype=torch.int64),
        length=lengths,
        answered=answered,
        report=torch.zeros(ROWS, depth + 2, dtype=torch.int32),
        limit=answered,
        min_answer=least,
        depth_limit=answered,
        stop_bits=torch.from_numpy(pack_bits(STOPS, num_words(VOCAB))).repeat(ROWS, 1),
        tokens=texts.int(),
    )
    return RowState(*(tensor.to(device) for tensor in state)), adjustments, drafts.to(device)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("names", [[name] for name in OPTIONS] + MIXED, ids=" + ".join)
@pytest.mark.parametrize("depth", [0, 3])
def test_equals_the_list_implementation(kernel, names, depth):
    run, device = running(kernel, adjust_reference, adjust_triton)
    rng = random.Random(f"{names} {depth}")
    where = [4, 1, 6] if depth else [0, 1, 2]
    rows = [Row(rng, names, depth) for _ in where]
    state, adjustments, drafts = on_device(rows, where, depth, device)
    logits = (4 * torch.randn(len(rows) * (depth + 1), VOCAB)).bfloat16().to(device)
    found = run(logits, state, adjustments, drafts, depth + 1, torch.tensor(where, device=device) if depth else None)
    assert found.dtype == torch.float32
    expected = torch.cat([row.expected(part) for row, part in zip(rows, logits.cpu().split(depth + 1), strict=True)])
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
    assert torch.equal(expected, logits.cpu().float()) == (names == ["none"])


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_with_different_options(kernel):
    run, device = running(kernel, adjust_reference, adjust_triton)
    rng = random.Random(3)
    rows = [Row(rng, names, 3) for names in (["penalties"], ["none"], ["bad_words"], MIXED[2], ["nothing left"])]
    state, adjustments, drafts = on_device(rows, list(range(5)), 3, device)
    logits = 4 * torch.randn(5 * 4, VOCAB, device=device)
    found = run(logits, state, adjustments, drafts, 4).cpu()
    expected = torch.cat([row.expected(part) for row, part in zip(rows, logits.cpu().split(4), strict=True)])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    # The grammar allows only stop tokens, which min_tokens bans: they stay allowed.
    assert (found[17] > -torch.inf).nonzero()[:, 0].tolist() == STOPS


@pytest.mark.parametrize("kernel", KERNELS)
def test_logits_of_a_cleared_row_are_unchanged(kernel):
    run, device = running(kernel, adjust_reference, adjust_triton)
    rows = [Row(random.Random(1), ["penalties", "bias", "bad_words", "grammar"], 1)] * 3
    state, adjustments, drafts = on_device(rows, [0, 1, 2], 1, device)
    clear_rows(adjustments, torch.tensor([0, 2], device=device))
    logits = torch.randn(6, VOCAB, device=device)
    found = run(logits, state, adjustments, drafts, 2)
    changed = [not torch.equal(one, other) for one, other in zip(found, logits, strict=True)]
    assert changed == [False, False, True, True, False, False]


@pytest.mark.parametrize("kernel", KERNELS)
def test_nan_logits_stay_nan(kernel):
    run, device = running(kernel, adjust_reference, adjust_triton)
    rows = [Row(random.Random(1), ["none"], 0)] * 2
    state, adjustments, drafts = on_device(rows, [0, 1], 0, device)
    logits = torch.randn(2, VOCAB, device=device)
    logits[1] = torch.nan
    torch.testing.assert_close(run(logits, state, adjustments, drafts, 1), logits, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("indexed", [False, True])
def test_count_tokens(kernel, indexed):
    run, device = running(kernel, count_tokens_reference, count_tokens_triton)
    adjustments = Adjustments.empty(ROWS, 1, VOCAB, device)
    answers = [[5, 5, 9], [], [2089] * 4]
    where = [5, 0, 3] if indexed else [0, 1, 2]
    reset_rows(adjustments, [RowOptions(row, answer=answer, presence=1.0) for row, answer in zip(where, answers, strict=True)])
    adjustments.counts_RV[where[1], 8] = MAX_COUNT - 1
    tokens = torch.tensor([[5, 7, 5, 5], [8, 8, 8, 3], [1, 2, 3, 4]], device=device)
    counts = torch.tensor([3, 4, 0], dtype=torch.int32, device=device)
    run(adjustments, tokens, counts, torch.tensor(where, device=device) if indexed else None)
    found = [{int(id): int(row[id]) for id in row.nonzero()[:, 0]} for row in adjustments.counts_RV[where].cpu()]
    assert found == [{5: 4, 7: 1, 9: 1}, {3: 1, 8: MAX_COUNT}, {2089: 4}]
    assert int((adjustments.counts_RV != 0).sum()) == 6


def test_reset_removes_the_previous_requests_options():
    adjustments = Adjustments.empty(2, 1, VOCAB, "cpu")
    adjustments.has_mask_R.fill_(1)
    words = [[1, 2], list(range(MAX_BAD_WORD_TOKENS)), [44]]
    first = RowOptions(1, [3, 3, 2089], [4, 4], repetition=1.5, presence=0.5, bias={7: 1.5}, bad_words=words)
    reset_rows(adjustments, [first])
    assert unpack_bits(adjustments.prompt_RW[1:], VOCAB)[0].nonzero()[:, 0].tolist() == [3, 2089]
    assert (int(adjustments.counts_RV[1, 4]), float(adjustments.bias_RV[1, 7])) == (2, 1.5)
    assert float(adjustments.bias_RV[1, 44]) == -torch.inf
    assert adjustments.bad_words_RBL[1, :3].tolist() == [[-1] * 6 + [1, 2], list(range(8)), [-1] * 8]
    assert adjustments.has_mask_R.tolist() == [1, 0]
    reset_rows(adjustments, [RowOptions(1, [5], presence=0.1)])
    empty = Adjustments.empty(2, 1, VOCAB, "cpu")
    for name in ("counts_RV", "bias_RV", "bad_words_RBL", "repetition_R"):
        assert torch.equal(getattr(adjustments, name), getattr(empty, name)), name
    assert unpack_bits(adjustments.prompt_RW[1:], VOCAB)[0].nonzero()[:, 0].tolist() == [5]


def test_bad_words_above_the_limits_are_refused():
    check_bad_words([[1]] * 1000 + [list(range(MAX_BAD_WORD_TOKENS))] * MAX_BAD_WORDS)
    for words in ([list(range(MAX_BAD_WORD_TOKENS + 1))], [[1, 2]] * (MAX_BAD_WORDS + 1)):
        with pytest.raises(RequestError, match="bad_words"):
            check_bad_words(words)
