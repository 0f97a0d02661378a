"""Data sets from files and from the hub, and invalid ones."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from fledge.bench.datasets import Item, load_items
from fledge.errors import UserError

CATEGORIES = ["coding", "math", "humanities", "stem", "writing", "summarization", "roleplay", "rag", "multilingual"]
CATEGORIES += ["reasoning", "qa"]


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_built_in_prompts_cover_the_categories():
    items = load_items("builtin")
    assert list(dict.fromkeys(item.category for item in items)) == CATEGORIES
    assert len({item.id for item in items}) == len(items) >= 24
    assert len(load_items("builtin", limit=1)) == 11
    assert {item.category for item in load_items("builtin", categories=["qa", "rag"])} == {"qa", "rag"}


def test_a_folder_of_files(tmp_path):
    write(tmp_path / "b.jsonl", {"id": 7, "category": "Math", "turns": ["one", "two"]})
    write(
        tmp_path / "a.jsonl",
        {"turns": ["x"]},
        {"question_id": "q", "category": "c", "turns": [{"role": "user", "content": "y"}]},
    )
    assert load_items(str(tmp_path)) == [Item("a-1", "a", ("x",)), Item("q", "c", ("y",)), Item("7", "math", ("one", "two"))]


def test_limit_takes_evenly_spaced_items(tmp_path):
    data = write(tmp_path / "a.jsonl", *({"id": i, "category": "c", "turns": ["t"]} for i in range(10)))
    assert [item.id for item in load_items(data, limit=2)] == ["0", "5"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": 1, "turns": []}, "line 1"),
        ({"id": 1, "turns": ["a", " "]}, "empty"),
        (["a"], "expected"),
        ({"id": 1, "turns": 5}, "expected"),
        ({"id": 1, "turns": {"a": "b"}}, "expected"),
        ({"id": 1, "turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"]}, "preparation script"),
    ],
)
def test_bad_rows_are_refused(tmp_path, row, said):
    with pytest.raises(UserError, match=said):
        load_items(write(tmp_path / "a.jsonl", row))


def test_mistakes_are_named(tmp_path):
    (tmp_path / "bad.jsonl").write_text("{not json\n")
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1"):
        load_items(str(tmp_path / "bad.jsonl"))
    (tmp_path / "latin.jsonl").write_bytes('{"turns": ["Übung"]}'.encode("latin-1"))
    with pytest.raises(UserError, match=r"latin\.jsonl: cannot be read"):
        load_items(str(tmp_path / "latin.jsonl"))
    with pytest.raises(UserError, match="was not found"):
        load_items("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither"):
        load_items(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no category poems; there are coding"):
        load_items("builtin", categories=["poems"])


def test_a_data_set_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "test.jsonl", {"id": 1, "category": "c", "turns": ["x"]})
    asked = []

    def download(name, **options):
        asked.append((name, options))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert load_items("someone/prompts") == [Item("1", "c", ("x",))]
    assert asked == [("someone/prompts", {"repo_type": "dataset", "allow_patterns": ["*.jsonl", "*.parquet"]})]


def test_unreachable_hub_is_reported(tmp_path, monkeypatch):
    def download(*_, **__):
        raise ConnectionError("no route to host\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(
        UserError, match=r"^someone/prompts: no such folder here, and it cannot be fetched from the hub \(no route to host\)$"
    ):
        load_items("someone/prompts")
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(tmp_path))
    with pytest.raises(UserError, match="someone/prompts: neither"):
        load_items("someone/prompts")


def test_local_folder_takes_precedence_over_the_hub(tmp_path, monkeypatch):
    (tmp_path / "someone" / "prompts").mkdir(parents=True)
    write(tmp_path / "someone" / "prompts" / "a.jsonl", {"turns": ["x"]})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    assert load_items("someone/prompts") == [Item("a-1", "a", ("x",))]


class ArrowInvalid(ValueError):
    """Stands in for pyarrow's exception of this name."""


def read_table(file):
    """Stands in for pyarrow's function, because pyarrow is not a dependency: reads JSON instead of Parquet."""
    try:
        rows = json.loads(file.read_text())
    except ValueError:
        raise ArrowInvalid("Parquet magic bytes not found in footer.\nEither the file is corrupted or …") from None
    return SimpleNamespace(to_pylist=lambda: rows)


@pytest.fixture
def parquet(monkeypatch):
    module = SimpleNamespace(read_table=read_table)
    monkeypatch.setitem(sys.modules, "pyarrow", SimpleNamespace(parquet=module))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", module)


@pytest.mark.usefixtures("parquet")
def test_parquet_files(tmp_path):
    rows = [{"question_id": "q", "category": "Coding", "turns": ["x", "y"]}]
    rows += [{"question_id": None, "category": None, "turns": [text]} for text in ("z", "")]
    (tmp_path / "test.parquet").write_text(json.dumps(rows[:2]))
    write(tmp_path / "a.jsonl", {"id": 1, "category": "c", "turns": ["w"]})
    items = [Item("1", "c", ("w",)), Item("q", "coding", ("x", "y")), Item("test-2", "test", ("z",))]
    assert load_items(str(tmp_path)) == items
    assert load_items(str(tmp_path / "test.parquet")) == items[1:]
    (tmp_path / "test.parquet").write_text(json.dumps(rows))
    with pytest.raises(UserError, match=r"test\.parquet, row 3: a turn is empty"):
        load_items(str(tmp_path))


@pytest.mark.usefixtures("parquet")
def test_invalid_parquet_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"a\.parquet: not a parquet file \(Parquet magic bytes not found in footer\.\)$"):
        load_items(str(tmp_path))


def test_missing_pyarrow_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(UserError, match="pip install pyarrow"):
        load_items(str(tmp_path))
