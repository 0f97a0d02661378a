"""Finds, reads and writes drafter folders (config.json and tensors), without interpreting their contents."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fledge import sources
from fledge.checkpoints import int8_storage
from fledge.checkpoints.tensors import TensorReader, read_json
from fledge.errors import ModelError, first_line
from fledge.files import save_tensors, write_json

WEIGHTS, PICKLE = "model.safetensors", "pytorch_model.bin"


@dataclass
class DrafterFiles:
    """The contents of a drafter folder, with names and keys as written. Weights stored in 8 bits are dequantised."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    origin: str = "raw"  # the trainer whose layout it is; set by `origins.canonical`
    notes: list[str] = field(default_factory=list)  # what was translated while reading
    num_bytes: int = 0  # size of the tensors in the file
    storage: str = ""  # how the file stores the weights; empty: as plain numbers


def find_drafter(name: str | Path) -> Path:
    """Returns the drafter's folder. `name`: a folder, a drafter that ships with Fledge, or a hub id."""
    folder = sources.local_path(name)
    if os.path.isdir(folder):
        return folder
    if os.path.exists(folder):
        raise ModelError(f"drafter {name}: this is a file; give the folder with config.json and the weights")
    shipped = Path(str(resources.files("fledge"))) / "drafters"
    names = sorted(entry.parent.name for entry in shipped.glob("*/config.json"))
    if str(name) in names:
        return shipped / str(name)
    parts = str(name).split("/")
    if len(parts) == 2 and all(parts) and not str(name).startswith((".", "~")):
        files = ("*.json", "*.safetensors", "*.bin")
        return sources.from_hub(str(name), files, instead="give the folder of a drafter")
    raise ModelError(
        f"drafter {name}: no such folder, and not a known name; use a folder, a hub id (org/name), "
        f"or one of: {', '.join(['auto', 'none', 'ngram', *names])}"
    )


def read_drafter_files(folder: Path) -> DrafterFiles:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder}: no config.json; a drafter is a folder with config.json and {WEIGHTS}")
    config, tensors = read_json(folder / "config.json"), _read_tensors(folder)
    num_bytes, storage = sum(tensor.nbytes for tensor in tensors.values()), ""
    if int8_storage.is_stored(config):
        config, tensors = int8_storage.restore(config, tensors)
        storage = f"8 bits with scales, read as {config['torch_dtype']}"
    return DrafterFiles(config, tensors, num_bytes=num_bytes, storage=storage)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / PICKLE).is_file() and not any(folder.glob("*.safetensors*")):
        return _read_pickle(folder / PICKLE)
    with TensorReader(folder) as reader:
        return {name: reader.read(name) for name in reader.shapes}


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged or foreign file raises zip, pickle or runtime errors
        raise ModelError(f"{path}: cannot be read as plain tensors ({first_line(error)})") from None
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ModelError(f"{path}: not a dictionary of tensors")
    return loaded


def write_drafter_files(
    folder: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], texts: dict[str, str] | None = None
) -> Path:
    """Writes a drafter folder atomically, through a temporary folder. Replaces only a folder that is a drafter."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder}: a file of this name is in the way; choose another folder")
    if folder.is_dir() and any(folder.iterdir()) and not _is_drafter(folder):
        raise ModelError(f"{folder}: exists and is not a drafter; it is not overwritten, choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()}, fresh / WEIGHTS)
        write_json(fresh / "config.json", config, indent=2)
        for name, text in (texts or {}).items():
            (fresh / name).write_text(text, encoding="utf-8")
        fresh.chmod(0o755)
        for file in fresh.iterdir():
            file.chmod(0o644)
        if folder.is_dir():
            old = fresh.with_name(fresh.name + ".old")
            os.replace(folder, old)
            try:
                os.replace(fresh, folder)
            except OSError:
                os.replace(old, folder)
                raise
            shutil.rmtree(old)
        else:
            os.replace(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _is_drafter(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except ModelError:
        return False
    return "eagle3" in f"{config.get('architectures')} {config.get('speculators_model_type')}".lower()
