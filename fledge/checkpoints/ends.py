"""Loads only the embedding, the final norm and the head of a checkpoint.

Training a drafter against a target that runs elsewhere needs only these: a few gigabytes of a terabyte checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fledge import sources
from fledge.checkpoints.hf import load_config, load_scheme, text_name
from fledge.checkpoints.layouts import Layout
from fledge.checkpoints.tensors import INDEX, ShapesOnly, TensorReader, listed, read_index, read_json
from fledge.config import is_supported, text_part
from fledge.config_checks import number, whole_number
from fledge.errors import ModelError
from fledge.models.decoder import DecoderLayer
from fledge.models.layers import ExactNorm, RMSNorm

ENDS = {"embedding": "embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
EXPERTS = ("mlp.experts.", "mlp.shared_expert.", "mlp.gate.")


@dataclass(frozen=True)
class Ends:
    """The embedding, final norm and head of a target."""

    embedding: nn.Embedding
    norm: RMSNorm
    lm_head: nn.Linear


class _SomeTensors(TensorReader):
    """Reads only the shards that have wanted tensors; the other shards may be missing."""

    def __init__(
        self, folder: Path, wanted: Callable[[str], bool], names: Callable[[str], str | None] = lambda name: name
    ) -> None:
        super().__init__(folder, names)
        self.wanted = wanted

    def _files(self) -> Iterator[tuple[Path, list[str] | None]]:
        for file, names in super()._files():
            chosen = names and [name for name in names if self.wanted(name)]
            if names is None or chosen:
                yield file, chosen

    def find(self, ending: str) -> str | None:
        found = [name for name in self.shapes if _is_end(name) and name.endswith(ending)]
        if len(found) > 1:
            raise ModelError(f"{self.folder}: several tensors could be {ending}: {listed(found)}")
        return found[0] if found else None


def _is_end(name: str) -> bool:
    """Whether a tensor is the embedding, final norm or head of the language model; not of a vision tower or an MTP layer."""
    return name.endswith(tuple(ENDS.values())) and "layers." not in name and "vis" not in name


def text_config(folder: Path) -> dict[str, Any]:
    """config.json, or the part of it that describes the language model."""
    config = read_json(folder / "config.json")
    return {"architectures": config.get("architectures"), **text_part(config)}


def fetch_ends(name: str) -> Path:
    """Returns a folder with configuration, tokenizer, embedding, norm and head of a model; fetches only these from the hub."""
    if os.path.exists(sources.local_path(name)) or name in sources.BUILT_INS or not sources.HUB_ID.fullmatch(name):
        return sources.resolve(name)
    small = [pattern for pattern in sources.HUB_FILES if "safetensors" not in pattern]
    folder = sources.from_hub(name, [*small, INDEX, "model.safetensors"], ignore=["*/*"])
    if (folder / INDEX).exists():
        wanted = _wanted(folder)
        files = sorted(file for file, names in read_index(folder / INDEX).items() if any(map(wanted, names)))
        folder = sources.from_hub(name, files)
    return folder


def load_ends(folder: Path, dtype: torch.dtype, device: torch.device) -> Ends:
    """Loads embedding, final norm and head, also of an architecture that is not supported."""
    config = text_config(folder)
    known = load_config(folder) if is_supported(config) else None
    is_tied = config.get("tie_word_embeddings") if known is None else known.tie_embeddings
    with _SomeTensors(folder, _is_end) as reader:
        names = {end: reader.find(ending) for end, ending in ENDS.items()}
        # Without a head in the file, a tied model's head is its embedding.
        if is_tied and names["head"] is None:
            names["head"] = names["embedding"]
        if lacking := [ENDS[end] for end, name in names.items() if name is None]:
            raise ModelError(f"{folder}: no tensor {listed(lacking)} in it, which training against an endpoint needs")
        found = [name for name in names.values() if name is not None]
        tensors = {name: _plain(reader.read(name), name, folder).to(device, dtype) for name in set(found)}
    embedding, norm, head = (tensors[name] for name in found)
    is_less_one = known is not None and known.unit_norms
    if is_less_one:
        norm = 1 + norm.float()
    with ShapesOnly():
        kind, eps = ExactNorm if is_less_one else RMSNorm, number(config, "rms_norm_eps", 1e-6)
        ends = Ends(
            nn.Embedding(*embedding.shape),
            kind(len(norm), eps),
            nn.Linear(head.shape[1], head.shape[0], bias=False),
        )
    for module, weight in ((ends.embedding, embedding), (ends.norm, norm), (ends.lm_head, head)):
        module.weight = nn.Parameter(weight, requires_grad=False)
    if isinstance(ends.norm, ExactNorm):
        ends.norm.like = torch.empty(0, dtype=dtype, device=device)
    return ends


def load_last_layer(folder: Path) -> dict[str, Tensor]:
    """The last layer's weights under the network's names; empty if the architecture is not supported."""
    if not _is_known(folder):
        return {}
    config = load_config(folder)
    with ShapesOnly():
        named = DecoderLayer(config, config.num_layers - 1).named_parameters()
        names = [name for name, _ in named if not name.startswith(EXPERTS)]  # a drafter has no experts
    layout, last = Layout(config), f"layers.{config.num_layers - 1}."
    with _SomeTensors(folder, _wanted(folder), text_name) as reader:
        parts = {name: [reader.read(part).float() for part in layout.file_names(last + name)] for name in names}
        return {name: layout.join(last + name, found) for name, found in parts.items()}


def _is_known(folder: Path) -> bool:
    """Whether the layers are plain weights of a supported family."""
    try:
        return is_supported(read_json(folder / "config.json")) and load_scheme(folder) is None
    except ModelError:  # a quantisation that only the server running the target supports
        return False


def _wanted(folder: Path) -> Callable[[str], bool]:
    last = f"layers.{whole_number(text_config(folder), 'num_hidden_layers', 0) - 1}."
    with_last_layer = _is_known(folder)
    return lambda name: _is_end(name) or (with_last_layer and last in name)


def _plain(tensor: Tensor, name: str, folder: Path) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ModelError(f"{folder}: {name} is quantised ({tensor.dtype}); embedding, norm and head must be plain")
    return tensor
