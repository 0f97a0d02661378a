"""The CPU's C kernels (`cpu/`), called through ctypes: linears, norms, the likeliest token. Layers: `native_layers`.

Without a C compiler the slower torch operations are used.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from ctypes import Structure, c_double, c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fledge.errors import printable
from fledge.kernels.formats.gguf_blocks import FORMATS, PLAIN, Blocks
from fledge.kernels.native_build import built, compiler
from fledge.kernels.quantization import QuantizedWeight

log = logging.getLogger("fledge.kernels")

PANEL = 32  # outputs stored side by side; cpu/linear.h
# Numbers of the formats that do not occur in GGUF files; cpu/blocks.h.
GROUP_FORMATS = {8: 108, 4: 104}
WIDE_OFFSETS = 105
TENSOR_FORMATS = {getattr(torch, dtype): name for name, dtype in PLAIN.items()}
PACKED_AT_ONCE = 4 << 20  # bytes of a GGUF file that are packed per call
MAX_PARTS = 3
# Up to this many rows a call takes only milliseconds and keeps the GIL: releasing and reacquiring it costs more.
QUICK_ROWS = 16


class PartArguments(Structure):
    _fields_ = [("panels", c_void_p), ("outputs", c_long), ("format", c_long)]


class LinearArguments(Structure):
    _fields_ = [
        ("parts", PartArguments * MAX_PARTS),
        ("num_parts", c_long),
        ("bias", c_void_p),
        *((name, c_long) for name in ("inputs", "outputs", "group")),
        ("order", c_void_p),
        ("streamed", c_long),
    ]


class Library:
    def __init__(self, path: str) -> None:
        self.quick = self._declared(ctypes.PyDLL(path))
        self.patient = self._declared(ctypes.CDLL(path))  # releases the GIL during calls

    @staticmethod
    def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
        loaded.run_layers.argtypes = [c_void_p, c_void_p, c_long, *[c_void_p] * 4, c_long, c_void_p, c_void_p]
        loaded.run_target.argtypes = [*[c_void_p] * 4, c_long, c_void_p, c_void_p, c_long, c_void_p, c_void_p]
        loaded.run_drafter.argtypes = [c_void_p] * 6
        loaded.draft_chain.argtypes = [*[c_void_p] * 4, c_long, c_double, c_double, c_void_p, c_void_p]
        loaded.draft_chain.restype = c_long
        loaded.run_linear.argtypes = [c_void_p] * 3 + [c_long, c_int]
        loaded.run_experts.argtypes = [c_void_p, c_long, *[c_void_p] * 4, c_long, c_long, c_int]
        loaded.rms_norm.argtypes = [c_void_p] * 3 + [c_long] * 3 + [c_float]
        loaded.best_of.argtypes = [c_void_p, c_long, c_long, c_void_p, c_void_p, c_int]
        loaded.packed_bytes.argtypes = [c_int, c_long, c_long]
        loaded.packed_bytes.restype = c_long
        loaded.pack_blocks.argtypes = [c_int, c_void_p, c_long, c_long, c_long, c_void_p, c_int]
        loaded.look_up.argtypes = [c_int, c_void_p, *[c_long] * 3, c_void_p, c_long, c_void_p]
        for function in (loaded.run_linear, loaded.rms_norm, loaded.best_of, loaded.pack_blocks):
            function.restype = None
        return loaded

    def for_rows(self, rows: int) -> ctypes.CDLL:
        return self.quick if rows <= QUICK_ROWS else self.patient


@cache
def library() -> Library | None:
    """The compiled C library; None without a compiler or with FLEDGE_NATIVE=0."""
    if os.environ.get("FLEDGE_NATIVE") == "0":
        return None
    command = compiler()
    if command is None:
        log.warning(
            "no C compiler was found, so torch is used, several times slower than the CPU kernels; install gcc or clang, or "
            "`pip install ziglang`"
        )
        return None
    try:
        return Library(str(built(command)))
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or b""
        lines = said.decode(errors="replace").strip().splitlines() or [str(error)]
        log.warning("the CPU kernels could not be built, so torch is used, several times slower: %s", printable(lines[-1], 300))
        return None


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _panels(x_OI: Tensor) -> Tensor:
    """Reshapes to [outputs / PANEL, PANEL, …], the last panel padded with zeros."""
    outputs = x_OI.shape[0]
    padded = x_OI.new_zeros(-(-outputs // PANEL) * PANEL, *x_OI.shape[1:])
    padded[:outputs] = x_OI
    return padded.unflatten(0, (-1, PANEL))


def _grouped_panels(weight: QuantizedWeight) -> Tensor:
    """The panels of a quantised weight, [panels, groups, bytes]: scales, offsets and codes of each group."""
    groups, parts = weight.scales.shape[1], [weight.scales]
    if weight.bits == 4:  # without offsets a nibble means its value minus 8
        parts.append(-8 * weight.scales if weight.offsets is None else weight.offsets)
        pairs = weight.codes.unflatten(1, (-1, 4))  # a byte: two neighbouring inputs; a word: four of them
        low, high = (pairs & 15, pairs >> 4)  # the first inputs go to the word's low half, the second to its high half
        halves = [part[..., ::2] | part[..., 1::2] << 4 for part in (low, high)]
        codes = torch.cat(halves, -1).flatten(1).view(torch.int32)
    else:
        codes = weight.codes.view(torch.int16)  # two neighbouring inputs
    parts.append(codes.unflatten(1, (groups, -1)))
    # [panels, PANEL, groups, …] -> [panels, groups, …, PANEL] -> bytes
    laid = [_panels(part).movedim(1, -1).contiguous().flatten(2) for part in parts]
    return torch.cat([part.view(torch.uint8) for part in laid], -1).contiguous()


class _Arena:
    """Allocates memory in huge pages if the system has them: a pass of one row over SmolLM2 takes 4.6 ms on one core, and
    4.9 ms with pages of 4 KiB. A chunk holds many tensors and is freed with the last of them."""

    CHUNK = 32 << 20

    def __init__(self) -> None:
        self.chunk, self.left = torch.empty(0, dtype=torch.uint8), 0

    def take(self, num_bytes: int) -> Tensor:
        rounded = -(-num_bytes // 64) * 64
        if rounded > self.left:
            self.left = max(rounded, self.CHUNK)
            memory = mmap.mmap(-1, self.left, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # the system may not support huge pages
                    memory.madvise(mmap.MADV_HUGEPAGE)
            self.chunk = torch.frombuffer(memory, dtype=torch.uint8)
        start = len(self.chunk) - self.left
        self.left -= rounded
        return self.chunk[start : start + num_bytes]


_arena = _Arena()


def _block_panels(blocks: Blocks) -> Tensor:
    """Packs a GGUF tensor into panels. The file's pages are released along the way, so the weights are in memory only once."""
    if blocks.format in PLAIN:
        panels = _plain_panels(blocks.plain())
        blocks.release()
        return panels
    c, number, threads = library(), FORMATS[blocks.format].number, torch.get_num_threads()
    panels = _arena.take(c.quick.packed_bytes(number, blocks.inputs, blocks.outputs))
    at, step = panels.data_ptr(), max(1, PACKED_AT_ONCE // (PANEL * blocks.row_bytes)) * PANEL
    for first in range(0, blocks.outputs, step):
        some = blocks.rows(slice(first, first + step))
        c.patient.pack_blocks(number, some.address, some.row_bytes, some.inputs, some.outputs, at, threads)
        at += c.quick.packed_bytes(number, some.inputs, some.outputs)
        some.release()
    return panels


def _plain_panels(weight_OI: Tensor) -> Tensor:
    return _panels(weight_OI).transpose(1, 2).contiguous()


def look_up(blocks: Blocks, rows: Tensor) -> Tensor:
    """Rows of a GGUF tensor in fp32, read directly from the mapped file."""
    rows = rows.to(torch.int64).contiguous()
    out = torch.empty(*rows.shape, blocks.inputs)
    outside = library().quick.look_up(
        FORMATS[blocks.format].number,
        blocks.address,
        blocks.row_bytes,
        blocks.inputs,
        blocks.outputs,
        rows.data_ptr(),
        rows.numel(),
        out.data_ptr(),
    )
    if outside:
        raise IndexError(f"a row beyond the table's {blocks.outputs}")
    return out


class NativeLinear:
    """A linear's weights in the layout of `cpu/linear.h`: plain, quantised in groups, or GGUF blocks of several tensors, whose
    outputs are concatenated and whose formats may differ."""

    def __init__(
        self, weight_OI: Tensor | QuantizedWeight | list[Blocks], bias: Tensor | None, order_I: Tensor | None = None
    ) -> None:
        """`order_I`: for a quantised weight, the input that each column reads; None: in order."""
        group, self.order = 0, None if order_I is None else order_I.long().contiguous()
        assert self.order is None or isinstance(weight_OI, QuantizedWeight)
        if isinstance(weight_OI, QuantizedWeight):
            (outputs, groups), self.bits, group = weight_OI.scales.shape, weight_OI.bits, weight_OI.group_size
            inputs, self.panels = groups * group, [_grouped_panels(weight_OI)]
            is_wide = weight_OI.offsets is not None and weight_OI.offsets.dtype == torch.float32
            parts = [(outputs, WIDE_OFFSETS if is_wide else GROUP_FORMATS[self.bits])]
        elif isinstance(weight_OI, list):
            inputs, outputs = weight_OI[0].inputs, sum(blocks.outputs for blocks in weight_OI)
            self.panels = [_block_panels(blocks) for blocks in weight_OI]
            parts = [(blocks.outputs, FORMATS[blocks.format].number) for blocks in weight_OI]
            self.bits = 8 * sum(panels.nbytes for panels in self.panels) / (inputs * outputs)
        else:
            (outputs, inputs), self.bits = weight_OI.shape, 8 * weight_OI.element_size()
            self.panels = [_plain_panels(weight_OI.detach())]
            parts = [(outputs, FORMATS[TENSOR_FORMATS[weight_OI.dtype]].number)]
        self.is_plain = isinstance(weight_OI, Tensor)
        self.bias = None if bias is None else bias.detach().float().contiguous()
        pointers = (PartArguments * MAX_PARTS)(
            *((panels.data_ptr(), *part) for panels, part in zip(self.panels, parts, strict=True))
        )
        sizes = (inputs, outputs, group)
        self.arguments = LinearArguments(pointers, len(parts), address(self.bias), *sizes, address(self.order))
        self.pointer = ctypes.addressof(self.arguments)

    @property
    def weight(self) -> Tensor:
        """The weight [outputs, inputs] of an unquantised linear."""
        assert self.is_plain, "codes are not weights"
        return self.panels[0].transpose(1, 2).flatten(0, 1)[: self.arguments.outputs]

    @property
    def num_bytes(self) -> int:
        """The size of the weights without padding."""
        parts = zip(self.panels, self.arguments.parts, strict=False)
        return sum(panels.nbytes // (-(-part.outputs // PANEL) * PANEL) * part.outputs for panels, part in parts)

    def stream(self) -> None:
        """Makes passes of few rows read the weights without keeping them in the processor's caches."""
        self.arguments.streamed = 1

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        inputs, outputs = self.arguments.inputs, self.arguments.outputs
        out = x.new_empty(*x.shape[:-1], outputs)
        rows = x.numel() // inputs
        library().for_rows(rows).run_linear(self.pointer, x.data_ptr(), out.data_ptr(), rows, torch.get_num_threads())
        return out


@cache
def cache_bytes() -> int:
    """The size of the last-level cache; 0: the system does not report it."""
    with suppress(OSError, ValueError):  # "32768K"
        return int(Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip().removesuffix("K")) << 10
    return 0


def stream_past_caches(linears: Sequence[NativeLinear]) -> None:
    """Makes a network's linears stream if together they exceed the last-level cache and would be evicted before reuse anyway.

    Other data then stays in the cache: SmolLM2's drafter (16 MB of a 32 MB cache) drafts faster, with 3-8 % more tokens/s.
    """
    size = cache_bytes()
    if size and sum(linear.num_bytes for linear in linears) > size:
        for linear in linears:
            linear.stream()


def rms_norm(x_ND: Tensor, weight_D: Tensor, eps: float, out_ND: Tensor | None = None) -> Tensor:
    """RMSNorm of rows; `out_ND` may be some columns of a wider tensor."""
    out = torch.empty_like(x_ND) if out_ND is None else out_ND
    rows, size = x_ND.shape
    library().quick.rms_norm(x_ND.data_ptr(), weight_D.data_ptr(), out.data_ptr(), rows, size, out.stride(0), eps)
    return out


def best_of(logits_NV: Tensor, *, probability: bool = False) -> tuple[list[int], list[float] | None]:
    """Returns the likeliest token of each row and, if `probability`, its probability.

    In C because torch would wake its own threads for it, which then spin on the cores that the next layer needs.
    """
    if library() is None or logits_NV.dtype != torch.float32 or logits_NV.is_cuda or not logits_NV.is_contiguous():
        best = logits_NV.float().max(-1)
        shares = (best.values - logits_NV.float().logsumexp(-1)).exp().tolist() if probability else None
        return best.indices.tolist(), shares
    rows, size = logits_NV.shape
    index, shares = (c_long * rows)(), (c_float * rows)() if probability else None
    library().quick.best_of(logits_NV.data_ptr(), rows, size, index, shares, torch.get_num_threads())
    return list(index), list(shares) if shares is not None else None
