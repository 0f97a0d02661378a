"""The default drafter of `fledge regenerate`."""

from __future__ import annotations

import pytest

from fledge.engine import offline
from fledge.errors import UserError
from tests.cli.test_errors import model, refused  # noqa: F401 - a fixture


@pytest.mark.parametrize(
    ("gpu", "given", "wanted"),
    [(True, [], "auto"), (False, [], "none"), (True, ["--drafter", "none"], "none"), (False, ["--drafter", "auto"], "auto")],
)
def test_default_drafter_is_auto_on_a_gpu_and_none_on_cpu(gpu, given, wanted, model, tmp_path, monkeypatch, capsys):  # noqa: F811
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
