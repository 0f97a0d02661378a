"""Which model is this: a hash that a folder and the GGUF files of the same model share.

Of the norms before every layer and after the last, rounded to bf16: converters leave them as they are while they quantise the
rest, and another training changes them. Two models of one shape (a coder and its general sibling) differ in it.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import torch
from torch import Tensor

from fledge.checkpoints.gguf import hf_name
from fledge.checkpoints.gguf_file import open_gguf
from fledge.checkpoints.tensors import TensorReader
from fledge.errors import ModelError

NORMS = re.compile(r"(?:model\.norm|model\.layers\.\d+\.input_layernorm)\.weight")


def target_fingerprint(path: Path) -> str | None:
    """Of a Hugging Face folder or a GGUF file; None: its tensors cannot be read, or have other names."""
    try:
        norms = _of_file(path) if path.is_file() else _of_folder(path)
    except ModelError:
        return None
    if "model.norm.weight" not in norms or len(norms) < 2:
        return None
    digest = hashlib.sha256()
    for name in sorted(norms):
        digest.update(f"{name} ".encode() + norms[name].flatten().to(torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:32]


def _of_file(path: Path) -> dict[str, Tensor]:
    tensors = open_gguf(path).tensors
    plain = {hf_name(name): tensor for name, tensor in tensors.items() if tensor.blocks.format in ("F32", "F16", "BF16")}
    return {name: tensor.blocks.plain() for name, tensor in plain.items() if NORMS.fullmatch(name)}


def _of_folder(path: Path) -> dict[str, Tensor]:
    with TensorReader(path) as reader:
        return {name: reader.read(name) for name in reader.shapes if NORMS.fullmatch(name)}
