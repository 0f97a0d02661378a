"""Emulates Gluon's language with torch, without layouts: runs a kernel's Python code on a CPU, one program after the other.

It checks what is computed (offsets, masks, orders of reshapes), not how it is distributed over threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class Pointer:
    def __init__(self, memory: Tensor, offset: Tensor | int = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Tensor | int) -> Pointer:
        return Pointer(self.memory, self.offset + offset)

    def read(self, mask: Tensor | None, other: float = 0.0) -> Tensor:
        place = torch.as_tensor(self.offset)
        mask = torch.ones_like(place, dtype=torch.bool) if mask is None else mask
        place, mask = torch.broadcast_tensors(place, mask)
        flat = self.memory.view(-1)
        assert bool(((place >= 0) & (place < len(flat)) | ~mask).all()), "reads outside the tensor"
        return torch.where(mask, flat[place.where(mask, 0)], torch.tensor(other, dtype=flat.dtype))

    def write(self, value: Tensor, mask: Tensor) -> None:
        place, mask, value = torch.broadcast_tensors(torch.as_tensor(self.offset), mask, value)
        assert value.dtype == self.memory.dtype
        self.memory.view(-1)[place[mask]] = value[mask]


class Shared:
    def __init__(self, data: Tensor) -> None:
        self.data, self.shape = data, data.shape

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def index(self, number: int) -> Shared:
        return Shared(self.data[number])

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.data.permute(order))

    def store(self, value: Tensor) -> None:
        assert value.shape == self.shape
        self.data.copy_(value)

    def load(self, layout: object) -> Tensor:
        assert not self.data.isnan().any(), "reads memory that was never written"
        return self.data.clone()


class Copies:
    """Asynchronous copies: the target holds NaN until its group was waited for."""

    def __init__(self) -> None:
        self.begun: list[tuple[Shared, Tensor]] = []
        self.groups: list[list[tuple[Shared, Tensor]]] = []

    def async_copy_global_to_shared(self, target: Shared, pointer: Pointer, mask: Tensor) -> None:
        self.begun.append((target, pointer.read(mask)))
        target.data.fill_(float("nan"))

    def commit_group(self) -> None:
        self.groups.append(self.begun)
        self.begun = []

    def wait_group(self, outstanding: int) -> None:
        while len(self.groups) > outstanding:
            for target, value in self.groups.pop(0):
                target.store(value)


class Descriptor:
    """A TMA descriptor: reads blocks of a matrix, with zeros outside it."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix = matrix

    def read(self, place: list[int], shape: torch.Size) -> Tensor:
        block = torch.zeros(shape, dtype=self.matrix.dtype)
        inside = self.matrix[place[0] : place[0] + shape[0], place[1] : place[1] + shape[1]]
        block[: inside.shape[0], : inside.shape[1]] = inside
        return block


class Barrier:
    """An mbarrier that counts bytes. A phase that is waited for must have ended: here nothing arrives later."""

    def __init__(self) -> None:
        self.phase, self.missing = 0, 0

    def arrive(self, count: int) -> None:
        assert 0 < count <= self.missing, "more bytes than the barrier expects"
        self.missing -= count
        self.phase ^= not self.missing


class Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, place: int) -> Barrier:
        return self.all[place]


class Product:
    """An asynchronous product: it reads its inputs as late as the hardware may."""

    def __init__(self, a: Shared, b: Shared, total: Tensor | Product, use_total: bool) -> None:
        self.a, self.b, self.total, self.use_total = a, b, total, use_total
        self.value: Tensor | None = None

    def finish(self) -> None:
        total = self.total.value if isinstance(self.total, Product) else self.total
        product = self.a.load(None).float() @ self.b.load(None).float()
        self.value = total + product if self.use_total else product


