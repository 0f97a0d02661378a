"""The processes of a run: one, or several under torchrun."""

from __future__ import annotations

import io
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fledge.errors import UserError

PATIENCE = timedelta(days=2)  # timeout: the other processes wait while the first one tokenises or answers
BROADCAST_BYTES = 1 << 28  # per message


class _Pickler(pickle.Pickler):
    """Pickles tensors as numpy arrays, which pickle passes as buffers without copying them."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor):
            return NotImplemented
        flat = obj.detach().cpu().reshape(-1).view(torch.uint8)
        return _tensor_of, (flat.numpy(), obj.dtype, obj.shape)


def _tensor_of(flat: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(flat).view(dtype).view(shape)


class AgreedOutOfMemory(torch.OutOfMemoryError):
    """Raised by all processes when memory ran out on at least one of them, so that they can retry together."""


@dataclass(frozen=True)
class DistributedContext:
    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1  # processes on this machine
    control: Any = None  # process group on the host for small messages, which never waits for a GPU

    @classmethod
    def join(cls, use_cuda: bool) -> DistributedContext:
        """Joins the process group that torchrun describes; without torchrun there is one process."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        local_rank, local_size = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if use_cuda:
            torch.cuda.set_device(local_rank)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if use_cuda else "gloo", timeout=None if use_cuda else PATIENCE)
        control = dist.new_group(backend="gloo", timeout=PATIENCE) if use_cuda else dist.group.WORLD
        return cls(dist.get_rank(), size, local_rank, local_size, control)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over all processes of a small tensor on the host."""
        if self.size > 1:
            values = values.clone()
            dist.all_reduce(values, group=self.control)
        return values

    def broadcast(self, value: Any) -> Any:
        """Sends the first process's value to all. Numpy arrays and tensors inside are sent one by one and not copied."""
        if self.size == 1:
            return value
        file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        if self.is_first:
            _Pickler(file, protocol=5, buffer_callback=buffers.append).dump(value)
        parts: list[Any] = [buffer.raw() for buffer in buffers]
        box = [(file.getvalue(), [part.nbytes for part in parts])]
        dist.broadcast_object_list(box, src=0, group=self.control)
        packed, sizes = box[0]
        if not self.is_first:
            parts = [bytearray(size) for size in sizes]
        for part in filter(len, parts):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # buffers of the first process may be read-only; they are only read
                whole = torch.frombuffer(part, dtype=torch.uint8)
            for piece in whole.split(BROADCAST_BYTES):
                dist.broadcast(piece, src=0, group=self.control)
        return value if self.is_first else pickle.loads(packed, buffers=parts)

    def on_first(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on the first process and returns its result on all. A UserError or an out-of-memory error there is
        raised on all."""
        if self.size == 1:
            return work()
        result: Any = None
        problem: Exception | None = None
        if self.is_first:
            try:
                result = work()
            except UserError as error:
                problem = error
            except torch.OutOfMemoryError as error:
                problem = AgreedOutOfMemory(str(error))
        result, problem = self.broadcast((result, problem))
        if problem is not None:
            raise problem
        return result

    def on_each(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on every process; each returns its own result. A UserError on one process is raised on all."""
        if self.size == 1:
            return work()
        result, problem = None, None
        try:
            result = work()
        except UserError as error:
            problem = error
        found: list[UserError | None] = [None] * self.size
        dist.all_gather_object(found, problem, group=self.control)
        for problem in found:
            if problem is not None:
                raise problem
        return result

    @contextmanager
    def agree_on_memory(self) -> Iterator[None]:
        """Raises an out-of-memory error of one process on all, so that none waits for it. No collectives inside the block."""
        problem = ""
        try:
            yield
        except torch.OutOfMemoryError as error:
            problem = str(error)
        if self.sum(torch.tensor([float(bool(problem))])) > 0:
            raise AgreedOutOfMemory(problem or "on another process")

    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sums gradients over all processes, in place to save memory. The drafter has few tensors: overlap gains nothing."""
        if self.size > 1:
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)

    def broadcast_parameters(self, module: nn.Module) -> None:
        if self.size > 1:
            for tensor in module.state_dict().values():
                dist.broadcast(tensor, src=0)

    def in_turn(self, work: Callable[[], Any]) -> Any:
        """Runs `work` on one process after the other; each returns its own result."""
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
