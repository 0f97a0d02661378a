"""Prefill graphs: prefill the target and the drafter for new requests, initialise their rows, choose their first tokens.

A prefill is one pass, recorded once per size (launched eagerly it takes ten times as long as the device's work). It reads one
buffer, which the host fills with one copy: the texts one after the other, then padding, which is stored nowhere. At least one
token is padding: the ends of missing texts point at it, and missing texts initialise the dummy row.

    tokens   | text A | text B | padding … |        ends  | A's last | B's last | the buffer's last … |

A text with a cached prefix is prefilled from the prefix's end on. Attention reads all keys, the new ones too, from the cache.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from fledge.engine.executors.batch_state import MAX_STOP_IDS, NUM_INT_PARAMS, NewRows
from fledge.engine.executors.graphs import StepGraphs, size_for
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.linear.cublas import background_trials

if TYPE_CHECKING:
    from fledge.engine.executors.device_batch import DeviceBatch

log = logging.getLogger("fledge.engine")

# The recorded sizes: tokens of a pass and its prompts. In larger passes the device's work takes longer than the launches.
TOKENS = sorted({64 << k for k in range(7)} | {768 << k for k in range(3)})
PROMPTS = [4, 64]  # few sizes, as each takes time to record; a missing prompt costs one row of the head
# A size not recorded ahead is recorded at its second use, since it may never come again. A server records it only when idle, or
# at its 50th use: eagerly a pass takes some 10 ms longer (135M), recording takes 0.13 s, during which requests wait.
RECORDED_AT, RECORDED_IN_TRAFFIC_AT = 2, 50
MIDDLE = -1  # the "sampling mode" of a chunk that is not the last: no token is chosen
# Sizes of passes too large to record are rounded up to a multiple of this many tokens, and of the most prompts: the kernels of
# linears are tried once per size (`kernels.linear.cublas`), so there should be few sizes.
MORE_TOKENS = 512


def pass_sizes(num_tokens: int, num_prompts: int) -> tuple[int, int]:
    """The size (tokens, prompts) of the smallest recorded pass that fits. Every pass has at least 4 tokens per prompt."""
    prompts = size_for(PROMPTS, num_prompts)
    return size_for(TOKENS, max(num_tokens, 4 * prompts)), prompts


def lengthened(array: np.ndarray, length: int, filling: float) -> np.ndarray:
    """Returns the array padded to `length`. `np.pad` takes ten times as long, and all running requests wait meanwhile."""
    longer = np.full((length, *array.shape[1:]), filling, dtype=array.dtype)
    longer[: len(array)] = array
    return longer


@dataclass
class PrefillBatch:
    """The new tokens of several texts, one after the other, with their cache slots and the texts' rows. All on the host."""

    tokens: np.ndarray  # int64 [N]
    positions: np.ndarray  # int64 [N]
    slots: np.ndarray  # int64 [N], in the KV caches
    lengths: list[int]
    starts: list[int]  # how many tokens of each text the cache holds
    int_params: np.ndarray  # int64 [S, …] and
    float_params: np.ndarray  # float64 [S, 3]: as in `NewRows`
    tables: np.ndarray  # int64 [S, P]: the texts' pages

    @property
    def shape(self) -> tuple[int, int]:
        """The size (tokens, prompts) of the pass that holds them."""
        num_tokens, num_texts = len(self.tokens) + 1, len(self.lengths)
        if num_tokens <= TOKENS[-1] and num_texts <= PROMPTS[-1]:
            return pass_sizes(num_tokens, num_texts)
        return -(-num_tokens // MORE_TOKENS) * MORE_TOKENS, -(-num_texts // PROMPTS[-1]) * PROMPTS[-1]

    def arrays(self, sizes: tuple[int, int] | None, dummy_row: int) -> list[np.ndarray]:
        """The arrays that a pass reads, in its order, padded to `sizes` (None: not padded). Padding is stored nowhere and
        initialises `dummy_row`."""
        num_tokens, num_texts = sizes or (len(self.tokens), len(self.lengths))
        lengths, starts = (lengthened(np.array(x, dtype=np.int64), num_texts, 0) for x in (self.lengths, self.starts))
        offsets = np.concatenate([[0], lengths.cumsum()])
        ends = np.where(lengths > 0, offsets[1:] - 1, num_tokens - 1)
        tokens = [lengthened(x, num_tokens, fill) for x, fill in ((self.tokens, 0), (self.positions, 0), (self.slots, -1))]
        int_params = lengthened(self.int_params, num_texts, 0)
        int_params[len(self.lengths) :, 0] = dummy_row
        float_params, tables = lengthened(self.float_params, num_texts, 1.0), lengthened(self.tables, num_texts, 0)
        return [np.stack(tokens), offsets, starts, ends, int_params, float_params, tables]


class Buffer:
    """The inputs of a pass at a fixed device address: arrays of eight-byte numbers, one after the other."""

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        self.whole = torch.empty(sum(array.size for array in arrays), dtype=torch.int64, device=device)
        self.parts: list[Tensor] = []
        first = 0
        for array in arrays:
            part = self.whole[first : first + array.size]
            part = part.view(torch.float64) if array.dtype == np.float64 else part
            self.parts.append(part.view(array.shape))
            first += array.size
        self.fill(arrays)

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        whole = torch.from_numpy(np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int64) for array in arrays]))
        self.whole.copy_(whole.pin_memory() if self.whole.is_cuda else whole, non_blocking=True)


