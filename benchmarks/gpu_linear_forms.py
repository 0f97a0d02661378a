"""Launch configurations of linears that `gpu_linears.py` measures, and the table that its results are written to."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from fledge.kernels.linear import dispatch, tma_tiles
from fledge.kernels.linear.dispatch import Case
from fledge.kernels.linear.staged_mma import LaunchConfig, programs_at_once
from fledge.kernels.linear.summation import CHUNK, HEAD, Summation
from fledge.kernels.linear.tiles import Tile
from fledge.kernels.triton_support import MEASURED_MULTIPROCESSORS, MEASURED_SHARED_MEMORY

MEASURED = Path(__file__).parents[1] / "fledge/kernels/linear/measured.py"


@contextmanager
def on_cublas() -> Iterator[None]:
    """Runs all linears of plain weights except heads on cuBLAS, in its own summation order; norms are separate kernels."""
    choose_kernel, summation = dispatch.choose_kernel, dispatch.summation

    def choose(case: Case) -> tuple[str, tuple[int, ...]]:
        return ("cublas", ()) if case.format == "plain" and case.outputs < HEAD else choose_kernel(case)

    def order(inputs: int, *others: Any, quantised: bool = False, **options: Any) -> Summation:
        if not quantised:
            return Summation(1, False, -(-inputs // CHUNK) * CHUNK)
        return summation(inputs, *others, quantised=True, **options)

    with patch.multiple(dispatch, choose_kernel=choose, summation=order, cublas_is_exact=lambda *_: True):
        yield


class Kind(NamedTuple):
    """The shape of a linear in a model's layer, and what is fused into it."""

    model: str
    name: str
    inputs: int
    outputs: int  # rows of the weight
    norm: bool = False
    gated: bool = False
    residual: bool = False
    bias: bool = False
    head: bool = False

    @property
    def key(self) -> tuple[int, int, bool]:
        return self.inputs, self.outputs, self.gated


def layer(model: str, hidden: int, inner: int, heads: int, qkv: int, vocabulary: int, bias: bool) -> list[Kind]:
    return [
        Kind(model, "qkv", hidden, qkv, norm=True, bias=bias),
        Kind(model, "o", heads, hidden, residual=True),
        Kind(model, "gate_up", hidden, 2 * inner, norm=True, gated=True),
        Kind(model, "down", inner, hidden, residual=True),
        Kind(model, "head", hidden, vocabulary, head=True),
    ]


def drafter(model: str, hidden: int, qkv: int, vocabulary: int) -> list[Kind]:
    """Linears of an EAGLE drafter whose shapes do not occur in its target's layers."""
    return [
        Kind(model, "fc", 3 * hidden, hidden),
        Kind(model, "qkv", 2 * hidden, qkv),
        Kind(model, "head", hidden, vocabulary, head=True),
    ]


