"""Copies rows of tensors; on CPU with numpy in the calling thread.

torch's own threads would keep spinning for a while on the cores that the next pass needs: one gather by torch makes a step of
sixteen requests a sixth slower.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def take(x: Tensor, rows: Sequence[int]) -> Tensor:
    if _numpy_copies(x):
        return torch.from_numpy(x.numpy()[rows])
    return x[torch.tensor(rows, device=x.device)]


def put(x: Tensor, rows: Sequence[int], values: Tensor) -> None:
    if _numpy_copies(x):
        x.numpy()[rows] = values.numpy()
    else:
        x[torch.tensor(rows, device=x.device)] = values


def join(parts: Sequence[Tensor]) -> Tensor:
    if not _numpy_copies(parts[0]):
        return torch.cat(tuple(parts))
    joined = parts[0].new_empty(sum(len(part) for part in parts), *parts[0].shape[1:])
    first, whole = 0, joined.numpy()
    for part in parts:
        whole[first : first + len(part)] = part.numpy()
        first += len(part)
    return joined


def copy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy().copy()) if _numpy_copies(x) else x.clone()


def _numpy_copies(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype is not torch.bfloat16  # numpy has no bfloat16
