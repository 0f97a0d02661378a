"""Acceptance on held-out prompts: what speculative decoding with the drafter's own tokens would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.drift.metrics import Tally, by_text
from fledge.drift.probes import find_sink
from fledge.drift.rollout import roll_out
from fledge.drift.texts import TargetText, in_groups
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.training.attention import BLOCK, document_starts
from fledge.training.targets.target import DecoderTarget, Target, TargetStates
from fledge.training.ttt import TrainBatch

TOKENS_AT_ONCE = 1 << 15  # of texts that are drafted over together
SINK_TEXTS = 4  # that the sink is looked for in


@dataclass(frozen=True)
class HeldOut:
    """The target's own greedy texts, packed, with its states: all that an evaluation needs of the target."""

    tokens_BT: Tensor
    positions_BT: Tensor
    start_BT: Tensor
    states: TargetStates  # the hidden states are not kept
    answers: list[tuple[int, int, int]]  # (flat index of the text's first token, answer start, length) of each text
    sink_column: int = 0  # found from the target's attention, where it can be seen (`with_sink`)

    @classmethod
    def of(cls, target: Target, texts: Sequence[Sequence[int]], answer_starts: Sequence[int], device: torch.device) -> HeldOut:
        """`texts[i][answer_starts[i]:]` is what the target wrote, greedily."""
        longest = max(map(len, texts))
        length = -(-longest // BLOCK) * BLOCK
        rows: list[list[int]] = []  # texts by number
        room: list[int] = []
        for number in sorted(range(len(texts)), key=lambda i: -len(texts[i])):
            row = next((r for r, left in enumerate(room) if left >= len(texts[number])), len(rows))
            if row == len(rows):
                rows.append([])
                room.append(length)
            rows[row].append(number)
            room[row] -= len(texts[number])
        tokens = torch.zeros(len(rows), length, dtype=torch.long)
        document = torch.zeros(len(rows), length, dtype=torch.long)
        answers = {}
        for row, numbers in enumerate(rows):
            at = 0
            for count, number in enumerate(numbers, 1):
                size = len(texts[number])
                tokens[row, at : at + size] = torch.tensor(texts[number])
                document[row, at : at + size] = count
                answers[number] = (row * length + at, answer_starts[number], size)
                at += size
        start = document_starts(document)
        positions = torch.arange(length) - start
        none = torch.zeros(0, dtype=torch.long)
        batch = TrainBatch(tokens, positions, start, none, none, none, none).to(device)
        target.reserve(length)
        states = target.states(batch, skip_compile=True)
        empty = states.hidden_ND[:0]
        return cls(
            batch.tokens_BT,
            batch.positions_BT.long(),
            batch.start_BT,
            TargetStates(states.taps, empty),
            [answers[i] for i in range(len(texts))],
        )

    def with_sink(self, decoder: Decoder) -> HeldOut:
        """With the column that draws most of the target's attention over the longest of these texts."""
        some = sorted((text.tokens_T.tolist() for text in self.texts), key=len)[-SINK_TEXTS:]
        return replace(self, sink_column=find_sink(decoder, some).column)

    @property
    def texts(self) -> list[TargetText]:
        """Each text with answer tokens to draft, for itself."""
        flat, taps = self.tokens_BT.flatten(), self.states.taps
        spans = [(slice(first, first + size), start) for first, start, size in self.answers]
        return [TargetText(flat[span], start, [tap[span] for tap in taps]) for span, start in spans]

    def to(self, device: torch.device | str) -> HeldOut:
        states = TargetStates([x.to(device) for x in self.states.taps], self.states.hidden_ND.to(device))
        moved = {name: getattr(self, name).to(device) for name in ("tokens_BT", "positions_BT", "start_BT")}
        return replace(self, states=states, **moved)


@torch.no_grad()
def evaluate(
    drafter: EagleDrafter, held_out: HeldOut, depths: Sequence[int], sink_column: int | None = None, per_text: bool = False
) -> dict[str, Any]:
    """Figures of greedy chain drafting over the held-out texts, with the drift lab's own probes.

    `sink_column`: None: the one that was found for the held-out texts.

    acceptance_length   {depth: 1 + accepted / steps}, over all texts together (micro); standard_error: of it
    accuracy            by draft step, whatever became of the steps before; out-of-vocabulary tokens are misses
    rms, sink_share, own_share, entropy, cosine   by draft step (see `drift.metrics`)
    """
    texts = held_out.texts
    sink = held_out.sink_column if sink_column is None else sink_column
    tally = Tally(sorted(depths))
    for group in in_groups([len(text.tokens_T) for text in texts], TOKENS_AT_ONCE):
        rollout = roll_out(drafter, [texts[i] for i in group], max(depths), sink=sink)
        for index, figures in zip(group, by_text(rollout, len(group), tally.depths), strict=True):
            tally.add(str(index), figures)
    whole = tally.to_dict()
    names = ("acceptance_length", "standard_error", "accuracy", "rms", "sink_share", "own_share", "entropy", "cosine")
    found = {name: whole[name] for name in names} | {"tokens": sum(text.num_rows for text in texts)}
    if per_text:
        found["texts"] = [
            {depth: count._asdict() for depth, count in tally.texts[str(index)].items()} for index in range(len(texts))
        ]
    return found


def acceptance(
    drafter: EagleDrafter,
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    answer_starts: Sequence[int],
    depths: Sequence[int] = (3, 5, 7),
    sink_column: int | None = None,
) -> dict[str, Any]:
    """`evaluate` for texts at hand: `texts[i][answer_starts[i]:]` must be the target's greedy answer."""
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids)
    drafter.share(decoder.embed_tokens, decoder.lm_head)
    held_out = HeldOut.of(target, texts, answer_starts, target.device)
    if sink_column is None:
        held_out = held_out.with_sink(decoder)
    return evaluate(drafter, held_out, depths, sink_column, per_text=True)