MODELS = {
    "135m": layer("135m", 576, 1536, 576, 960, 49152, False),
    "1.5b": layer("1.5b", 1536, 8960, 1536, 2048, 151936, True),
    "135m-d": drafter("135m-d", 576, 960, 8192),
    "1.5b-d": drafter("1.5b-d", 1536, 2048, 32000),
    "8b": layer("8b", 4096, 14336, 4096, 6144, 128256, False),
}
ROWS = {
    "135m": (1, 4, 16, 32, 64, 128, 256, 1024, 4096),
    "1.5b": (1, 4, 8, 16, 64, 256, 1024, 4096),
    "135m-d": (4, 16, 64, 256, 4096),
    "1.5b-d": (4, 16, 64, 256, 4096),
    "8b": (1, 4, 8, 16, 64, 256, 1024, 4096),
}
PREFILL, ANY_ROWS = 4096, 1 << 20  # the fastest configuration for PREFILL rows is used for all larger numbers too
HEAD_ROWS = (1, 4, 16, 64)
LAYERS = {"135m": 30, "1.5b": 8, "135m-d": 30, "1.5b-d": 8, "8b": 2}  # layers in the chain: too many for the L2 cache
STAGED = (
    LaunchConfig(16, 16),
    LaunchConfig(16, 32, 2),
    LaunchConfig(32, 16),
    LaunchConfig(32, 32),
    LaunchConfig(32, 32, 2),
    LaunchConfig(64, 16),
    LaunchConfig(64, 32),
    LaunchConfig(64, 32, 2),
)
# Tiles: outputs, rows, inputs, warps, stages. For a summation in one slice, or in several (split-K).
ONE_SLICE = (
    (64, 16, 128, 4, 5),
    (64, 16, 128, 4, 8),
    (32, 16, 128, 2, 8),
    (32, 16, 128, 4, 8),
    (16, 16, 128, 1, 8),
    (16, 16, 256, 2, 6),
    (64, 16, 128, 4, 3),
    (64, 16, 64, 4, 6),
    (32, 16, 128, 4, 4),
    (32, 16, 256, 4, 3),
    (64, 32, 128, 4, 5),
    (64, 64, 128, 4, 4),
    (64, 64, 64, 4, 6),
    (128, 64, 64, 4, 4),
    (128, 128, 64, 8, 4),
    (128, 256, 64, 8, 3),
)
SEVERAL_SLICES = (
    (16, 16, 64, 4, 8),
    (16, 16, 128, 4, 4),
    (16, 16, 128, 4, 6),
    (32, 16, 64, 4, 8),
    (32, 16, 128, 2, 8),
    (64, 16, 128, 4, 8),
    (64, 16, 64, 4, 6),
    (32, 32, 64, 4, 8),
    (32, 64, 64, 4, 8),
    (64, 32, 64, 4, 6),
    (64, 64, 64, 4, 4),
    (64, 64, 64, 4, 6),
    (128, 64, 64, 4, 5),
    (64, 128, 64, 4, 5),
    (128, 128, 64, 8, 4),
)
# `tma_tiles.LaunchConfig`: rows, outputs, warps, stages, where sums of slices are kept, programs per multiprocessor, and if the
# next kernel may start at once.
STREAMED_ROWS, STREAMED_WEIGHTS = 64, 1 << 21  # FEW_ROWS are tried up to this number of rows, and from this number of weights
FEW_ROWS = (
    (64, 32, 4, 8, tma_tiles.REGISTERS, 2, 1),
    (64, 64, 4, 6, tma_tiles.REGISTERS, 1, 1),
    (64, 64, 4, 6, tma_tiles.REGISTERS, 2, 0),
    (64, 64, 4, 12, tma_tiles.REGISTERS, 1, 1),
    (64, 128, 4, 4, tma_tiles.REGISTERS, 1, 1),
    (64, 128, 4, 4, tma_tiles.REGISTERS, 2, 0),
    (64, 128, 4, 8, tma_tiles.REGISTERS, 1, 1),
    (64, 64, 4, 6, tma_tiles.PROGRAMS, 1, 1),
    (64, 64, 4, 6, tma_tiles.PROGRAMS, 2, 0),
    (64, 128, 4, 4, tma_tiles.PROGRAMS, 1, 1),
)
MANY_ROWS = (
    (128, 128, 8, 6, tma_tiles.REGISTERS, 1),
    (128, 128, 8, 6, tma_tiles.PROGRAMS, 1),
    (128, 128, 4, 3, tma_tiles.PROGRAMS, 2),
    (64, 128, 4, 4, tma_tiles.REGISTERS, 2),
    (64, 64, 4, 6, tma_tiles.REGISTERS, 2),
    (64, 64, 4, 6, tma_tiles.PROGRAMS, 2),
    (128, 256, 8, 4, tma_tiles.PROGRAMS, 1),
    (128, 256, 8, 4, tma_tiles.MEMORY, 1),
)


def measured_without(kernel: str) -> dict[tuple[int, int, bool], tuple]:
    """`measured.CONFIGS` without the entries of a kernel, so that other kernels take their rows."""
    return {key: tuple(entry for entry in entries if entry[1] != kernel) for key, entries in dispatch.CONFIGS.items()}


