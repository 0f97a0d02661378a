"""Compares answers with the plain network's, for `gpu.py`: they may differ only at ties."""

from __future__ import annotations

import torch
from gpu_kernels import DEVICE
from torch import Tensor

from fledge.models.decoder import Decoder, causal_attend

# In bf16, logits between 16 and 32 have a spacing of 1/8; both paths may be off by one such step.
TIE = 0.5


@torch.inference_mode()
def logits_of(decoder: Decoder, prompt: list[int], answer: list[int]) -> Tensor:
    text = torch.tensor(prompt + answer[:-1], device=DEVICE)
    hidden, _ = decoder(text, torch.arange(len(text), device=DEVICE), causal_attend())
    return decoder.logits(hidden[len(prompt) - 1 :]).float()


def against_network(decoder: Decoder, prompts: list[list[int]], answers: list[list[int]]) -> dict[str, object]:
    """Runs the plain network over each answer; returns how far the answer's logits are below the network's best ones."""
    widest, differing, total = 0.0, 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        logits = logits_of(decoder, prompt, answer)
        gaps = logits.max(-1).values - logits.gather(-1, torch.tensor(answer, device=DEVICE)[:, None])[:, 0]
        widest, differing, total = max(widest, float(gaps.max())), differing + int((gaps > 0).sum()), total + len(answer)
    return {"tokens": total, "differing": differing, "widest_gap": widest, "ties_only": widest <= TIE}


def partings(decoder: Decoder, prompts: list[list[int]], plain: list[list[int]], other: list[list[int]]) -> dict[str, object]:
    """For each pair of answers that differ, the gap between the network's logits of the two tokens at the first difference."""
    gaps = []
    for prompt, one, two in zip(prompts, plain, other, strict=True):
        place = next((index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), None)
        if place is not None:
            row = logits_of(decoder, prompt, one)[place]
            gaps.append(abs(float(row[one[place]] - row[two[place]])))
    return {"equal": len(plain) - len(gaps), "parted": len(gaps), "gaps": gaps, "ties_only": max(gaps, default=0.0) <= TIE}
