"""The drafters under study."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fledge.checkpoints.eagle3 import load_drafter
from fledge.engine.build import Speculation, fit
from fledge.engine.config import EngineConfig
from fledge.errors import ModelError, UserError
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter


@dataclass
class DrafterUnderTest:
    """One drafter under study."""

    name: str
    network: EagleDrafter
    parameters: int  # its own, before packing
    trained: dict[str, Any]  # what is known of its training: sequence_length, ttt_steps, augmented, templates, learning_rate …
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
            raise ModelError(f"drafter {name!r} is no EAGLE drafter, so it has no states to look at; name a drafter's folder")
        assert not isinstance(found, EagleDrafter), "names are resolved to names"
        network = load_drafter(found, decoder.config)
        size = sum(parameter.numel() for parameter in network.parameters())
        label = label if equals else _label(Path(found), {subject.name for subject in subjects})
        if label in {subject.name for subject in subjects}:
            raise UserError(f"two drafters are called {label!r}; give them other names")
        folder = Path(found)
        subjects.append(DrafterUnderTest(label, fit(network, config), size, _training_of(folder), _hash_of(folder)))
    return subjects


def _hash_of(folder: Path) -> str | None:
    """Of the weights' files one after the other: a name says little about which drafter it was."""
    files = [folder] if folder.is_file() else sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as stream:
            while piece := stream.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest() if files else None


def _training_of(folder: Path) -> dict[str, Any]:
    """What a drafter's folder says of its training (its last stage): longest text, draft steps, templates, optimiser."""
    try:
        provenance = json.loads((folder / "provenance.json").read_text())
        recipe = provenance["recipe"]
        augmentation = recipe["data"].get("augmentation") or {}
        chances = {name: value for name, value in augmentation.items() if name.endswith("_probability")}
        templates = list(augmentation.get("templates", ())) if augmentation.get("template_probability") else []
        return {
            "sequence_length": recipe["data"]["sequence_length"],
            "ttt_steps": recipe["objective"]["ttt_steps"],
            "augmented": any(chances.values()),
            "augmentation": chances,
            "templates": [*templates, *(["none"] if augmentation.get("no_template_probability") else [])],
            "steps": provenance.get("step", provenance.get("steps")),
            "learning_rate": recipe["optimizer"]["learning_rate"],
            "seed": recipe.get("seed"),
            "recipe_sha256": hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest(),
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _label(folder: Path, taken: set[str]) -> str:
    """The folder's name, or as much more of its path as sets it apart."""
    label = folder.resolve().name
    for parent in folder.resolve().parents:
        if label not in taken:
            break
        label = f"{parent.name}/{label}"
    return label