def candidates(kind: Kind, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields the kernels and launch configurations that could be the fastest."""
    case = Case(rows, kind.inputs, kind.outputs, "plain", torch.bfloat16, torch.device("cuda"), kind.gated)
    order = case.order
    outputs = kind.outputs // (2 if kind.gated else 1)
    if order.scales_sums and rows <= 64:
        yield from (("register_mma", form) for form in itertools.product((8, 16), (0, 1)) if rows <= 8 * form[0])
    if order.scales_sums and rows >= 16:
        for form in STAGED:
            programs = -(-rows // form.rows) * -(-outputs // form.columns)
            slots = programs_at_once(form, order, kind.gated, MEASURED_SHARED_MEMORY) * MEASURED_MULTIPROCESSORS
            if programs <= 1.6 * slots and form.rows < 2 * rows + 16:
                yield "staged_mma", form
    for tile in (Tile(*sizes) for sizes in (ONE_SLICE if order.slices == 1 else SEVERAL_SLICES)):
        if tile.rows > max(16, rows) or 16 * tile.rows < rows or (order.scales_sums and rows < 32):
            continue
        if tile.rows == 16 and rows > 16:
            continue
        programs = -(-rows // tile.rows) * -(-kind.outputs // tile.outputs)
        for split in (0, 1) if order.slices > 1 and (tile.rows, tile.outputs) != (16, 16) else (0,):
            if programs > 100 if split else programs < 40:  # too many programs, or so few that the card is mostly idle
                continue
            yield "tiles", (*tile, split)
    is_streamed = rows <= STREAMED_ROWS and kind.inputs * kind.outputs >= STREAMED_WEIGHTS and not order.scales_sums
    if is_streamed or (order.slices > 1 and rows >= 128):
        forms = FEW_ROWS if is_streamed else MANY_ROWS
        yield from (("tma_tiles", form) for form in tma_forms(forms, kind, rows, order.slices))
    if rows > (64 if order.slices == 1 else 511) and not order.scales_sums:
        yield "cublas", ()


def tma_forms(forms: Iterable[tuple[int, ...]], kind: Kind, rows: int, slices: int) -> Iterator[tuple[int, ...]]:
    """Yields the configurations that neither leave most of the card idle nor write partial sums without need."""
    for form in (tma_tiles.LaunchConfig(*numbers) for numbers in forms):
        tiles = -(-rows // form.rows) * -(-kind.outputs // form.outputs)
        work = tiles * (slices if form.sums == tma_tiles.PROGRAMS else 1)
        few, many = work < 40, rows > STREAMED_ROWS and tiles > 4 * MEASURED_MULTIPROCESSORS
        if few or (many and (form.sums == tma_tiles.PROGRAMS or form.outputs == 64)):
            continue
        if form.sums == tma_tiles.PROGRAMS and slices == 1:
            continue
        if form.sums == tma_tiles.MEMORY and kind.gated:
            continue
        yield form


def head_tiles(rows: int) -> list[Tile]:
    return [tile for sizes in ONE_SLICE if (tile := Tile(*sizes)).rows <= max(16, rows) and tile.rows <= 64]


def label(kernel: str, numbers: tuple[int, ...]) -> str:
    if kernel == "tiles" and numbers:
        *tile, split = numbers
        return f"tiles {'x'.join(map(str, tile))}{' split' if split else ''}"
    return f"{kernel} {'x'.join(map(str, numbers))}".strip()


def filled(lines: list[dict[str, Any]]) -> dict[tuple[int, int, bool], tuple]:
    """The content of `measured.CONFIGS`. Adjacent numbers of rows with the same configuration are one entry."""
    forms: dict[tuple[int, int, bool], list] = {}
    for line in lines:
        if line["form"] is None:
            continue
        kernel, numbers = line["form"]
        entries = forms.setdefault((line["K"], line["N"], line["linear"] == "gate_up"), [])
        if entries and entries[-1][1:] == (kernel, tuple(numbers)):
            entries.pop()
        entries.append((line["rows"] if line["rows"] < PREFILL else ANY_ROWS, kernel, tuple(numbers)))
    return {key: tuple(entries) for key, entries in forms.items()}


def fill(lines: list[dict[str, Any]], path: Path = MEASURED) -> None:
    """Writes the fastest configurations to `measured.py`."""
    write_configs(filled(lines), path)


def write_configs(configs: dict[tuple[int, int, bool], tuple], path: Path = MEASURED) -> None:
    """Writes `measured.CONFIGS`."""
    text = path.read_text()
    start = text.index("CONFIGS: ")
    entries = ""
    for key, forms in configs.items():
        lines = (f"        {(most, kernel, tuple(numbers))},\n" for most, kernel, numbers in forms)
        entries += f"    {key}: (\n" + "".join(lines) + "    ),\n"
    written = text[start : text.index("=", start)] + "= {\n" + entries + "}\n"
    path.write_text(text[:start] + written.replace("'", '"'))
    print(f"{path}: {len(configs)} shapes")
