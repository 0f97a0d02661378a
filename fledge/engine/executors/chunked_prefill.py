"""Chunked prefill: a long text, chunk by chunk, through the target and the drafter. After its last chunk the row runs.

    text     |  chunk  |  chunk  |  chunk |
                              |  last one |      computes some tokens again, so that all chunks have one shape

As with whole texts the pass is recorded: eagerly a chunk of a small model takes ten times as long as its work. It reads one
buffer, attends over what the cache holds of the text and over itself, and its last form also chooses the first token.
"""

from __future__ import annotations

import numpy as np
import torch

from fledge.engine.executors.batch_state import MAX_STOP_IDS, NUM_INT_PARAMS, NewRows
from fledge.engine.executors.prefill import Buffer, CapturedPrefill
from fledge.kernels.attention.metadata import AttentionMetadata

MIDDLE = -1  # instead of a sampling mode: no token is chosen


class ChunkedPrefill(CapturedPrefill):
    """Sizes: tokens. The arrays of a pass:

    int64 [4, N]   tokens, their positions, their slots in the caches, the token after each (after the text's end anything)
    int64 [1, …], float64 [1, 3], int64 [1, P]   as `NewRows` has them
    int64 [1]      the text's length up to the chunk's end
    """

    def _empty(self, *sizes: int) -> list[np.ndarray]:
        int_params = np.zeros((1, NUM_INT_PARAMS + MAX_STOP_IDS), dtype=np.int64)
        int_params[0, 0] = self.batch.state.dummy_row
        tokens = np.zeros((4, *sizes), dtype=np.int64)
        tokens[2] = -1
        table = np.zeros((1, self.batch.max_pages), dtype=np.int64)
        return [tokens, int_params, np.ones((1, 3)), table, np.ones(1, dtype=np.int64)]

    def _pass(self, buffer: Buffer, mode: int) -> None:
        """`mode`: of the first token, if this is the last chunk, or MIDDLE."""
        (tokens, positions, slots, following), int_params, float_params, table, length = buffer.parts
        batch, new = self.batch, NewRows(int_params, float_params, table)
        meta = AttentionMetadata.chunk(positions, slots, table[0].int(), length.int())
        x, aux = batch.decoder.run(batch.decoder.embed(tokens), meta, batch.ops, batch.aux_layers)
        rows = new.rows
        if batch.states is not None and aux:
            batch.states.store_prefill([*aux, x], rows.expand(len(tokens)), positions, slots)
        if mode == MIDDLE:
            rows = torch.full_like(rows, batch.state.dummy_row)
        else:
            following = torch.cat([following[:-1], batch.choose_first(new, x[-1:], mode)])
        if batch.method is not None:
            last = torch.full_like(rows, len(tokens) - 1)
            batch.method.prefill(aux, following, meta, rows, last)
