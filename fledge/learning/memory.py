"""The maximum memory of learning, computed in one place: for the log line at start, and for the size of the KV cache."""

from __future__ import annotations

import torch

from fledge.config import DrafterConfig
from fledge.engine.executors.hidden_states import MAX_REQUESTS
from fledge.learning.config import LearnConfig
from fledge.learning.target import KEPT_DTYPE, MAX_PREFIXES, PREFIX_TOKENS
from fledge.models.drafter import EagleDrafter
from fledge.training.objective import auto_chunk_rows

# Bytes per weight, all fp32: master, mean, two moments, serving and previous weights, and a gradient or (gate) a candidate.
WEIGHT_BYTES = 7 * 4
# Logits that the loss computes per chunk on a CPU: 32 positions with a draft vocabulary of 16,384 take 0.09 s on one core.
CPU_LOGITS = 2**19


def memory_bytes(
    drafter: DrafterConfig, learn: LearnConfig, *, staged_bytes: int, head_bytes: int, fixed_tokens: int, running_bytes: int
) -> int:
    """Returns the memory of learning without a training step's activations. `staged_bytes`: of the staged weights, in served
    format, during a swap. `head_bytes`: of a copy of the target's head. `running_bytes`: of running requests' hidden states."""
    width = (len(drafter.aux_layer_ids) + 1) * drafter.target_hidden_size * KEPT_DTYPE.itemsize
    texts = MAX_PREFIXES * PREFIX_TOKENS * width + fixed_tokens * (width + 8)
    samples = learn.memory_mb * 2**20
    return WEIGHT_BYTES * num_weights(drafter) + staged_bytes + head_bytes + samples + texts + running_bytes


def reserved_bytes(drafter: DrafterConfig, learn: LearnConfig, *, copies_head: bool, max_model_len: int) -> int:
    """Returns the GPU memory to reserve before anything is loaded, including a training step's activations.

    `copies_head`: whether training needs a bf16 copy of the target's head because it is served in another format.
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


def loss_rows(config: DrafterConfig, learn: LearnConfig, *, is_cpu: bool) -> int:
    """Returns the scored positions per loss chunk: on a GPU a quarter of a training run's, which has the device to itself."""
    if is_cpu:
        return 1 << min(max(8, CPU_LOGITS // config.draft_vocab_size), 128).bit_length() - 1
    return max(128, auto_chunk_rows(learn.ttt_steps, config.draft_vocab_size) // 4)


def activation_bytes(config: DrafterConfig, learn: LearnConfig, *, is_cpu: bool) -> int:
    """Estimates a training step's activations: six tensors of logits, and 40 numbers per token, draft step and channel."""
    logits = 6 * 4 * learn.ttt_steps * loss_rows(config, learn, is_cpu=is_cpu) * config.draft_vocab_size
    return logits + 40 * 2 * learn.ttt_steps * learn.batch_tokens * (config.hidden_size + config.intermediate_size // 2)
