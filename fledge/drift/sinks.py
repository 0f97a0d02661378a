"""Where the target parks its attention: found from its own attention, not assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge.drift import templates
from fledge.drift.probes import attention_scores
from fledge.models.decoder import Decoder, causal_attend
from fledge.tokenizer import Tokenizer

# Tokens of each text that are looked at: the sink shows within a few dozen, and the cost grows with the square.
TOKENS = 256
# A column is called a sink when it draws this many times what it would if attention were uniform.
CLEAR_RATIO = 5.0
# What is asked where there are no texts at hand: where a target parks its attention hardly depends on what it reads.
# One question: an engine asks it when it starts, which takes 0.15 s of a CPU's 2.
ASKED = ("My sister bakes bread every Saturday. Last week it did not rise, though the flour and the oven were as always. Why?",)


@dataclass(frozen=True)
class Sink:
    column: int
    share: float  # of the attention of the text's second half, mean over heads, layers and texts
    uniform: float  # what uniform attention would give one column
    by_layer: list[float]
    runner_up: int
    runner_up_share: float

    @property
    def clear(self) -> bool:
        return self.share >= CLEAR_RATIO * self.uniform


def find_own_sink(decoder: Decoder, tokenizer: Tokenizer) -> Sink:
    """From a short question in the target's own chat template: for use before there are texts of it."""
    return find_sink(decoder, [templates.own(tokenizer, [{"role": "user", "content": text}]) for text in ASKED])


@torch.no_grad()
def find_sink(decoder: Decoder, texts: Sequence[Sequence[int]]) -> Sink:
    """The column with the highest average attention, over all heads and layers.

    Only the second half of each text asks: early tokens have few others to look at.
    """
    shares: list[Tensor] = []  # per text: [layers, columns]
    uniform = []
    shortest = min(min(len(text) for text in texts), TOKENS)
    for text in texts:
        tokens = torch.tensor(list(text[:TOKENS]), device=decoder.norm.weight.device)
        column = torch.arange(len(tokens), device=tokens.device)
        asking = column[len(tokens) // 2 :]
        layers: list[Tensor] = []

        def attend(layer, q, k, v, window, column=column, asking=asking, layers=layers):
            seen = column <= asking[:, None]
            if window is not None:
                seen = seen & (asking[:, None] - column < window)
            scores = attention_scores(q[asking], k).masked_fill(~seen[:, None], -torch.inf)
            layers.append(scores.softmax(-1).mean((0, 1))[:shortest])
            return causal_attend()(layer, q, k, v, window)

        decoder(tokens, column, attend, (), len(tokens))
        shares.append(torch.stack(layers))
        uniform.append(float((1 / (asking + 1.0)).mean()))
    by_layer = torch.stack(shares).mean(0)
    mean = by_layer.mean(0)
    best = mean.topk(min(2, len(mean)))
    column = int(best.indices[0])
    return Sink(
        column,
        float(best.values[0]),
        sum(uniform) / len(uniform),
        by_layer[:, column].tolist(),
        int(best.indices[-1]),
        float(best.values[-1]),
    )
