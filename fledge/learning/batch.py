"""A training step's batch from samples: rows of texts with their hidden states; and the memory that the step works with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.config import DrafterConfig
from fledge.learning.config import LearnConfig
from fledge.learning.samples import Sample
from fledge.training.data.packing import PackedBatch
from fledge.training.objective import auto_chunk_rows
from fledge.training.targets.target import TargetStates

# Logits that the loss computes at once on a CPU: 32 positions of a draft vocabulary of 16,384 take 0.09 s on one core.
CPU_LOGITS = 2**19


def micro_batches(samples: Sequence[Sample], room: int) -> list[list[Sample]]:
    """Samples in groups of at most `room` tokens; a longer one is alone."""
    groups: list[list[Sample]] = []
    left = 0
    for sample in samples:
        if sample.num_states > left or not groups:
            groups.append([])
            left = room
        groups[-1].append(sample)
        left -= sample.num_states
    return groups


def pack(samples: Sequence[Sample], length: int) -> tuple[PackedBatch, TargetStates]:
    """One row with one text after the other, and their hidden states beside it; padding is zero."""
    texts = [one.text for one in samples if one.text is not None]
    assert len(texts) == len(samples), "a text without hidden states"
    lengths = [len(text.tokens_T) for text in texts]
    total = sum(lengths)
    assert total <= length, "more tokens than a batch holds"
    tokens = torch.zeros(1, length, dtype=torch.long)
    positions, document = torch.zeros_like(tokens), torch.zeros(1, length, dtype=torch.int32)
    loss = torch.zeros(1, length, dtype=torch.bool)
    tokens[0, :total] = torch.cat([text.tokens_T for text in texts])
    at = 0
    for number, (sample, text, size) in enumerate(zip(samples, texts, lengths, strict=True), 1):
        # After the first token of a long text, so many are left out.
        positions[0, at + 1 : at + size] = torch.arange(1, size) + sample.num_skipped
        document[0, at : at + size] = number
        loss[0, at + max(text.answer_start, 1) : at + size] = True
        at += size

    def row(parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        return torch.cat([joined, joined.new_zeros(length - total, joined.shape[1])])

    taps = [row(layer) for layer in zip(*(text.taps for text in texts), strict=True)]
    hidden = row([text.hidden_TD for text in texts if text.hidden_TD is not None])
    return PackedBatch(tokens, positions, document, loss), TargetStates(taps, hidden)


def loss_rows(config: DrafterConfig, learn: LearnConfig, *, is_cpu: bool) -> int:
    """Scored positions at once: on a GPU a quarter of what a training run takes, whose device is its own."""
    if is_cpu:
        return 1 << min(max(8, CPU_LOGITS // config.draft_vocab_size), 128).bit_length() - 1
    return max(128, auto_chunk_rows(learn.ttt_steps, config.draft_vocab_size) // 4)


def activation_bytes(config: DrafterConfig, learn: LearnConfig, *, is_cpu: bool) -> int:
    """What a training step works with, about: six tensors of logits, and 40 numbers a token, draft step and channel."""
    logits = 6 * 4 * learn.ttt_steps * loss_rows(config, learn, is_cpu=is_cpu) * config.draft_vocab_size
    return logits + 40 * 2 * learn.ttt_steps * learn.batch_tokens * (config.hidden_size + config.intermediate_size // 2)
