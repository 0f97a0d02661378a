"""A long prompt, piece by piece, through the target and the drafter. After its last piece the row runs.

    prompt   |  piece  |  piece  |  piece |
                              |  last one |      reads some tokens again, so that all pieces have one shape

As with whole prompts the pass is recorded: eagerly a piece of 1,024 tokens takes ten times as long as its work. It reads one
buffer, attends over what the cache holds of the prompt and over itself, and its last form also says the first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from fledge.engine.executors.batch_state import FIRST_STOP_ID, MAX_STOP_IDS, NewRows
from fledge.engine.executors.prefill import RECORDED_AT, Buffer, RecordedPass
from fledge.kernels.attention.metadata import AttentionMetadata

MIDDLE = -1  # instead of how a token is chosen: none is


@dataclass
class Piece:
    """All on the host."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    slots: np.ndarray  # int64 [N], of the caches
    following: np.ndarray  # int64 [N]: the prompt's tokens one place on; behind its end anything
    numbers: np.ndarray  # int64 [1, …],
    fractions: np.ndarray  # float64 [1, 3] and
    table: np.ndarray  # int64 [1, P]: as `NewRows` has them

    def arrays(self) -> list[np.ndarray]:
        """What the pass reads, in its order; the last number is the prompt's length up to the piece's end."""
        tokens = np.stack([self.tokens, self.positions, self.slots, self.following])
        return [tokens, self.numbers, self.fractions, self.table, self.positions[-1:] + 1]


class PiecePass(RecordedPass):
    def __init__(self, *parts, max_pages: int, capture: bool) -> None:
        super().__init__(*parts, max_pages=max_pages, capture=capture)
        self.buffers: dict[int, Buffer] = {}

    def read(self, piece: Piece, how: int) -> None:
        """`how` the first token is chosen, if this is the last piece, or MIDDLE."""
        shape = (len(piece.tokens), how)
        self.uses[shape] += 1
        self._fill(piece)
        if self.uses[shape] < RECORDED_AT and shape not in self.graphs.graphs:
            self._run(*shape)
        else:
            self.graphs.run(*shape)

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Ahead of use: tokens of a piece, and how its last token is chosen."""
        numbers = np.zeros((1, FIRST_STOP_ID + MAX_STOP_IDS), dtype=np.int64)
        numbers[0, 0] = self.slots.nobody
        table = np.zeros((1, self.max_pages), dtype=np.int64)
        for shape in shapes if self.graphs.capture else ():
            nothing = np.zeros(shape[0], dtype=np.int64)
            self._fill(Piece(nothing, nothing, nothing - 1, nothing, numbers, np.ones((1, 3)), table))
            self.graphs.record([shape])

    def _fill(self, piece: Piece) -> None:
        arrays, size = piece.arrays(), len(piece.tokens)
        if size not in self.buffers:
            self.buffers[size] = Buffer(arrays, self.device)
        self.buffers[size].fill(arrays)

    def _run(self, num_tokens: int, how: int) -> None:
        (tokens, positions, slots, following), numbers, fractions, table, length = self.buffers[num_tokens].parts
        meta = AttentionMetadata.chunk(positions, slots, table[0].int(), length.int())
        new = NewRows(numbers, fractions, table)
        x, taps = self.decoder.run(self.decoder.embed(tokens), meta, self.ops, self.taps)
        if how != MIDDLE:
            following = torch.cat([following[:-1], self.say_first(new, x[-1:], how)])
        if self.drafter is not None:
            # pair (x1, g0), (x2, g1), … (the piece's next token or the first one said, g of its last)
            states = self.drafter.prefill(taps, following, meta)
            if how != MIDDLE:
                self.slots.draft_state.index_copy_(0, new.rows, states[-1:])
