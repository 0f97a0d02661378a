"""The memory that learning takes at most, counted once: for what is announced, and for what the KV cache must leave."""

from __future__ import annotations

import torch

from fledge.config import DrafterConfig
from fledge.engine.executors.hidden_states import MAX_REQUESTS
from fledge.learning.batch import activation_bytes
from fledge.learning.config import LearnConfig
from fledge.learning.target import KEPT_DTYPE, MAX_PREFIXES, PREFIX_TOKENS
from fledge.models.drafter import EagleDrafter

# Of each weight, in fp32: master, mean, two moments, the serving and the previous one; and a gradient or, in the gate, a
# candidate.
WEIGHT_BYTES = 7 * 4


def memory_bytes(
    drafter: DrafterConfig, learn: LearnConfig, *, staged_bytes: int, head_bytes: int, fixed_tokens: int, running_bytes: int
) -> int:
    """Apart from a training step's activations. `staged_bytes`: of the weights once more, as they are served, in a swap.
    `head_bytes`: of a copy of the target's head. `running_bytes`: of the hidden states of running requests."""
    width = (len(drafter.aux_layer_ids) + 1) * drafter.target_hidden_size * KEPT_DTYPE.itemsize
    texts = MAX_PREFIXES * PREFIX_TOKENS * width + fixed_tokens * (width + 8)
    samples = learn.memory_mb * 2**20
    return WEIGHT_BYTES * num_weights(drafter) + staged_bytes + head_bytes + samples + texts + running_bytes


def reserved_bytes(drafter: DrafterConfig, learn: LearnConfig, *, copies_head: bool, max_model_len: int) -> int:
    """Of a GPU's memory, before anything is on it; with what a training step works with.

    `copies_head`: the target's head is not served in bf16, which training reads.
    """
    width = (len(drafter.aux_layer_ids) + 1) * drafter.target_hidden_size
    announced = memory_bytes(
        drafter,
        learn,
        staged_bytes=2 * num_weights(drafter),
        head_bytes=2 * drafter.vocab_size * drafter.target_hidden_size if copies_head else 0,
        fixed_tokens=learn.fixed_texts * 2 * learn.fixed_tokens,  # prompts are about as long as answers
        running_bytes=MAX_REQUESTS * min(learn.sample_tokens, max_model_len) * width * 4,  # fp32 at most
    )
    return announced + activation_bytes(drafter, learn, is_cpu=False)


def num_weights(drafter: DrafterConfig) -> int:
    with torch.device("meta"):
        return sum(one.numel() for one in EagleDrafter(drafter).parameters())