def _hopper() -> SimpleNamespace:
    under_way: list[Product] = []

    def expect(barrier: Barrier, count: int, pred: bool) -> None:
        if pred:
            assert not barrier.missing
            barrier.missing = count

    def wait(barrier: Barrier, phase: int) -> None:
        assert barrier.phase != phase, "this wait would never end"

    def copy(descriptor: Descriptor, place: list[int], barrier: Barrier, target: Shared, pred: bool) -> None:
        if pred:
            target.store(descriptor.read(place, target.shape))
            barrier.arrive(2 * target.data.numel())  # elements have 16 bits on the card

    def multiply(a: Shared, b: Shared, total: Tensor | Product, use_acc: bool, is_async: bool) -> Product:
        under_way.append(Product(a, b, total, use_acc))
        return under_way[-1]

    def wait_for_products(outstanding: int, deps: list[Product]) -> object:
        while len(under_way) > outstanding:
            under_way.pop(0).finish()
        found = [one if one.value is None else one.value for one in deps]
        return found[0] if len(found) == 1 else tuple(found)

    return SimpleNamespace(
        tma=SimpleNamespace(async_copy_global_to_shared=copy),
        mbarrier=SimpleNamespace(init=lambda *_, **__: None, expect=expect, wait=wait, MBarrierLayout=lambda: None),
        fence_async_shared=lambda: None,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=wait_for_products,
    )


class Count(int):
    """An integer argument that a kernel may convert with `to`."""

    def to(self, dtype: torch.dtype) -> Count:
        return self


def _allocated(dtype: torch.dtype, shape: list[int], layout: object) -> Shared | Barriers:
    return Barriers(shape[0]) if dtype == torch.int64 else Shared(torch.full(shape, float("nan"), dtype=dtype))


def _reshaped(x: Tensor, shape: list[int]) -> Tensor:
    """Reshapes a tensor and gives it the `type.layout` that kernels read."""
    out = x.reshape(shape)
    out.type = SimpleNamespace(layout=None)
    return out


def _smaller(x: Tensor | int, y: Tensor | int) -> Tensor | int:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else torch.minimum(torch.as_tensor(x), torch.as_tensor(y))


def _language(program: list[int], grid: tuple[int, ...]) -> SimpleNamespace:
    def no_layout(*_: object, **__: object) -> None:
        return None

    return SimpleNamespace(
        **dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "DotOperandLayout"), no_layout),
        NVMMADistributedLayout=no_layout,
        float32=torch.float32,
        int8=torch.int8,
        int64=torch.int64,
        constexpr=None,
        static_range=range,
        static_assert=lambda condition: None,
        program_id=program.__getitem__,
        num_programs=grid.__getitem__,
        minimum=_smaller,
        bfloat16=torch.bfloat16,
        join=lambda x, y: torch.stack([x, y], -1),
        to_tensor=lambda number: number,
        arange=lambda start, end, layout: torch.arange(start, end),
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
        load=lambda pointer, mask=None, other=0.0: pointer.read(mask, other),
        store=lambda pointer, value, mask: pointer.write(value, mask),
        allocate_shared_memory=_allocated,
        permute=lambda x, order: x.permute(order),
        reshape=_reshaped,
        split=lambda x: x.unbind(-1),
        convert_layout=lambda x, layout: x,
        sum=lambda x, axis: x.sum(axis),
        fma=lambda x, y, z: x * y + z,
        sqrt=torch.sqrt,
        exp=torch.exp,
    )


def run(kernel: Any, grid: tuple[int, ...], *arguments: object, replaced: dict[str, Callable], **constants: object) -> None:
    """Runs every program of a grid. Tensors become pointers. `replaced`: substitutes for functions that are inline assembly."""
    program = [0] * len(grid)
    copies = Copies()
    language = {
        "gl": _language(program, grid),
        "hopper": _hopper(),
        "mma_v2": lambda a, b, total: total + a.float() @ b.float(),
        "async_copy": copies,
    } | replaced
    rebound: dict[object, FunctionType] = {}

    def bound(function: Any) -> FunctionType:
        source = getattr(function, "fn", function)
        if source not in rebound:
            names: dict[str, Any] = {"__builtins__": __builtins__}
            rebound[source] = FunctionType(source.__code__, names, source.__name__, source.__defaults__)
            for name in source.__code__.co_names:
                value = source.__globals__.get(name)
                if name in language:
                    names[name] = language[name]
                elif hasattr(value, "fn") or isinstance(value, FunctionType):
                    names[name] = bound(value)
                elif value is not None:
                    names[name] = value
        return rebound[source]

    pointers = [Pointer(value) if isinstance(value, Tensor) else value for value in arguments]
    for place in itertools.product(*map(range, grid)):
        program[:] = place
        bound(kernel)(*pointers, **constants)
        assert not copies.begun
        assert not copies.groups, "a program ended without waiting for its copies"
