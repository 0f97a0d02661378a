"""The chunked loss against a direct implementation, including gradients."""

from __future__ import annotations

import pytest
import torch

from fledge.training.objective import DraftLoss, auto_chunk_rows
from fledge.training.targets.target import Head

STEPS, ROWS, SIZE, VOCAB, DRAFT = 3, 20, 8, 24, 10


def setting():
    torch.manual_seed(0)
    ids = torch.randperm(VOCAB)[:DRAFT].sort().values
    head = Head(torch.randn(VOCAB, SIZE, dtype=torch.float64))
    target_hidden = torch.randn(ROWS, SIZE, dtype=torch.float64)
    hidden = [torch.randn(ROWS, SIZE, dtype=torch.float64, requires_grad=True) for _ in range(STEPS)]
    weight = torch.randn(DRAFT, SIZE, dtype=torch.float64, requires_grad=True)
    scored = torch.tensor([1, 2, 5, 6, 7, 12, 13, 0])  # the last one is padding
    valid = torch.ones(STEPS, 8, dtype=torch.bool)
    valid[:, -1] = False
    valid[1:, 0] = False  # row −1 and before: outside the document
    valid[2, 1] = False
    step_weight = torch.tensor([0.5, 0.4, 0.3])
    return ids, head, target_hidden, hidden, weight, scored, valid, step_weight


def textbook(kind, lk_weight, ids, head, target_hidden, hidden, weight, scored, valid, step_weight):
    total = 0.0
    for j in range(STEPS):
        for column, s in enumerate(scored.tolist()):
            if not valid[j, column]:
                continue
            p = (target_hidden[s] @ head.weight.T).softmax(-1)[ids]
            p = p / p.sum()
            q = (hidden[j][s - 1 - j] @ weight.T).softmax(-1)
            kl, lk = -(p * q.log()).sum(), -torch.minimum(p, q).sum().log()
            share = {"kl": 0.0, "lk": 1.0, "mix": lk_weight}[kind]
            total = total + step_weight[j] * ((1 - share) * kl + share * lk)
    return total


@pytest.mark.parametrize("kind", ["kl", "lk", "mix"])
@pytest.mark.parametrize("chunk", [2, 3, 8])
def test_equals_the_textbook_loss(kind, chunk):
    ids, head, target_hidden, hidden, weight, scored, valid, step_weight = setting()
    loss_of = DraftLoss(head, ids, kind, 0.3, chunk_rows=chunk)
    loss, _ = loss_of(hidden, weight, target_hidden, scored, valid, step_weight)
    (2 * loss).backward()
    got = [x.grad.clone() for x in (*hidden, weight)]
    for x in (*hidden, weight):
        x.grad = None
    expected = textbook(kind, 0.3, ids, head, target_hidden, hidden, weight, scored, valid, step_weight)
    (2 * expected).backward()
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    for a, b in zip(got, [x.grad for x in (*hidden, weight)], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_accuracy_counts_tokens_outside_the_draft_vocabulary_as_misses():
    ids, head, target_hidden, hidden, weight, scored, valid, step_weight = setting()
    _, metrics = DraftLoss(head, ids, chunk_rows=4)(hidden, weight, target_hidden, scored, valid, step_weight, measure=True)
    hits, acceptance = torch.zeros(STEPS), torch.zeros(STEPS)
    for j in range(STEPS):
        for column, s in enumerate(scored.tolist()):
            if valid[j, column]:
                p = (target_hidden[s] @ head.weight.T).softmax(-1)
                q = (hidden[j][s - 1 - j] @ weight.T).softmax(-1)
                hits[j] += bool(ids[q.argmax()] == p.argmax())
                acceptance[j] += torch.minimum(p[ids], q).sum().item()
    torch.testing.assert_close(metrics.hits_K, hits)
    torch.testing.assert_close(metrics.acceptance_K, acceptance)


def test_a_frozen_head_gets_no_gradient():
    ids, head, target_hidden, hidden, weight, scored, valid, step_weight = setting()
    frozen = weight.detach()
    loss, _ = DraftLoss(head, ids, chunk_rows=4)(hidden, frozen, target_hidden, scored, valid, step_weight)
    loss.backward()
    assert frozen.grad is None
    assert hidden[0].grad.abs().sum() > 0


def test_head_variants():
    torch.manual_seed(0)
    weight, hidden = torch.randn(6, 4), torch.randn(3, 4)
    head = Head(weight, bias=torch.arange(6.0), scale=0.5, softcap=3.0)
    expected = 3.0 * torch.tanh((hidden @ weight.T + torch.arange(6.0)) * 0.5 / 3.0)
    torch.testing.assert_close(head(hidden), expected)
    torch.testing.assert_close(head.rows(torch.tensor([1, 4]))(hidden), expected[:, [1, 4]])


@pytest.mark.parametrize(("steps", "vocabulary"), [(5, 16384), (7, 151936), (1, 100)])
def test_chunks_are_powers_of_two_of_a_bounded_size(steps, vocabulary):
    rows = auto_chunk_rows(steps, vocabulary)
    assert rows & (rows - 1) == 0
    assert rows == 128 or rows * steps * vocabulary <= 170_000_000
