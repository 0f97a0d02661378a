"""AdamW, or Muon for the layers' matrices with AdamW for the rest; and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class Optimizers:
    """One or two optimisers as one; each keeps its own peak learning rate."""

    def __init__(self, parts: Iterable[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        self._peaks = [[group["lr"] for group in part.param_groups] for part in self.parts]

    def set_factor(self, factor: float) -> None:
        for part, peaks in zip(self.parts, self._peaks, strict=True):
            for group, peak in zip(part.param_groups, peaks, strict=True):
                group["lr"] = peak * factor

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)


def build_optimizers(
    drafter: nn.Module,
    kind: str,
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    muon_learning_rate: float | None = None,
) -> Optimizers:
    """Norms and biases never decay. Muon takes the layers' matrices and fc; the head and embedding stay with AdamW.

    Muon's update is scaled to AdamW's size, so that learning rates of the two compare; `muon_learning_rate` None: the same.
    """
    named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
    matrices = [p for name, p in named if kind == "muon" and p.ndim == 2 and not name.startswith(("lm_head", "embed"))]
    taken = {id(p) for p in matrices}
    others = [p for _, p in named if id(p) not in taken]
    fused = others[0].is_cuda
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=fused)
    ]
    if matrices:
        parts.append(
            torch.optim.Muon(
                matrices,
                lr=muon_learning_rate or learning_rate,
                weight_decay=weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return Optimizers(parts)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float | None) -> Tensor:
    """The norm before clipping, on the device."""
    return nn.utils.clip_grad_norm_(list(parameters), max_norm if max_norm else float("inf"))


def learning_rate_factor(progress: float, kind: str, warmup: float, decay: float = 0.2, floor: float = 0.0) -> float:
    """Share of the peak learning rate when `progress` (0…1) of the run is done.

    `warmup` and, for wsd (warm-up, stable, decay), `decay` are shares of the run; `floor` is where it ends.
    """
    if progress < warmup:
        return min(1.0, max(progress, 1e-4) / warmup)  # the first step learns something too, and none more than the peak
    if kind == "constant":
        return 1.0
    done = min(1.0, (progress - warmup) / max(1e-9, 1.0 - warmup))
    if kind == "cosine":
        shape = 0.5 * (1.0 + math.cos(math.pi * done))
    elif kind == "linear":
        shape = 1.0 - done
    else:
        shape = min(1.0, max(0.0, 1.0 - progress) / decay)
    return floor + (1.0 - floor) * shape
