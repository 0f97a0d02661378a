"""A drafter in training, as others will load it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from fledge import __version__
from fledge.checkpoints.eagle3 import save_drafter
from fledge.models.drafter import EagleDrafter
from fledge.training.target import Target


def served_copy(drafter: EagleDrafter, target: Target, dtype: torch.dtype) -> EagleDrafter:
    """The drafter as it would be served: in the compute type, without gradients."""
    with torch.device("meta"):
        copy = EagleDrafter(drafter.config)
    state = {n: v.detach().to(dtype) if v.is_floating_point() else v for n, v in drafter.state_dict().items()}
    copy.load_state_dict(state, assign=True)
    copy.rotary = drafter.rotary
    return copy.share(target.embedding, target.lm_head).eval().requires_grad_(False)


def export(drafter: EagleDrafter, folder: Path, dtype: torch.dtype, provenance: dict[str, Any]) -> None:
    """The raw EAGLE layout, with a `provenance.json` that says where it comes from."""
    record = {"fledge": __version__, "torch": torch.__version__, **provenance}
    save_drafter(drafter, folder, dtype=dtype, texts={"provenance.json": json.dumps(record, indent=2) + "\n"})
