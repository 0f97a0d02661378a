"""Samples to batches: several documents in a row, nothing wasted, the same batches for the same seed."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch

from fledge.training.data import DataError
from fledge.training.samples import Sample, SampleSet

# Rows that are kept open while packing. More fill a little better and take longer; 256 fill > 98 % of mixed chats.
_OPEN_ROWS = 256
# A piece of a long sample begins with this share of the sequence as context without loss.
_OVERLAP_SHARE = 8


@dataclass(frozen=True)
class PackedBatch:
    """B rows of T tokens. A row holds one document after the other, then padding."""

    tokens: torch.Tensor  # int64 [B, T]; 0 in the padding
    positions: torch.Tensor  # int64 [B, T]; count from the document's beginning (plus its random offset)
    document: torch.Tensor  # int32 [B, T]; 1, 2, … within a row; 0 = padding
    loss_mask: torch.Tensor  # bool [B, T]; the token is one to be predicted. Never the first of a document

    def to(self, device: torch.device | str, non_blocking: bool = True) -> PackedBatch:
        return PackedBatch(*(getattr(self, f.name).to(device, non_blocking=non_blocking) for f in fields(self)))

    def pin_memory(self) -> PackedBatch:
        return PackedBatch(*(getattr(self, f.name).pin_memory() for f in fields(self)))

    @property
    def num_tokens(self) -> int:
        return int((self.document > 0).sum())


class PackedLoader(Iterator[PackedBatch]):
    """Endless batches; each epoch is shuffled and packed anew, by (seed, epoch) alone.

    Every rank packs the same epoch and takes its own rows: rank r of w gets the batches r, r + w, r + 2w, …
    What does not fill a step of all ranks is left out of that epoch (`rows_left_out`), other rows each time.
    """

    def __init__(
        self,
        samples: SampleSet | list[Sample],
        sequence_length: int,
        batch_rows: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        position_offset_max: int = 0,
    ):
        if sequence_length < 2 or batch_rows < 1 or position_offset_max < 0:
            raise DataError("packing needs sequence_length >= 2, batch_rows >= 1 and position_offset_max >= 0")
        assert 0 <= rank < world_size
        self.samples = samples if isinstance(samples, SampleSet) else SampleSet.from_samples(samples)
        self.sequence_length, self.batch_rows, self.seed = sequence_length, batch_rows, seed
        self.rank, self.world_size, self.position_offset_max = rank, world_size, position_offset_max
        self.starts, self.contexts, self.lengths = _pieces(self.samples, sequence_length)
        if not len(self.lengths):
            raise DataError("the data set is empty: no sample has a token to predict")
        self._enter(epoch=0, batch=0)

    # --- the epoch ----------------------------------------------------------------------------------------------

    def _enter(self, epoch: int, batch: int) -> None:
        rng = np.random.default_rng([self.seed, epoch])
        self._rows = pack(self.lengths, rng.permutation(len(self.lengths)), self.sequence_length)
        self._row_order = rng.permutation(len(self._rows))
        self._epoch, self._batch = epoch, batch
        if self.batches_per_epoch == 0:
            raise DataError(
                f"the data set fills {len(self._rows)} rows of {self.sequence_length} tokens, but one step takes "
                f"{self.batch_rows * self.world_size}: lower batch_rows or sequence_length, or bring more data"
            )

    @property
    def batches_per_epoch(self) -> int:
        """Batches of each rank in the current epoch; may differ by a few between epochs."""
        return len(self._rows) // (self.batch_rows * self.world_size)

    @property
    def rows_left_out(self) -> int:
        return len(self._rows) % (self.batch_rows * self.world_size)

    @property
    def fill_rate(self) -> float:
        """Share of the current epoch's rows that is no padding."""
        return float(self.lengths.sum() / (len(self._rows) * self.sequence_length))

    @property
    def epoch(self) -> float:
        """Epochs done, with their fraction."""
        return self._epoch + self._batch / self.batches_per_epoch

    def __str__(self) -> str:
        return (
            f"{len(self.lengths):,} documents in {len(self._rows):,} rows of {self.sequence_length:,} tokens, "
            f"{self.fill_rate:.1%} full; {self.batches_per_epoch:,} batches an epoch"
            + (f", {self.rows_left_out} rows left out" if self.rows_left_out else "")
        )

    # --- batches ------------------------------------------------------------------------------------------------

    def __next__(self) -> PackedBatch:
        if self._batch >= self.batches_per_epoch:
            self._enter(self._epoch + 1, batch=0)
        first = (self._batch * self.world_size + self.rank) * self.batch_rows
        batch = self._build(self._row_order[first : first + self.batch_rows])
        self._batch += 1
        return batch

    def _build(self, rows: np.ndarray) -> PackedBatch:
        shape = (len(rows), self.sequence_length)
        tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        document, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
        for b, row in enumerate(rows):
            offsets = np.random.default_rng([self.seed, self._epoch, int(row)]).integers(
                0, self.position_offset_max, size=len(self._rows[row]), endpoint=True
            )
            at = 0
            for number, (piece, offset) in enumerate(zip(self._rows[row], offsets, strict=True), 1):
                start, length = self.starts[piece], self.lengths[piece]
                here, there = slice(at, at + length), slice(start, start + length)
                tokens[b, here] = self.samples.tokens[there]
                positions[b, here] = np.arange(offset, offset + length)
                document[b, here] = number
                loss_mask[b, here] = self.samples.loss_mask[there]
                # What only gives context to the rest of a long sample has its loss in the piece before.
                loss_mask[b, at : at + max(1, self.contexts[piece])] = False
                at += length
        return PackedBatch(*map(torch.from_numpy, (tokens, positions, document, loss_mask)))

    # --- resuming -----------------------------------------------------------------------------------------------

    def _identity(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "sequence_length": self.sequence_length,
            "batch_rows": self.batch_rows,
            "world_size": self.world_size,
            "position_offset_max": self.position_offset_max,
            "samples": len(self.samples),
            "tokens": len(self.samples.tokens),
            "data": self.samples.content_hash,
        }

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch is, and what it depends on. The same on every rank."""
        return {"epoch": self._epoch, "batch": self._batch, **self._identity()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = {"data": self.samples.content_hash, **state}  # earlier versions went by the numbers alone
        for name, value in self._identity().items():
            if before.get(name) != value:
                raise DataError(
                    f"cannot resume inside the epoch: {name} was {before.get(name)}, now it is {value}; "
                    f"put it back, or start a new run"
                )
        self._enter(int(state["epoch"]), int(state["batch"]))


def _pieces(samples: SampleSet, sequence_length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(start in the flat array, tokens that are context alone, length) of every document to pack.

    A sample that fits is one piece. A longer one is cut into overlapping pieces, each but the first beginning with
    context from the one before, so that every answer token is predicted exactly once:

        sample   0 ─────────────────────────── n
        piece 0  ├── loss ──┤
        piece 1          ├ctx┤── loss ──┤
        piece 2                      ├ctx┤─ loss ─┤

    Pieces without any token to predict are left out.
    """
    starts, lengths = samples.offsets[:-1], samples.lengths
    contexts = np.zeros(len(lengths), np.int64)
    if (long := lengths > sequence_length).any():
        overlap = max(1, sequence_length // _OVERLAP_SHARE)
        cut = [
            (start + at, overlap if at else 0, min(sequence_length, length - at))
            for start, length in zip(starts[long].tolist(), lengths[long].tolist(), strict=True)
            for at in range(0, length - overlap, sequence_length - overlap)
        ]
        starts, contexts, lengths = (
            np.concatenate((whole[~long], part))
            for whole, part in zip((starts, contexts, lengths), np.array(cut, np.int64).T, strict=True)
        )
    answers_before = np.concatenate(([0], np.cumsum(samples.loss_mask, dtype=np.int64)))
    first_with_loss = np.minimum(starts + np.maximum(contexts, 1), starts + lengths)
    useful = answers_before[starts + lengths] > answers_before[first_with_loss]
    return starts[useful], contexts[useful], lengths[useful]


def pack(lengths: np.ndarray, order: np.ndarray, capacity: int) -> list[list[int]]:
    """Best fit: each piece, in this order, goes into the open row that it leaves the least room in."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), ascending
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect.bisect_left(open_rows, (length, -1))
        if at < len(open_rows):
            room, row = open_rows.pop(at)
            rows[row].append(piece)
        else:
            room, row = capacity, len(rows)
            rows.append([piece])
        if room > length:
            bisect.insort(open_rows, (room - length, row))
            if len(open_rows) > _OPEN_ROWS:
                del open_rows[0]  # the fullest one
    return rows
