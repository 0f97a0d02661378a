"""The draft vocabulary: the target's tokens that the drafter's head can predict, counted from the training answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fledge.files import write_atomically
from fledge.training.data.chat_files import DataError
from fledge.training.data.samples import SampleSet

_FORMAT = 1


@dataclass(frozen=True)
class DraftVocabulary:
    """Target ids in ascending order; the draft id is the index in this list."""

    token_ids: np.ndarray  # int64 [draft vocabulary]
    coverage: float  # share of the training answers' tokens that it contains
    provenance: dict[str, Any] = field(default_factory=dict)  # data_hash, tokenizer_hash, vocab_size, …

    def __len__(self) -> int:
        return len(self.token_ids)

    @classmethod
    def count(
        cls,
        samples: SampleSet,
        size: int,
        vocab_size: int,
        *,
        always: Iterable[int] = (),
        data_hash: str = "",
        tokenizer_hash: str = "",
    ) -> DraftVocabulary:
        """Takes the `size` most frequent tokens of the answers; those of `always` (special tokens) that occur come first.

        If fewer different tokens occur, the lowest of the other ids are added up to `size`.
        """
        if not 0 < size <= vocab_size:
            raise DataError(f"a draft vocabulary of {size} tokens does not fit a target with {vocab_size}")
        answer_ids = samples.answer_ids()
        if len(answer_ids) and int(answer_ids.max()) >= vocab_size:
            raise DataError(
                f"the answers contain token id {int(answer_ids.max())}, but the target has {vocab_size} ids: "
                "they were made with another model"
            )
        counts = np.bincount(answer_ids, minlength=vocab_size)
        rank = counts.astype(np.int64)
        kept = np.array(sorted({i for i in always if 0 <= i < vocab_size and counts[i]}), np.int64)
        rank[kept] += len(answer_ids) + 1
        token_ids = np.sort(np.argsort(-rank, kind="stable")[:size]).astype(np.int64)
        provenance = {"data_hash": data_hash, "tokenizer_hash": tokenizer_hash, "vocab_size": vocab_size}
        provenance["answer_tokens"] = len(answer_ids)
        return cls(token_ids, float(counts[token_ids].sum() / max(1, len(answer_ids))), provenance)

    # --- for the drafter -----------------------------------------------------------------------------------------

    def d2t(self) -> torch.Tensor:
        """Returns the map to target ids, int64 [draft vocabulary]: target id = draft id + d2t[draft id]."""
        return torch.from_numpy(self.token_ids - np.arange(len(self.token_ids)))

    def coverage_of(self, samples: SampleSet) -> float:
        """Returns the share of these answers' tokens that it contains. For an unbiased figure, use held-out samples."""
        answer_ids = samples.answer_ids()
        return float(np.isin(answer_ids, self.token_ids).mean()) if len(answer_ids) else 0.0

    def __str__(self) -> str:
        return f"{len(self):,} of {self.provenance.get('vocab_size', 0):,} tokens, {self.coverage:.2%} of the answers"

    # --- files and provenance ------------------------------------------------------------------------------------

    def for_data(self, samples: SampleSet, data_hash: str) -> DraftVocabulary:
        """Returns the same tokens for other data than they were counted on, with the coverage of that data."""
        origin = {"counted_on": self.provenance.get("counted_on", self.provenance["data_hash"]), "data_hash": data_hash}
        return replace(self, coverage=self.coverage_of(samples), provenance={**self.provenance, **origin})

    def check(self, **asked: Any) -> None:
        """Raises DataError if it was counted from something else: `asked` may have data_hash, tokenizer_hash, vocab_size."""
        names = {"data_hash": "training data", "tokenizer_hash": "tokenizer", "vocab_size": "vocabulary size"}
        for key, value in asked.items():
            if (own := self.provenance.get(key)) != value:
                raise DataError(
                    f"the draft vocabulary was counted with another {names[key]} ({_short(own)}, now {_short(value)}): "
                    "delete it to count it again, or use that one again"
                )

    def save(self, path: str | Path) -> None:
        """Writes `path`.npz (ids), then `path`.json (provenance, and a checksum of the ids)."""
        arrays, description = _files(path)
        record = {
            "format": _FORMAT,
            "size": len(self),
            "coverage": self.coverage,
            "checksum": _checksum(self.token_ids),
            "provenance": self.provenance,
        }
        write_atomically(arrays, lambda file: np.savez_compressed(file, token_ids=self.token_ids))
        write_atomically(description, lambda file: file.write(json.dumps(record, indent=2).encode() + b"\n"))

    @classmethod
    def load(cls, path: str | Path) -> DraftVocabulary:
        arrays, description = _files(path)
        for file in (arrays, description):
            if not file.is_file():
                raise DataError(f"{file}: this part of the draft vocabulary is missing")
        try:
            record = json.loads(description.read_text())
            with np.load(arrays) as stored:
                token_ids = stored["token_ids"].astype(np.int64)
            intact = record["checksum"] == _checksum(token_ids) and record["format"] == _FORMAT
            vocabulary = cls(token_ids, float(record["coverage"]), dict(record["provenance"]))
        except Exception as error:  # a damaged .npz raises many types of errors
            raise DataError(f"{description}: the draft vocabulary is damaged ({error}); delete it") from error
        if not intact:
            raise DataError(f"{description} and {arrays.name} do not belong together; delete both")
        return vocabulary


def _files(path: str | Path) -> tuple[Path, Path]:
    path = Path(path)
    stem = path.with_suffix("") if path.suffix in (".json", ".npz") else path
    return stem.with_name(stem.name + ".npz"), stem.with_name(stem.name + ".json")


def _checksum(token_ids: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(token_ids, "<i8").tobytes()).hexdigest()


def _short(value: Any) -> str:
    return str(value)[:12] or "unknown"
