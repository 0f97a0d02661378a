"""N-gram drafting on the device equals the host's index, and the kernel equals its reference."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels import ngram
from fledge.kernels.ngram import ngram_drafts, ngram_drafts_reference, ngram_drafts_triton
from fledge.speculation.methods.ngram import _NgramIndex
from tests.kernels.support import device_of_kernels, runs_triton


def random_texts(num_rows: int, width: int, alphabet: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random texts and lengths. Tokens after a text's end look like text, so that reading them changes the drafts."""
    tokens = torch.randint(0, alphabet, (num_rows, width), dtype=torch.int32)
    lengths = torch.randint(1, width + 1, (num_rows,), dtype=torch.int32)
    lengths[: min(num_rows, 6)] = torch.arange(1, 7)[:num_rows]
    return tokens.to(device), lengths.to(device)


def expected(text: list[int], depth: int, longest: int, shortest: int) -> list[int]:
    found = _NgramIndex(longest, shortest).lookup(text, depth)
    return found + [text[-1]] * (depth - len(found))


@pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (3, 3), (5, 1)])
@pytest.mark.parametrize(("alphabet", "depth"), [(2, 6), (5, 4), (40, 1)])
def test_drafts_equal_those_of_the_index(alphabet, depth, longest, shortest):
    tokens, lengths = random_texts(60, 50, alphabet, "cpu")
    drafts = ngram_drafts(tokens, lengths, torch.ones(60, dtype=torch.int32), 60, depth, longest, shortest)
    assert drafts.dtype == torch.int64
    for row, length in enumerate(lengths.tolist()):
        assert drafts[row].tolist() == expected(tokens[row, :length].tolist(), depth, longest, shortest)


def test_drafts_of_known_texts():
    texts = [[1, 2, 3, 9, 2, 3], [4, 4, 4], [5, 6, 7], [1, 2, 3, 4, 7, 3, 4, 8, 2, 3, 4], [8]]
    tokens = torch.zeros(6, 16, dtype=torch.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
    lengths = torch.tensor([*map(len, texts), 0], dtype=torch.int32)
    drafts = ngram_drafts(tokens, lengths, torch.ones(6, dtype=torch.int32), 6, 3)
    # a match; a match that overlaps the end and continues past it; no match; a match of three tokens is preferred to a more
    # recent one of two; one token; no text
    assert drafts.tolist() == [[9, 2, 3], [4, 4, 4], [7, 7, 7], [7, 3, 4], [8, 8, 8], [0, 0, 0]]


def test_inactive_rows_repeat_their_last_token():
    tokens = torch.tensor([[1, 2, 3, 1, 2]] * 2, dtype=torch.int32)
    drafts = ngram_drafts(tokens, torch.tensor([5, 5]), torch.tensor([1, 0]), 2, 2)
    assert drafts.tolist() == [[3, 1], [2, 2]]


def test_drafts_of_a_growing_text_equal_those_of_the_index():
    tokens, _ = random_texts(5, 64, 3, "cpu")
    indexes = [_NgramIndex(4, 2) for _ in tokens]
    lengths = torch.tensor([1, 4, 9, 2, 7], dtype=torch.int32)
    for _ in range(12):
        drafts = ngram_drafts(tokens, lengths, torch.ones(5, dtype=torch.int32), 5, 4)
        for row, length in enumerate(lengths.tolist()):
            text = tokens[row, :length].tolist()
            found = indexes[row].lookup(text, 4)
            assert drafts[row].tolist() == found + [text[-1]] * (4 - len(found))
        lengths += torch.randint(0, 4, (5,), dtype=torch.int32)


class TestKernel:
    pytestmark = runs_triton

    @pytest.mark.parametrize(("longest", "shortest"), [(4, 2), (3, 3), (5, 1)])
    @pytest.mark.parametrize(("alphabet", "depth"), [(2, 6), (30, 5), (1000, 1)])
    def test_equals_the_reference(self, alphabet, depth, longest, shortest, monkeypatch):
        monkeypatch.setattr(ngram, "BLOCK", 16)  # many blocks per text
        device = device_of_kernels()
        tokens, lengths = random_texts(12, 100, alphabet, device)
        active = (torch.arange(12, device=device) % 5 != 4).int()
        lengths[7] = 0
        arguments = (tokens, lengths, active, 10, depth, longest, shortest)
        assert torch.equal(ngram_drafts_triton(*arguments), ngram_drafts_reference(*arguments))
