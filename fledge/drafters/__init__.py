"""Drafters that ship with Fledge: a folder each, named after its target."""

from __future__ import annotations

from pathlib import Path

from fledge import sources
from fledge.checkpoints.provenance import Provenance
from fledge.errors import ModelError

HERE = Path(__file__).parent

# names of a target (built in, on the hub) -> folder of its default drafter
DEFAULTS = {
    "smollm2-135m": "smollm2-135m-eagle3.1",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m-eagle3.1",
}


def default_drafter(model: str) -> Path | None:
    """The drafter shipped for a target: by its name, or by the weights of its folder, its GGUF file or its copy on the hub."""
    if model in DEFAULTS:
        folder = HERE / DEFAULTS[model]
        return folder if (folder / "config.json").is_file() else None
    try:
        path = sources.find(model)
    except ModelError:  # not there: whoever loads it says so
        return None
    from fledge.checkpoints.fingerprint import is_same_model, target_fingerprint  # torch, which HTTP processes do without

    found = target_fingerprint(path)
    known = {folder: Provenance.read(folder).target_fingerprint for folder in shipped()}
    return next((folder for folder, one in known.items() if found and one and is_same_model(found, one)), None)


def shipped() -> list[Path]:
    return sorted(path.parent for path in HERE.glob("*/config.json"))


def trained_on(folder: Path) -> str:
    """For people: the target and the amount of data that a drafter was trained with."""
    return Provenance.read(folder).trained_on
