"""Shared by the functions that write figures: result files, number formats, tables, and the list of blocks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Table = Callable[[], str]
BLOCKS: dict[str, Table] = {}


@cache
def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def block(name: str) -> str:
    assert name in BLOCKS, f"no figures called {name!r}; there are {', '.join(sorted(BLOCKS))}"
    return BLOCKS[name]()


def figures(name: str) -> Callable[[Table], Table]:
    def register(function: Table) -> Table:
        BLOCKS[name] = function
        return function

    return register


def table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [titles, ["---", *["---:"] * (len(titles) - 1)], *([_cell(value) for value in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def number(value: float, digits: int | None = None) -> str:
    """The number as text: no decimals from 20 on, one from 10 on, otherwise two."""
    if digits is None:
        digits = 0 if abs(value) >= 20 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"


def _cell(value: object) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def times(value: float) -> str:
    return f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def percent(value: float, digits: int = 0) -> str:
    return f"{100 * value:.{digits}f} %"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB"


def source(*names: str) -> str:
    """Links to result files, relative to `benchmarks/README.md`."""
    return ", ".join(f"[`{name}.json`](results/{name}.json)" for name in names)


def origin(result: dict[str, Any]) -> str:
    run = result["provenance"]
    return f"{run['device']}, commit `{run['commit']}`, torch {run['torch']}"


def gpu_speeds() -> tuple[dict[str, float], dict[str, float]]:
    """Tokens/s per user by number of users, without and with the drafter, measured with the current exact kernels."""
    speed = load("exact-h200")["speed, end tokens ignored"]
    plain = {users: run["tokens_per_s_per_user"] for users, run in speed["plain"].items()}
    spec = speed["spec (copied from the printed output)"]
    drafted = {name.split(",")[0]: run["tokens_per_s_per_user"] for name, run in spec.items() if name.endswith("chosen")}
    return plain, {users: float(value) for users, value in drafted.items()}
