"""Loads and saves EAGLE 3 and 3.1 checkpoints. Strict in both directions.

A wrongly read drafter drafts nonsense on a server that looks healthy. So every ambiguity is an error, and all errors of a
checkpoint are reported together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fledge.checkpoints import drafter_layout, int8_storage, origins
from fledge.checkpoints.drafter_config import config_to_hf, parse_config
from fledge.checkpoints.drafter_files import DrafterFiles, find_drafter, read_drafter_files, write_drafter_files
from fledge.checkpoints.tensors import ShapesOnly
from fledge.config import DrafterConfig, ModelConfig
from fledge.errors import ModelError
from fledge.models.drafter import EagleDrafter
from fledge.models.layers import Rotary


def load_drafter(
    folder_or_name: str | Path,
    target: ModelConfig | None = None,
    dtype: torch.dtype | None = torch.float32,
    device: str | torch.device = "cpu",
) -> EagleDrafter:
    """Loads a drafter in the raw EAGLE 3 / 3.1 layout, the speculators layout or that of a known trainer.

    `dtype` None: as in the file. A drafter without its own embedding or head needs a call of `share` before use.
    """
    folder = find_drafter(folder_or_name)
    files = origins.canonical(read_drafter_files(folder))
    config, problems = check(files, target)
    if problems or config is None:
        raise ModelError(f"drafter {folder_or_name}: " + "; ".join(problems))
    return build_drafter(config, files, dtype, device)


def build_drafter(
    config: DrafterConfig, files: DrafterFiles, dtype: torch.dtype | None, device: str | torch.device
) -> EagleDrafter:
    """Builds the network from files in which `check` found no problems."""
    with ShapesOnly():
        drafter = EagleDrafter(config)
    state = drafter_layout.to_network(files.tensors, config)
    # 1-D tensors are copied: a single one left in the mapped file would keep the whole file in memory.
    state = {name: tensor.to(device, None if name == "d2t" else dtype, copy=tensor.ndim == 1) for name, tensor in state.items()}
    drafter.load_state_dict(state, strict=True, assign=True)
    drafter.rotary = Rotary(config.rotary_dim, config.max_positions, config.rope).to(device)
    return drafter.eval().requires_grad_(False)


def check(files: DrafterFiles, target: ModelConfig | None = None) -> tuple[DrafterConfig | None, list[str]]:
    """Returns the configuration (None if it cannot be read) and all problems of configuration and tensors."""
    config, problems = parse_config(files.config, target, files.tensors)
    if config is not None:
        problems += drafter_layout.tensor_problems(files.tensors, config)
    return config, problems


def save_drafter(
    drafter: EagleDrafter,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    extra: Mapping[str, Any] | None = None,
    texts: dict[str, str] | None = None,
    int8: bool = False,
) -> Path:
    """Writes a drafter in the raw layout that vLLM reads.

    `dtype` None: the network's. `extra`: more keys for config.json. `int8`: stores 8-bit weights, which only Fledge reads.
    """
    dtype = dtype or drafter.fc.weight.dtype
    config = {**(extra or {}), **config_to_hf(drafter.config, dtype)}
    tensors = drafter_layout.to_file(drafter, dtype)
    if int8:
        config, tensors = int8_storage.store(config, tensors)
    return write_drafter_files(folder, config, tensors, texts)
