"""A fingerprint of a model: numbers that a folder and the GGUF files of the same model share.

It samples the norms before every layer and after the last. Converters keep these (except for their type) while they quantise
the rest, and further training changes them, so two models of one shape (a coder and its general sibling) differ in them. LoRA
training leaves the norms unchanged: such a fine-tune has the fingerprint of its base model, and the log says so.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from fledge.checkpoints.gguf import hf_name
from fledge.checkpoints.gguf_file import open_gguf
from fledge.checkpoints.tensors import TensorReader
from fledge.errors import ModelError

NORMS = re.compile(r"model\.(?:norm|layers\.(?P<layer>\d+)\.input_layernorm)\.weight")
NUMBERS = 64
# Relative. Files of one model may differ by bf16 rounding, half a unit of which is 0.2 to 0.4 % (Qwen's GGUF files have more
# digits than its folders). A norm that is trained further in bf16 changes by whole units.
TOLERANCE = 0.005


def target_fingerprint(path: Path) -> str | None:
    """The fingerprint of a Hugging Face folder or GGUF file; None: its tensors cannot be read, or have other names."""
    try:
        norms = _of_file(path) if path.is_file() else _of_folder(path)
    except ModelError:
        return None
    if "model.norm.weight" not in norms or len(norms) < 2:
        return None
    values = torch.cat([norms[name].flatten().float() for name in sorted(norms, key=_layer)])
    places = torch.arange(NUMBERS) * (len(values) - 1) // (NUMBERS - 1)
    return f"{len(values)}: " + " ".join(f"{value:.5g}" for value in values[places].tolist())


def is_same_model(one: str, other: str) -> bool:
    """Whether two fingerprints agree within TOLERANCE."""
    (size, values), (other_size, others) = (_parsed(text) for text in (one, other))
    close = (abs(a - b) <= TOLERANCE * max(abs(a), abs(b)) for a, b in zip(values, others, strict=False))
    return size == other_size and len(values) == len(others) and all(close)


def _parsed(text: str) -> tuple[str, list[float]]:
    size, _, values = text.partition(": ")
    return size, [float(value) for value in values.split()]


def _layer(name: str) -> int:
    found = NORMS.fullmatch(name)
    return -1 if found is None or found["layer"] is None else int(found["layer"])


def _of_file(path: Path) -> dict[str, Tensor]:
    tensors = open_gguf(path).tensors
    plain = {hf_name(name): tensor for name, tensor in tensors.items() if tensor.blocks.format in ("F32", "F16", "BF16")}
    return {name: tensor.blocks.plain() for name, tensor in plain.items() if NORMS.fullmatch(name)}


def _of_folder(path: Path) -> dict[str, Tensor]:
    with TensorReader(path) as reader:
        return {name: reader.read(name) for name in reader.shapes if NORMS.fullmatch(name)}
