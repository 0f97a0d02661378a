"""Turns logits into the distribution that a request samples from, in the same way for the target's p and the drafter's q."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.kernels.sample import sample_cpu
from fledge.kernels.truncation import TruncationParams
from fledge.sampling import SamplingParams


def adjust(
    logits_V: Tensor, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], banned: Sequence[int] = ()
) -> Tensor:
    """Applies penalties, bias, bans and processors for the token after `prompt + answer`. `kernels.adjust` does it on a GPU.

    `banned`: stop tokens, which are banned before `min_tokens`; if no other token is left, they are allowed.
    """
    logits = logits_V.float().clone()
    device = logits.device
    if params.repetition_penalty != 1 and (prompt or answer):
        seen = torch.tensor(sorted({*prompt, *answer}), device=device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and answer:
        ids, counts = torch.tensor(answer, device=device).unique(return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=device)
        logits[ids] += torch.tensor(list(params.logit_bias.values()), device=device, dtype=logits.dtype)
    if banned and len(answer) < params.min_tokens:
        logits[torch.tensor(list(banned), device=device)] = -torch.inf
    for *start, last in params.bad_word_ids:
        if [*prompt[-len(start) :], *answer[-len(start) :]][-len(start) :] == start or not start:
            logits[last] = -torch.inf
    for process in params.logits_processors:
        logits = process(answer, logits)
    if banned and logits.max() == -torch.inf:
        logits[torch.tensor(list(banned), device=device)] = 0
    return logits


LEAST_TOP_P = 1e-6  # smaller values also keep only the likeliest token, and may be 0 in fp32


def draw(logits_V: Tensor, params: SamplingParams, seed: int, position: int) -> int:
    """The token at `position` of an answer: the likeliest, or drawn with noise that depends on (seed, position) only."""
    if params.greedy:
        return int(logits_V.argmax())
    return int(sample_cpu(logits_V[None], *sampling_tensors(params, seed, position, logits_V.device))[0])


def sampling_tensors(
    params: SamplingParams, seed: int, position: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, TruncationParams | None]:
    """Temperature, seed, counter and truncation of one row, as arguments of `kernels.sample`."""
    temperature = torch.tensor([0.0 if params.greedy else params.temperature], device=device)
    numbers = torch.tensor([[seed], [position]], device=device)
    truncation = None
    if params.truncates:
        top_p, min_p = (torch.tensor([x], device=device) for x in (max(params.top_p, LEAST_TOP_P), params.min_p))
        truncation = TruncationParams(top_p, torch.tensor([max(params.top_k, 0)], device=device), min_p)
    return temperature, numbers[0], numbers[1], truncation
