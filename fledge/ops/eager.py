"""Which backend runs a network eagerly, from the host's layouts."""

from __future__ import annotations

import torch

from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.ops.base import NetworkModule, Ops, device_tables
from fledge.ops.cpu_ops import CpuOps
from fledge.ops.cuda_ops import CudaOps
from fledge.ops.torch_ops import TorchOps


def eager_ops(network: NetworkModule, cache: PagedKV, *, deterministic: bool = False, num_positions: int = 0) -> Ops:
    """`deterministic`: a row's numbers must not depend on the others, without a C compiler too, where that costs speed.

    `num_positions`: no token lies at or beyond it; asked for where deterministic.
    """
    if CpuOps.serves(network, cache):
        return CpuOps(network, cache)
    if cache.keys.dtype == torch.uint8 and deterministic:
        raise UserError("--kv-cache-dtype q8_0 with --deterministic takes a model that the C kernels run; use float16")
    if deterministic:
        return CudaOps(cache, *device_tables(network, num_positions, cache.keys.device))
    return TorchOps(cache, *network.rotaries)
