"""Data sets from files, and what is refused."""

from __future__ import annotations

import json

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


def test_a_limit_is_spread_over_the_category(tmp_path):
    data = write(tmp_path / "a.jsonl", *({"id": i, "category": "c", "turns": ["t"]} for i in range(10)))
    assert [item.id for item in load_items(data, limit=2)] == ["0", "5"]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"id": 1, "turns": []}, "line 1"),
        ({"id": 1, "turns": ["a", " "]}, "empty"),
        (["a"], "expected"),
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
    with pytest.raises(UserError, match="was not found"):
        load_items("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="neither"):
        load_items(str(tmp_path / "empty"))
    with pytest.raises(UserError, match="no category poems; there are coding"):
        load_items("builtin", categories=["poems"])
