"""Which target and which drafter a learn folder belongs to: hashes of parts of their weights, kept with generation 0."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fledge import sources
from fledge.errors import UserError
from fledge.learning.generations import Generations
from fledge.models.decoder import Decoder
from fledge.models.drafter import EagleDrafter

SAMPLES = 64  # places of a file or a tensor that are read
SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class Origin:
    target: str
    drafter: str | None  # None: none was named

    def check(self, generations: Generations) -> None:
        """Refuses a folder of another target, or of another drafter than the one that is named."""
        figures, folder = generations.figures(0), generations.folder
        if "target" not in figures:  # of a version that did not keep them
            return
        if figures["target"] != self.target:
            raise UserError(f"--learn-dir {folder} was learnt for another target; give another folder")
        if self.drafter in (None, figures["drafter"]):
            return
        if figures["drafter"] is None:
            raise UserError(f"--learn-dir {folder} began without a drafter, and one is named now; give another folder")
        raise UserError(f"--learn-dir {folder} began with another drafter; name that one, or give another folder")


def target_hash(model: str | Decoder) -> str:
    if isinstance(model, Decoder):
        return _hash_of(model.named_parameters())
    path, digest = sources.find(model), hashlib.blake2b(digest_size=16)
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as content:
            for place in range(SAMPLES):
                content.seek(place * size // SAMPLES)
                digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()


def drafter_hash(network: EagleDrafter) -> str:
    """As it was given, before it is packed."""
    return _hash_of(network.named_parameters())


@torch.no_grad()
def _hash_of(named: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, value in named:
        digest.update(f"{name} {tuple(value.shape)}".encode())
        flat = value.detach().flatten()
        digest.update(flat[:: max(1, len(flat) // SAMPLE_BYTES)].float().cpu().numpy().tobytes())
    return digest.hexdigest()
