"""Texts that the target wrote, with the states a drafter reads, and padded batches of them.

Shapes: T tokens of a text (in a batch: of the longest), B texts, R rows (answer positions) of a text, D hidden size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.provenance import Provenance
from fledge.devices import release_memory
from fledge.engine.build import Speculation, fit
from fledge.engine.config import EngineConfig
from fledge.engine.offline import AnswerGenerator, answer_generator
from fledge.errors import ModelError, UserError
from fledge.files import hash_files
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.drafter import EagleDrafter
from fledge.progress import Report


@dataclass(frozen=True)
class TargetText:
    """A text whose answer the target wrote, with the states that a drafter reads and the last one to compare with."""

    tokens_T: Tensor
    answer_start: int
    taps: list[Tensor]  # one [T, D] per tapped layer
    hidden_TD: Tensor | None = None  # input of the target's head; None: not kept

    @property
    def num_rows(self) -> int:
        """Number of rows to draft from. Row t drafts x_{t+2} and on; the target's prefill gives the first answer token."""
        return max(0, len(self.tokens_T) - 1 - self.answer_start)

    @classmethod
    def of(cls, decoder: Decoder, tokens: Sequence[int], answer_start: int, taps: Sequence[int]) -> TargetText:
        return read_texts(decoder, [(tokens, answer_start)], taps)[0]


@torch.no_grad()
def read_texts(decoder: Decoder, texts: Sequence[tuple[Sequence[int], int]], taps: Sequence[int]) -> list[TargetText]:
    """Runs the target once over all texts, given as (tokens, answer start)."""
    device, lengths = decoder.norm.weight.device, [len(tokens) for tokens, _ in texts]
    flat = torch.tensor([token for tokens, _ in texts for token in tokens], device=device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    hidden, captured = decoder(flat, positions, causal_attend(lengths), taps, max(lengths))
    split = zip(flat.split(lengths), hidden.split(lengths), *(tap.split(lengths) for tap in captured), strict=True)
    return [
        TargetText(tokens, start, list(mine), states) for (_, start), (tokens, states, *mine) in zip(texts, split, strict=True)
    ]


def in_groups(lengths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Yields groups of indexes of texts of similar length, at most `room` tokens each with padding; a longer text is alone."""
    group: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if group and lengths[index] * (len(group) + 1) > room:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


class PaddedBatch:
    """A batch with one text per row, each from the first column that its drafts can see, padded on the right.

    With an attention window, tokens further back than the window reaches through all layers have no effect and are left out:
    a text of 8,000 tokens then costs no more than one of 600.
    """

    def __init__(self, texts: Sequence[TargetText], drafter: EagleDrafter) -> None:
        config, device = drafter.config, texts[0].tokens_T.device
        reach = None if config.window is None else config.window * config.num_layers
        cuts = [0 if reach is None else max(0, text.answer_start - reach) for text in texts]

        def padded(parts: Sequence[Tensor]) -> Tensor:
            return pad_sequence([part[cut:] for part, cut in zip(parts, cuts, strict=True)], batch_first=True)

        self.tokens_BT = padded([text.tokens_T for text in texts])
        # Each token's successor; the last token has none, and no draft starts from its row.
        self.paired_BT = padded([torch.cat([text.tokens_T[1:], text.tokens_T[-1:]]) for text in texts])
        taps = [padded(layer) for layer in zip(*(text.taps for text in texts), strict=True)]
        self.fused_BTD = drafter.fuse([tap.flatten(0, 1) for tap in taps]).unflatten(0, self.tokens_BT.shape)
        hidden = [text.hidden_TD for text in texts if text.hidden_TD is not None]
        self.hidden_BTD = padded(hidden) if len(hidden) == len(texts) else None

        def by_text(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, device=device)

        self.first_B = by_text(cuts)  # position of column 0
        self.length_B = by_text([len(text.tokens_T) for text in texts]) - self.first_B
        self.prompt_length_B = by_text([text.answer_start for text in texts]) - self.first_B
        self.num_rows_B = by_text([text.num_rows for text in texts])
        row = torch.arange(max(1, *(text.num_rows for text in texts)), device=device)  # at least one row, masked if unused
        self.is_row_BR = row < self.num_rows_B[:, None]
        self.row_BR = torch.minimum(self.prompt_length_B[:, None] - 1 + row, self.length_B[:, None] - 1)  # as columns
        self.highest_position = max(cuts) + self.tokens_BT.shape[1]

    def at(self, values: Tensor, column_BR: Tensor) -> Tensor:
        """Gathers `values` [B, T, …] at columns of each text; columns past its end give its last column."""
        column = torch.minimum(column_BR, self.length_B[:, None] - 1)
        return values[torch.arange(len(values), device=values.device)[:, None], column]


TokenIds = tuple[int, ...]
SEED = 1234  # of sampled answers


class Answers:
    """The target's answers, each generated once and shared by all drafters."""

    def __init__(self, decoder: Decoder, config: EngineConfig, max_tokens: int, on_progress: Report) -> None:
        self.decoder, self.config, self.max_tokens, self.progress = decoder, config, max_tokens, on_progress
        self.known: dict[tuple[TokenIds, float], list[int]] = {}
        self._generator: AnswerGenerator | None = None

    def __call__(self, prompts: Sequence[TokenIds], temperature: float = 0.0) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, temperature) not in self.known]
        if new:
            self._generator = self._generator or answer_generator(
                self.decoder,
                device=self.config.device,
                dtype=self.config.dtype,
                concurrency=self.config.max_num_seqs,
                max_model_len=self.config.max_model_len,
            )
            done = self._generator.generate(new, max_tokens=self.max_tokens, temperature=temperature, seed=SEED)
            for count, answer in enumerate(done, 1):
                self.known[new[answer.index], temperature] = list(answer.tokens)
                self.progress("the target answers", count, len(new))
        return [self.known[prompt, temperature] for prompt in prompts]

    def release(self) -> None:
        """Frees the generator's KV cache and keeps the answers."""
        self._generator = None
        release_memory(torch.device(self.config.device))


