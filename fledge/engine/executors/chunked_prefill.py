"""Chunked prefill: a long text, chunk by chunk, through the target and the drafter. After its last chunk the row runs.

    text     |  chunk  |  chunk  |  chunk |
                              |  last one |      computes some tokens again, so that all chunks have one shape

As with whole texts the pass is recorded: eagerly a chunk of a small model takes ten times as long as its work. It reads one
buffer, attends over what the cache holds of the text and over itself, and its last form also chooses the first token.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fledge.engine.executors.batch_state import MAX_STOP_IDS, NUM_INT_PARAMS, NewRows
from fledge.engine.executors.prefill import Buffer, CapturedPrefill
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.linear.cublas import background_trials

MIDDLE = -1  # instead of a sampling mode: no token is chosen


@dataclass
class ChunkBatch:
    """All on the host."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    slots: np.ndarray  # int64 [N], of the caches
    following: np.ndarray  # int64 [N]: the token after each; after the text's end anything
    int_params: np.ndarray  # int64 [1, …],
    float_params: np.ndarray  # float64 [1, 3] and
    table: np.ndarray  # int64 [1, P]: as `NewRows` has them

    def arrays(self) -> list[np.ndarray]:
        """What the pass reads, in its order; the last number is the text's length up to the chunk's end."""
        tokens = np.stack([self.tokens, self.positions, self.slots, self.following])
        return [tokens, self.int_params, self.float_params, self.table, self.positions[-1:] + 1]


class ChunkedPrefill(CapturedPrefill):
    def __init__(self, *parts: Any, max_pages: int, capture: bool) -> None:
        super().__init__(*parts, max_pages=max_pages, capture=capture)
        self.buffers: dict[int, Buffer] = {}

    def run(self, chunk: ChunkBatch, mode: int) -> None:
        """`mode`: of the first token, if this is the last chunk, or MIDDLE."""
        shape = (len(chunk.tokens), mode)
        self._fill(chunk)
        if self._is_replayed(shape):
            self.graphs.run(*shape)
        else:
            with background_trials():
                self._run(*shape)

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, int]]) -> None:
        """Ahead of use: tokens of a chunk, and the sampling mode of its last token."""
        int_params = np.zeros((1, NUM_INT_PARAMS + MAX_STOP_IDS), dtype=np.int64)
        int_params[0, 0] = self.state.dummy_row
        table = np.zeros((1, self.max_pages), dtype=np.int64)
        for shape in shapes if self.graphs.capture else ():
            nothing = np.zeros(shape[0], dtype=np.int64)
            self._fill(ChunkBatch(nothing, nothing, nothing - 1, nothing, int_params, np.ones((1, 3)), table))
            self.graphs.record([shape])

    def _fill(self, chunk: ChunkBatch) -> None:
        arrays, size = chunk.arrays(), len(chunk.tokens)
        if size not in self.buffers:
            self.buffers[size] = Buffer(arrays, self.device)
        self.buffers[size].fill(arrays)

    def _run(self, *shape: int) -> None:
        num_tokens, mode = shape
        (tokens, positions, slots, following), int_params, float_params, table, length = self.buffers[num_tokens].parts
        meta = AttentionMetadata.chunk(positions, slots, table[0].int(), length.int())
        new = NewRows(int_params, float_params, table)
        x, aux = self.decoder.run(self.decoder.embed(tokens), meta, self.ops, self.aux_layers)
        rows = new.rows
        if self.states is not None and aux:
            self.states.store_prefill([*aux, x], rows.expand(num_tokens), positions, slots)
        if mode == MIDDLE:
            rows = torch.full_like(rows, self.state.dummy_row)
        else:
            following = torch.cat([following[:-1], self.choose_first(new, x[-1:], mode)])
        if self.method is not None:
            last = torch.full_like(rows, num_tokens - 1)
            self.method.prefill(aux, following, meta, rows, last)
