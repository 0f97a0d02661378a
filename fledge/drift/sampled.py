"""The target's own probabilities of what it wrote: with them a rollout tells what sampled speculation accepts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fledge.drift.texts import TargetText
from fledge.models.decoder import Decoder

HEAD_ROWS = 1024  # rows of the target's whole vocabulary held at once


@torch.no_grad()
def target_probabilities(decoder: Decoder, texts: Sequence[TargetText], depth: int, temperature: float) -> Tensor:
    """[M, J]: of the token that draft j of each row stands for, at the temperature that the texts were sampled at.

    1 past a text's end, where nothing is accepted anyway.
    """
    parts = []
    for text in texts:
        first = text.answer_start  # row 0 drafts x_{start + 1}, which the state at `start` gives
        states, wanted = text.hidden_TD[first:-1], text.tokens_T[first + 1 :]
        found = [
            (decoder.logits(state).float() / temperature).softmax(-1).gather(1, token[:, None])[:, 0]
            for state, token in zip(states.split(HEAD_ROWS), wanted.split(HEAD_ROWS), strict=True)
        ]
        p = torch.cat([*found, torch.ones(depth, device=states.device)])
        parts.append(p.unfold(0, depth, 1)[: text.num_rows])
    return torch.cat(parts)
