"""Runs a few PTX instructions in numpy, so that the inline assembly of kernels is tested without a card."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch


def run_assembly(text: str, num_outputs: int, *sources: int) -> list[np.uint32]:
    """Returns the values of $0 … after the block. `sources`: the operands after the outputs, 32 bits each."""
    registers: dict[str, np.uint32 | np.uint16] = {f"${num_outputs + i}": np.uint32(x) for i, x in enumerate(sources)}

    def value(name: str):
        if name in registers:
            return registers[name]
        return np.uint32(int(name[2:], 16)) if name.startswith("0f") else np.uint32(int(name, 0))

    for line in text.strip()[1:-1].split(";"):
        name, _, operands = line.strip().partition(" ")
        if name in ("", ".reg"):
            continue
        if (halves := re.match(r"\{([\w$]+), ([\w$]+)\}, (\S+)", operands)) is not None:
            assert name == "mov.b32"
            both = int(value(halves[3]))
            registers[halves[1]], registers[halves[2]] = np.uint16(both & 0xFFFF), np.uint16(both >> 16)
            continue
        target, *inputs = operands.split(", ")
        registers[target] = _OPERATIONS[name](*map(value, inputs))
    return [np.uint32(registers[f"${i}"]) for i in range(num_outputs)]


def as_floats(registers: Sequence[np.uint32]) -> list[float]:
    return [float(register.view(np.float32)) for register in registers]


def as_bfloat16(registers: Sequence[np.uint32]) -> torch.Tensor:
    """The halves of all registers as bfloat16, low halves first."""
    return torch.from_numpy(np.array(registers, dtype=np.uint32).view(np.int16)).view(torch.bfloat16)


def _permuted(a: np.uint32, b: np.uint32, selector: np.uint32) -> np.uint32:
    data = np.array([a, b], dtype="<u4").view(np.uint8)
    return np.array([data[int(selector) >> 4 * i & 7] for i in range(4)], dtype=np.uint8).view("<u4")[0]


def _bits(number: float) -> np.uint32:
    return np.float32(number).view(np.uint32)


def _pair(high: np.uint32, low: np.uint32) -> np.uint32:
    halves = torch.tensor(as_floats([low, high])).bfloat16().view(torch.int16).numpy()
    return np.ascontiguousarray(halves).view(np.uint32)[0]


def _fma_of_pairs(*pairs: np.uint32) -> np.uint32:
    a, b, c = (torch.tensor(np.array([x], dtype=np.uint32).view(np.int16)).view(torch.bfloat16).double() for x in pairs)
    return (a * b + c).bfloat16().view(torch.int16).numpy().view(np.uint32)[0]


def _looked_up(a: np.uint32, b: np.uint32, c: np.uint32, table: np.uint32) -> np.uint32:
    """Computes a bitwise function of three operands: bit 4 a + 2 b + c of the table, for each bit."""
    bits = [(int(a) >> i & 1) << 2 | (int(b) >> i & 1) << 1 | int(c) >> i & 1 for i in range(32)]
    return np.uint32(sum((int(table) >> bit & 1) << i for i, bit in enumerate(bits)))


def _from_fp8(codes: np.uint16) -> np.uint32:
    both = torch.from_numpy(np.array([codes], dtype=np.uint16).view(np.uint8)).view(torch.float8_e4m3fn)
    return both.half().view(torch.int16).numpy().view(np.uint32)[0]


_OPERATIONS = {
    "xor.b32": np.bitwise_xor,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "lop3.b32": _looked_up,
    "mov.b32": lambda x: x,
    "fma.rn.bf16x2": _fma_of_pairs,
    "prmt.b32": _permuted,
    "cvt.rn.bf16x2.f32": _pair,
    "cvt.rn.f16x2.e4m3x2": _from_fp8,
    "cvt.u32.u16": lambda half: np.uint32(int(half) & 0xFFFF),
    "cvt.f32.f16": lambda half: _bits(float(half.view(np.float16))),
}