# --- drafters under test ------------------------------------------------------------------------------------------------


@dataclass
class DrafterUnderTest:
    """One drafter that the lab measures."""

    name: str
    network: EagleDrafter
    parameters: int  # number of its own parameters, before weights are packed
    trained: dict[str, Any]  # recorded facts of its training: sequence_length, ttt_steps, augmented, templates, …
    weights_sha256: str | None = None

    def to_dict(self) -> dict[str, Any]:
        config = self.network.config
        return {
            "name": self.name,
            "version": config.version,
            "config": asdict(config),
            "parameters": self.parameters,
            "weights_sha256": self.weights_sha256,
            "trained": self.trained,
        }


def load_subjects(names: Sequence[str], model: str, decoder: Decoder, config: EngineConfig) -> list[DrafterUnderTest]:
    subjects: list[DrafterUnderTest] = []
    for name in names:
        label, equals, where = name.partition("=")
        found = Speculation(where if equals else name).resolve_drafter(model)
        if found is None or found == "ngram":
            raise ModelError(f"drafter {name!r} is not an EAGLE drafter, so it has no states to measure; give another folder")
        assert not isinstance(found, EagleDrafter), "names are resolved to names"
        network = load_drafter(found, decoder.config)
        size = sum(parameter.numel() for parameter in network.parameters())
        label = label if equals else _label(Path(found), {subject.name for subject in subjects})
        if label in {subject.name for subject in subjects}:
            raise UserError(f"two drafters are called {label!r}; give each a label of its own, as label=folder")
        folder = Path(found)
        subjects.append(DrafterUnderTest(label, fit(network, config), size, _training_of(folder), _hash_of(folder)))
    return subjects


def _hash_of(folder: Path) -> str | None:
    """Returns the hash of the weight files in order; it identifies the drafter better than its name."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return hash_files(files) if files else None


def _training_of(folder: Path) -> dict[str, Any]:
    """Reads facts of a drafter's (last) training run from its folder: longest text, draft steps, templates, optimizer."""
    provenance = Provenance.read(folder)
    try:
        recipe = provenance.recipe or {}
        augmentation = recipe["data"].get("augmentation") or {}
        chances = {name: value for name, value in augmentation.items() if name.endswith("_probability")}
        templates = list(augmentation.get("templates", ())) if augmentation.get("template_probability") else []
        return {
            "sequence_length": recipe["data"]["sequence_length"],
            "ttt_steps": recipe["objective"]["ttt_steps"],
            "augmented": any(chances.values()),
            "augmentation": chances,
            "templates": [*templates, *(["none"] if augmentation.get("no_template_probability") else [])],
            "steps": provenance.step,
            "learning_rate": recipe["optimizer"]["learning_rate"],
            "seed": recipe.get("seed"),
            "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        }
    except (KeyError, TypeError, AttributeError):
        return {}


def _label(folder: Path, taken: set[str]) -> str:
    """Returns the folder's name, with as many parent folders before it as make it unique."""
    label = folder.resolve().name
    for parent in folder.resolve().parents:
        if label not in taken:
            break
        label = f"{parent.name}/{label}"
    return label