class CapturedPrefill(ABC):
    """Runs prefill passes; a shape is their sizes and the sampling mode. Base class for whole texts and for chunks."""

    def __init__(self, batch: DeviceBatch) -> None:
        self.batch = batch
        # Graphs are recorded over an empty buffer that initialises only the dummy row, so warm-up runs need no special context.
        self.graphs = StepGraphs(self._run, batch.device, capture=batch.graphs.capture, idle=nullcontext)
        self.buffers: dict[tuple[int, ...], Buffer] = {}  # inputs of recorded passes, by their sizes
        self.uses: Counter[tuple] = Counter()
        self.waits_for_quiet = False  # shapes that recur are put into `wanted` instead of being recorded at once
        self.wanted: set[tuple] = set()  # shapes to record when no request runs
        self.too_large: set[tuple] = set()  # shapes for whose graph memory was insufficient

    def submit(self, shape: tuple[int, ...], arrays: Sequence[np.ndarray], *, may_record: bool = True) -> None:
        """Enqueues a pass: by graph if one is recorded or is to be recorded now, else eagerly."""
        if may_record and self._is_replayed(shape):
            if self.graphs.capture and shape not in self.graphs.graphs:
                # Over an empty buffer: each warm-up run over these arrays would count the first tokens again (`count_tokens`).
                self.graphs.record_late(shape, self.record)
            self._fill(shape, arrays)
            self.graphs.run(*shape)
        else:
            with background_trials():
                self._pass(Buffer(arrays, self.batch.device), shape[-1])

    def _is_replayed(self, shape: tuple[int, ...]) -> bool:
        """Counts this use of a shape; returns whether it runs as a graph, which is recorded now if it does not exist."""
        self.uses[shape] += 1
        if shape in self.graphs.graphs:
            return True
        if self.uses[shape] < RECORDED_AT or shape in self.too_large:
            return False
        if self.waits_for_quiet and self.uses[shape] < RECORDED_IN_TRAFFIC_AT:
            self.wanted.add(shape)
            return False
        return True

    def record_wanted(self) -> bool:
        """Records the largest wanted shape; the others share its memory. False: none is wanted."""
        self.wanted -= self.graphs.graphs.keys()
        if not self.wanted:
            return False
        shape = max(self.wanted)
        self.wanted.remove(shape)
        try:
            self.record([shape])
        except torch.OutOfMemoryError:
            self.too_large.add(shape)
            log.warning("not enough GPU memory to record a prefill graph of %s: prefills of this size run eagerly", shape)
        return True

    @torch.inference_mode()
    def record(self, shapes: Iterable[tuple[int, ...]]) -> None:
        """Records passes ahead of use."""
        for shape in shapes if self.graphs.capture else ():
            if shape not in self.graphs.graphs:
                self._fill(shape, self._empty(*shape[:-1]))
                self.graphs.record([shape])

    def _fill(self, shape: tuple[int, ...], arrays: Sequence[np.ndarray]) -> None:
        if (buffer := self.buffers.get(shape[:-1])) is not None:
            buffer.fill(arrays)
        else:
            self.buffers[shape[:-1]] = Buffer(arrays, self.batch.device)

    def _run(self, *shape: int) -> None:
        self._pass(self.buffers[shape[:-1]], shape[-1])

    @abstractmethod
    def _empty(self, *sizes: int) -> list[np.ndarray]:
        """Input arrays of these sizes that store nothing and initialise only the dummy row."""

    @abstractmethod
    def _pass(self, buffer: Buffer, mode: int) -> None:
        """Runs the pass on the buffer's inputs."""


