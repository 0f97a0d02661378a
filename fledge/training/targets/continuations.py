"""Generates a training target's answers to many prompts in one batch, for evaluation texts.

The engine cannot be used for this: it packs the decoder's weights, which training reads unpacked, and the layers of a sharded
target need all processes in lockstep.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fledge.models.decoder import Decoder, causal_attend
from fledge.models.layers import Attend


class _DenseCache:
    """A KV cache [B, T, K, E] per layer; sequence b fills its first `lengths[b]` places, the rest is free."""

    def __init__(self, num_sequences: int, capacity: int) -> None:
        self.shape = (num_sequences, capacity)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, sequences: Tensor, places: Tensor, k_NKE: Tensor, v_NKE: Tensor) -> None:
        if layer not in self.kept:
            keys, values = (x.new_zeros(*self.shape, *x.shape[1:]) for x in (k_NKE, v_NKE))
            self.kept[layer] = (keys, values)
        for buffer, new in zip(self.kept[layer], (k_NKE, v_NKE), strict=True):
            buffer[sequences, places] = new

    def prefill(self, number: int, places: Tensor) -> Attend:
        """Returns the attention for one sequence's prompt; it stores keys and values."""
        plain = causal_attend()

        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
            self.store(layer, torch.full_like(places, number), places, k_NKE, v_NKE)
            return plain(layer, q_NHE, k_NKE, v_NKE, window)

        return attend

    def decode(self, places: Tensor) -> Attend:
        """Returns the attention for one more token of each sequence."""
        sequences, column = (torch.arange(size, device=places.device) for size in self.shape)

        def attend(layer: int, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, window: int | None) -> Tensor:
            self.store(layer, sequences, places, k_NKE, v_NKE)
            keys, values = (x.transpose(1, 2) for x in self.kept[layer])
            mask = column[None] <= places[:, None]
            if window is not None:
                mask &= column[None] > places[:, None] - window
            out = scaled_dot_product_attention(q_NHE[:, :, None], keys, values, mask[:, None, None], enable_gqa=True)
            return out[:, :, 0]

        return attend


@torch.no_grad()
def continuations(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: Sequence[int],
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Returns the target's answer to each prompt, including its stop token: greedy, or sampled with a `generator`."""

    def choose(hidden_ND: Tensor) -> Tensor:
        logits = decoder.logits(hidden_ND).float()
        if generator is None:
            return logits.argmax(-1)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]

    device = decoder.norm.weight.device
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    capacity = int(lengths.max()) + max_new_tokens
    decoder.reserve(capacity)
    cache = _DenseCache(len(prompts), capacity)
    last = []
    for number, prompt in enumerate(prompts):
        places = torch.arange(len(prompt), device=device)
        out = decoder(torch.tensor(prompt, device=device), places, cache.prefill(number, places), highest_position=0)
        last.append(choose(out.hidden_ND[-1:]))
    token = torch.cat(last)
    stops = torch.tensor(list(stop_ids) or [-1], device=device)
    written, finished = [token], torch.isin(token, stops)
    for step in range(1, max_new_tokens):
        if step % 16 == 0 and bool(finished.all()):
            break
        places = lengths + step - 1
        out = decoder(token, places, cache.decode(places), highest_position=0)
        token = choose(out.hidden_ND)
        written.append(token)
        finished = finished | torch.isin(token, stops)
    return [until_stop(row, stop_ids) for row in torch.stack(written, 1).tolist()]


def until_stop(ids: list[int], stops: Sequence[int]) -> list[int]:
    """Returns the ids up to the first stop token, inclusive."""
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids) - 1)
    return ids[: end + 1]
