"""Which backend runs a network eagerly, from the host's layouts."""

from __future__ import annotations

from fledge.kernels.attention.paged import PagedKV
from fledge.ops.base import NetworkModule, Ops, device_tables
from fledge.ops.cpu_ops import CpuOps
from fledge.ops.cuda_ops import DeterministicOps
from fledge.ops.torch_ops import TorchOps


def eager_ops(network: NetworkModule, cache: PagedKV, *, deterministic: bool = False, num_positions: int = 0) -> Ops:
    """`deterministic`: a row's numbers must not depend on the others. Native layers are such ones by themselves.

    `num_positions`: no token lies at or beyond it; asked for where deterministic.
    """
    if CpuOps.serves(network, cache):
        return CpuOps(network, cache, deterministic=deterministic)
    if deterministic:
        return DeterministicOps(cache, *device_tables(network, num_positions, cache.keys.device))
    return TorchOps(cache, *network.rotaries)
