"""The processes of a run: one, or several under torchrun."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fledge.errors import UserError

PATIENCE = timedelta(days=2)  # while the first process tokenises or answers, the others wait for it
BROADCAST_BYTES = 1 << 28  # at a time


def _as_tensor(array: Any, start: int) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first process's arrays may be read-only, and are only read
        return torch.frombuffer(array, dtype=torch.uint8)[start : start + BROADCAST_BYTES]


@dataclass(frozen=True)
class DistributedContext:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    control: Any = None  # process group for small facts on the host: agreeing never waits for a GPU

    @classmethod
    def join(cls, use_cuda: bool) -> DistributedContext:
        """Reads what torchrun sets; without it, a world of one."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if use_cuda:
            torch.cuda.set_device(local_rank)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if use_cuda else "gloo", timeout=None if use_cuda else PATIENCE)
        control = dist.new_group(backend="gloo", timeout=PATIENCE) if use_cuda else dist.group.WORLD
        return cls(dist.get_rank(), size, local_rank, control)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all processes of a small tensor on the host."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """What the first process has, for all. Large numpy arrays inside travel without a copy."""
        if self.size == 1:
            return value
        arrays: list[bytearray | memoryview] = []
        packed = pickle.dumps(value, protocol=5, buffer_callback=lambda b: arrays.append(b.raw())) if self.is_first else b""
        box = [(packed, [len(array) for array in arrays])]
        dist.broadcast_object_list(box, src=0, group=self.control)
        packed, sizes = box[0]
        if not self.is_first:
            arrays = [bytearray(size) for size in sizes]
        for array in arrays:
            for start in range(0, len(array), BROADCAST_BYTES):
                dist.broadcast(_as_tensor(array, start), src=0, group=self.control)
        return value if self.is_first else pickle.loads(packed, buffers=arrays)

    def on_first(self, work: Callable[[], Any]) -> Any:
        """What `work` gives on the first process, for all; a user's mistake found there is told by all."""
        if self.size == 1:
            return work()
        result, problem = None, None
        if self.is_first:
            try:
                result = work()
            except UserError as error:
                problem = error
        result, problem = self.broadcast((result, problem))
        if problem is not None:
            raise problem
        return result

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """One reduction over all gradients laid end to end. The drafter is small: overlapping would gain nothing."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = torch.cat([g.flatten() for g in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))

    def broadcast_parameters(self, module: nn.Module) -> None:
        if self.size > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """Each process's own result; they work one after the other."""
        result = None
        for rank in range(self.size):
            if rank == self.rank:
                result = work()
            self.barrier()
        return result

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self.control)

    def leave(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()
