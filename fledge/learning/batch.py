"""A training step's batch from samples: one row of texts with their hidden states; and the memory that the step works with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.config import DrafterConfig
from fledge.drift.texts import TargetText
from fledge.learning.config import LearnConfig
from fledge.training.data.packing import PackedBatch
from fledge.training.objective import auto_chunk_rows
from fledge.training.targets.target import TargetStates


def pack(texts: Sequence[TargetText], length: int) -> tuple[PackedBatch, TargetStates]:
    """One row with one text after the other, and their hidden states beside it; padding is zero."""
    total = sum(len(text.tokens_T) for text in texts)
    assert total <= length, "more tokens than a batch holds"
    lengths = [len(text.tokens_T) for text in texts]
    tokens = torch.zeros(1, length, dtype=torch.long)
    positions, document = torch.zeros_like(tokens), torch.zeros(1, length, dtype=torch.int32)
    loss = torch.zeros(1, length, dtype=torch.bool)
    tokens[0, :total] = torch.cat([text.tokens_T for text in texts])
    at = 0
    for number, (text, size) in enumerate(zip(texts, lengths, strict=True), 1):
        positions[0, at : at + size] = torch.arange(size)
        document[0, at : at + size] = number
        loss[0, at + max(text.answer_start, 1) : at + size] = True
        at += size

    def row(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        return torch.cat([joined, joined.new_zeros(length - total, joined.shape[1])])

    taps = [row(layer) for layer in zip(*(text.taps for text in texts), strict=True)]
    hidden = row([text.hidden_TD for text in texts if text.hidden_TD is not None])
    return PackedBatch(tokens, positions, document, loss), TargetStates(taps, hidden)


def chunk_rows(config: DrafterConfig, learn: LearnConfig) -> int:
    """Scored positions at once: a quarter of what a training run takes, whose device is its own."""
    return max(128, auto_chunk_rows(learn.ttt_steps, config.draft_vocab_size) // 4)


def activation_bytes(config: DrafterConfig, learn: LearnConfig) -> int:
    """What a training step works with, about: six tensors of logits, and 40 numbers a token, draft step and channel."""
    logits = 6 * 4 * learn.ttt_steps * chunk_rows(config, learn) * config.draft_vocab_size
    return logits + 40 * 2 * learn.ttt_steps * learn.batch_tokens * (config.hidden_size + config.intermediate_size // 2)
