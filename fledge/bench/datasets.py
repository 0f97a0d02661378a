"""Loads benchmark data sets: JSONL files of conversations, the built-in prompts, and the user's own copy of SPEED-Bench.

Each line is one conversation of user turns: {"id": "mt-1", "category": "writing", "turns": ["Write …", "Now shorten it."]}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fledge.errors import UserError, first_line
from fledge.sources import HUB_ID

# Prompts written for this project, in the eleven categories of SPEED-Bench.
BUILT_IN = Path(__file__).with_name("builtin.jsonl")
# SPEED-Bench's placeholder for prompts that its user must fetch from their sources.
PLACEHOLDER = "SHOULD BE FETCHED FROM THE SOURCE"


@dataclass(frozen=True)
class Item:
    id: str
    category: str
    turns: tuple[str, ...]  # the user's messages, in order


def load_items(data: str, *, limit: int = 0, categories: Iterable[str] = ()) -> list[Item]:
    """Loads conversations. `data`: `builtin`, a JSONL or parquet file, a folder of them, or a data set's hub id.

    `limit`: maximum number per category, spread evenly over the file; 0: all.
    """
    files = [BUILT_IN] if data == "builtin" else _files(data)
    items = [item for file in files for item in _read(file)]
    if not items:
        raise UserError(f"{data}: no conversations in it")
    if wanted := set(categories):
        if unknown := wanted - {item.category for item in items}:
            known = ", ".join(sorted({item.category for item in items}))
            raise UserError(f"{data}: no category {', '.join(sorted(unknown))}; there are {known}")
        items = [item for item in items if item.category in wanted]
    return _limited(items, limit) if limit else items


def _limited(items: list[Item], limit: int) -> list[Item]:
    chosen: list[Item] = []
    for category in dict.fromkeys(item.category for item in items):
        group = [item for item in items if item.category == category]
        step = max(1.0, len(group) / limit)
        chosen += [group[int(i * step)] for i in range(min(limit, len(group)))]
    return chosen


def _files(data: str) -> list[Path]:
    path = Path(data).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir():
        if HUB_ID.fullmatch(data) and not data.startswith("."):
            path = _from_hub(data)
        else:
            raise UserError(f"data set {data!r} was not found; give a JSONL file, a folder of them, a hub id or 'builtin'")
    files = sorted(file for kind in ("*.jsonl", "*.parquet") for file in path.rglob(kind))
    if not files:
        raise UserError(f"{data}: neither .jsonl nor .parquet files in it")
    return files


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, repo_type="dataset", allow_patterns=["*.jsonl", "*.parquet"]))
    except Exception as error:  # a missing network raises many different types
        raise UserError(f"{name}: no such folder here, and it cannot be fetched from the hub ({first_line(error)})") from None


def _read(file: Path) -> list[Item]:
    rows = _parquet(file) if file.suffix == ".parquet" else _jsonl(file)
    items = [_item(row, file, number) for number, row in rows]
    if missing := sum(PLACEHOLDER in turn.upper() for item in items for turn in item.turns):
        raise UserError(
            f"{file}: {missing} turns are placeholders; run SPEED-Bench's own preparation script, which fetches their text, "
            "and give its output"
        )
    return items


def _jsonl(file: Path) -> Iterable[tuple[int, Any]]:
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({error})") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{file}, line {number}: not JSON ({getattr(error, 'msg', 'nested too deeply')})") from None


def _parquet(file: Path) -> Iterable[tuple[int, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise UserError(f"{file}: parquet files need pyarrow (pip install pyarrow), or convert it to JSONL") from None
    try:
        return enumerate(parquet.read_table(file).to_pylist(), 1)
    except (ValueError, OSError) as error:  # pyarrow's own errors are subclasses of these
        raise UserError(f"{file}: not a parquet file ({first_line(error)})") from None


def _item(row: Any, file: Path, number: int) -> Item:
    where = f"{file}, {'row' if file.suffix == '.parquet' else 'line'} {number}"
    if not isinstance(row, Mapping) or not isinstance(row.get("turns"), str | list) or not row["turns"]:
        raise UserError(f'{where}: expected {{"id", "category", "turns": [text, …]}} with at least one turn')
    turns = row["turns"]
    turns = [turns] if isinstance(turns, str) else turns
    contents = [turn.get("content") if isinstance(turn, Mapping) else turn for turn in turns]
    texts = [text for text in contents if isinstance(text, str) and text.strip()]
    if len(texts) < len(contents):
        raise UserError(f"{where}: a turn is empty or not text")
    # SPEED-Bench and MT-bench call the id `question_id`. In a parquet table a missing value is None.
    names = (row.get("id"), row.get("question_id"), f"{file.stem}-{number}")
    identity = next(name for name in names if name is not None)
    return Item(str(identity), str(row.get("category") or file.stem).lower(), tuple(texts))
