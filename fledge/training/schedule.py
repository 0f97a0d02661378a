"""The learning rate over a run."""

from __future__ import annotations

import math

KINDS = ("cosine", "wsd", "linear", "constant")


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
