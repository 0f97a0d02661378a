"""Acceptance on held-out prompts: what speculative decoding with the drafter's own tokens would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter
from fledge.training.attention import BLOCK, document_starts
from fledge.training.rollout import roll_out
from fledge.training.target import DecoderTarget, Target, TargetStates
from fledge.training.ttt import TrainBatch


@dataclass(frozen=True)
class HeldOut:
    """The target's own greedy texts, packed, with its states: all that an evaluation needs of the target."""

    tokens_BT: Tensor
    positions_BT: Tensor
    start_BT: Tensor
    states: TargetStates  # the hidden states are not kept
    answers: list[tuple[int, int, int]]  # (flat index of the text's first token, answer start, length) of each text

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
        batch = TrainBatch(tokens, positions, start, none, none, none).to(device)
        target.reserve(length)
        states = target.states(batch, once=True)
        empty = states.hidden_ND[:0]
        return cls(
            batch.tokens_BT,
            batch.positions_BT.long(),
            batch.start_BT,
            TargetStates(states.taps, empty),
            [answers[i] for i in range(len(texts))],
        )

    def to(self, device: torch.device | str) -> HeldOut:
        states = TargetStates([x.to(device) for x in self.states.taps], self.states.hidden_ND.to(device))
        moved = {name: getattr(self, name).to(device) for name in ("tokens_BT", "positions_BT", "start_BT")}
        return replace(self, states=states, **moved)


@torch.no_grad()
def evaluate(
    drafter: EagleDrafter, held_out: HeldOut, depths: Sequence[int], sink_column: int = 0, per_text: bool = False
) -> dict[str, Any]:
    """Figures of greedy chain drafting over the held-out texts.

    acceptance_length   {depth: 1 + accepted / steps}, over all texts together (micro)
    accuracy            by draft step, whatever became of the steps before; out-of-vocabulary tokens are misses
    rms, sink_share, own_share   by draft step (see `rollout.Rollout`)
    """
    depth = max(depths)
    device = held_out.tokens_BT.device
    # Row t drafts x_{t+2}…: the first answer token comes from the target's own prefill.
    spans = [(first + start - 1, first + size) for first, start, size in held_out.answers]
    rows = torch.cat([torch.arange(begin, max(begin, end - 2)) for begin, end in spans]).to(device)
    result = roll_out(
        drafter,
        held_out.states.taps,
        held_out.tokens_BT,
        held_out.positions_BT,
        held_out.start_BT,
        rows,
        depth,
        sink_column,
    )
    flat = torch.cat([held_out.tokens_BT.flatten(), torch.full((depth + 2,), -1, device=device)])
    ahead = rows[:, None] + 2 + torch.arange(depth, device=device)
    ends = torch.cat([torch.full((max(0, end - 2 - begin),), end) for begin, end in spans]).to(device)
    inside = ahead < ends[:, None]
    hit = (result.drafted_MJ == flat[ahead]) & inside
    matched = hit.long().cumprod(1).sum(1).cpu().tolist()

    walks = []  # for each text: {depth: (accepted, steps)}
    at = 0
    for begin, end in spans:
        num_rows = max(0, end - 2 - begin)
        walks.append({d: walk(matched[at : at + num_rows], d) for d in depths})
        at += num_rows
    lengths = {}
    for d in depths:
        accepted, steps = (sum(w[d][i] for w in walks) for i in (0, 1))
        lengths[d] = 1 + accepted / max(1, steps)
    counted = inside.sum(0).clamp_min(1)
    figures: dict[str, Any] = {
        "acceptance_length": lengths,
        "accuracy": (hit.sum(0) / counted).tolist(),
        "rms": result.rms_MJ.mean(0).tolist(),
        "sink_share": result.sink_MJ.mean(0).tolist(),
        "own_share": result.own_MJ.mean(0).tolist(),
        "tokens": len(rows),
    }
    if per_text:
        figures["texts"] = [{d: {"accepted": a, "steps": s} for d, (a, s) in w.items()} for w in walks]
    return figures


def walk(matched: Sequence[int], depth: int) -> tuple[int, int]:
    """(accepted, steps) of a speculative run over one answer.

    `matched[i]`: how many drafts from row i are the target's next tokens. A step accepts up to `depth` of them and adds the
    target's own next token; the answer ends where the rows end.
    """
    accepted = steps = at = 0
    while at < len(matched):
        taken = min(matched[at], depth)
        accepted += taken
        steps += 1
        at += taken + 1
    return accepted, steps


def acceptance(
    drafter: EagleDrafter,
    decoder: Decoder,
    texts: Sequence[Sequence[int]],
    answer_starts: Sequence[int],
    depths: Sequence[int] = (3, 5, 7),
    sink_column: int = 0,
) -> dict[str, Any]:
    """`evaluate` for texts at hand: `texts[i][answer_starts[i]:]` must be the target's greedy answer."""
    target = DecoderTarget(decoder, drafter.config.aux_layer_ids)
    drafter.share(decoder.embed_tokens, decoder.lm_head)
    held_out = HeldOut.of(target, texts, answer_starts, target.device)
    return evaluate(drafter, held_out, depths, sink_column, per_text=True)
