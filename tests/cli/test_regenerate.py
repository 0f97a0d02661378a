"""Which drafter `fledge regenerate` takes when none is named."""

from __future__ import annotations

import pytest

from fledge.engine import offline
from fledge.errors import UserError
from tests.cli.test_errors import model, refused  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("gpu", "given", "wanted"),
    [(True, [], "auto"), (False, [], "none"), (True, ["--drafter", "none"], "none"), (False, ["--drafter", "auto"], "auto")],
)
def test_on_a_gpu_the_shipped_one_drafts(gpu, given, wanted, model, tmp_path, monkeypatch, capsys):  # noqa: F811
    asked = []

    def generator(*_, speculation, **__):
        asked.append(speculation.drafter)
        raise UserError("enough")

    monkeypatch.setattr(offline, "is_gpu", lambda device: gpu)
    monkeypatch.setattr(offline, "answer_generator", generator)
    out = tmp_path / "answers.jsonl"
    line = refused(monkeypatch, capsys, "regenerate", "--model", model, "--self-prompted", 3, "--out", out, *given)
    assert "enough" in line
    assert asked == [wanted]
    assert not out.exists()