class PrefillGraphs(CapturedPrefill):
    """Prefills whole texts. Sizes: tokens and texts."""

    def __init__(self, batch: DeviceBatch) -> None:
        super().__init__(batch)
        self.pads = self.graphs.capture

    def run(self, prompts: PrefillBatch, mode: int) -> None:
        num_tokens, num_texts = shape = prompts.shape
        arrays = prompts.arrays(shape if self.pads else None, self.batch.state.dummy_row)
        may_record = self.pads and num_tokens <= TOKENS[-1] and num_texts <= PROMPTS[-1]
        self.submit((*shape, mode), arrays, may_record=may_record)

    @property
    def least_seconds(self) -> float:
        """The time of the fastest recorded pass; 0 if none is recorded."""
        return min(self.graphs.seconds.values(), default=0.0)

    def seconds_for(self, num_tokens: int) -> float | None:
        """The time of the fastest recorded pass for that many tokens, measured with empty inputs; None if there is none."""
        return min((seconds for shape, seconds in self.graphs.seconds.items() if shape[0] > num_tokens), default=None)

    def _empty(self, *sizes: int) -> list[np.ndarray]:
        nothing, tables = np.zeros(0, dtype=np.int64), np.zeros((0, self.batch.max_pages), dtype=np.int64)
        int_params = np.zeros((0, NUM_INT_PARAMS + MAX_STOP_IDS), dtype=np.int64)
        empty = PrefillBatch(nothing, nothing, nothing, [], [], int_params, np.zeros((0, 3)), tables)
        num_tokens, num_texts = sizes
        return empty.arrays((num_tokens, num_texts), self.batch.state.dummy_row)

    def _pass(self, buffer: Buffer, mode: int) -> None:
        (tokens, positions, slots), offsets, starts, ends, int_params, float_params, tables = buffer.parts
        batch, new = self.batch, NewRows(int_params, float_params, tables)
        meta = AttentionMetadata.packed(positions, slots, tables.int(), starts.int(), offsets.int())
        x, aux = batch.decoder.run(batch.decoder.embed(tokens), meta, batch.ops, batch.aux_layers)
        if batch.states is not None and aux:
            text_of = torch.searchsorted(offsets[1:], torch.arange(len(tokens), device=batch.device), right=True)
            rows = new.rows[text_of.clamp(max=len(new.rows) - 1)]
            batch.states.store_prefill([*aux, x], rows, positions, slots)
        first_tokens = batch.choose_first(new, x[ends], mode)
        if batch.method is not None:
            # The token that follows each one; for a text's last token, the one just chosen.
            following = tokens.roll(-1).index_copy_(0, ends, first_tokens)
            batch.method.prefill(aux, following, meta, new.rows, ends)


class ChunkedPrefill(CapturedPrefill):
    """Prefills a long text chunk by chunk; after its last chunk the row is active. Sizes: tokens.

    text     |  chunk  |  chunk  |  chunk |
                              |  last one |      computes some tokens again, so that all chunks have one shape

    A chunk attends over the text's cached keys and its own. The arrays of a pass:

    int64 [4, N]   tokens, their positions, their slots in the caches, the token after each (after the text's end anything)
    int64 [1, …], float64 [1, 3], int64 [1, P]   as in `NewRows`
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
        """Runs a chunk. `mode`: MIDDLE, or for the last chunk the sampling mode of the first token."""
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
