"""Tokenised conversations in compact form: one flat array of ids for the whole data set."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fledge.files import write_atomically

_ARRAYS = ("tokens", "loss_mask", "offsets", "prompt_keys")


def key_of(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), signed=True)


@dataclass(frozen=True)
class Sample:
    """One conversation as the model sees it.

    `loss_mask[i]`: whether the assistant wrote `tokens[i]` (including its end-of-turn token), so that the drafter should
    learn to predict it.
    """

    tokens: np.ndarray  # int32 [n]
    loss_mask: np.ndarray  # bool [n]
    prompt_key: int | None = None  # equal for all answers to a prompt, however it is rendered; None: hash of its tokens

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def prompt(self) -> np.ndarray:
        """The tokens before the first answer."""
        return self.tokens[: int(np.argmax(self.loss_mask)) if self.loss_mask.any() else len(self)]

    def answers(self) -> Iterator[tuple[int, int]]:
        """Yields start and end of every span that the assistant wrote."""
        edges = np.flatnonzero(np.diff(self.loss_mask, prepend=False, append=False)).tolist()
        yield from zip(edges[0::2], edges[1::2], strict=True)


class SampleSet(Sequence[Sample]):
    """Many samples in four arrays: 5 bytes per token, and little per sample."""

    def __init__(self, tokens: np.ndarray, loss_mask: np.ndarray, offsets: np.ndarray, prompt_keys: np.ndarray):
        assert len(tokens) == len(loss_mask) == offsets[-1]
        assert len(prompt_keys) == len(offsets) - 1
        self.tokens = tokens  # int32 [total]
        self.loss_mask = loss_mask  # bool [total]
        self.offsets = offsets  # int64 [samples + 1]
        self.prompt_keys = prompt_keys  # int64 [samples]

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> SampleSet:
        tokens, masks, keys = [np.zeros(0, np.int32)], [np.zeros(0, bool)], []
        for sample in samples:
            tokens.append(np.asarray(sample.tokens, np.int32))
            masks.append(np.asarray(sample.loss_mask, bool))
            keys.append(key_of(sample.prompt.tobytes()) if sample.prompt_key is None else sample.prompt_key)
        offsets = np.cumsum([len(part) for part in tokens], dtype=np.int64)
        return cls(np.concatenate(tokens), np.concatenate(masks), offsets, np.array(keys, np.int64))

    @classmethod
    def joined(cls, sets: Sequence[SampleSet]) -> SampleSet:
        """Concatenates sets of samples."""
        lengths = np.concatenate([np.zeros(1, np.int64), *(part.lengths for part in sets)])
        tokens = np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in sets)])
        loss_mask = np.concatenate([np.zeros(0, bool), *(part.loss_mask for part in sets)])
        prompt_keys = np.concatenate([np.zeros(0, np.int64), *(part.prompt_keys for part in sets)])
        return cls(tokens, loss_mask, np.cumsum(lengths), prompt_keys)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> Sample:  # type: ignore[override]  # no slices
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        where = slice(self.offsets[index], self.offsets[index + 1])
        return Sample(self.tokens[where], self.loss_mask[where], int(self.prompt_keys[index]))

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    @cached_property
    def content_hash(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for array in (self.tokens, self.loss_mask, self.offsets):
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()

    def answer_ids(self) -> np.ndarray:
        """Returns all tokens with a loss, in order."""
        return self.tokens[self.loss_mask]

    @property
    def num_prompts(self) -> int:
        return len(np.unique(self.prompt_keys))

    def subset(self, indices: Iterable[int]) -> SampleSet:
        return SampleSet.from_samples(self[int(index)] for index in indices)

    def split(self, held_out: int, seed: int) -> tuple[SampleSet, SampleSet]:
        """Returns (training samples, all samples of `held_out` random prompts); the same split for the same seed.

        Whole prompts are held out: another answer to one of them would already teach the drafter the prompt.
        """
        order = np.random.default_rng(seed).permutation(len(self))
        _, first_places = np.unique(self.prompt_keys[order], return_index=True)
        chosen = order[np.sort(first_places)[: min(held_out, len(first_places) - 1)]]
        is_held_out = np.isin(self.prompt_keys, self.prompt_keys[chosen])
        return self.subset(np.flatnonzero(~is_held_out)), self.subset(np.flatnonzero(is_held_out))

    def first_of_each_prompt(self) -> SampleSet:
        return self.subset(np.sort(np.unique(self.prompt_keys, return_index=True)[1]))

    def save(self, path: Path, **extra: Any) -> None:
        """Writes all arrays and `extra` (JSON) to one .npz, atomically."""
        note = np.frombuffer(json.dumps(extra).encode(), np.uint8)
        arrays = {name: getattr(self, name) for name in _ARRAYS} | {"extra": note}
        write_atomically(path, lambda file: np.savez(file, **arrays))

    @classmethod
    def load(cls, path: Path) -> tuple[SampleSet, dict[str, Any]]:
        with np.load(path) as arrays:
            extra = json.loads(arrays["extra"].tobytes())
            return cls(*(arrays[name] for name in _ARRAYS)), extra
