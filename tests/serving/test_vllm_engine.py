"""`--engine vllm`: the command that is run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fledge.errors import UserError
from fledge.serving import vllm_engine


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(vllm_engine.sys, "executable", str(tmp_path / "elsewhere" / "python"))
    return str(program)


def test_arguments_are_passed_on_as_they_are(fake_vllm: str, tmp_path: Path) -> None:
    words = ["org/model", "--engine", "vllm", "--tensor-parallel-size", "4", "--enable-expert-parallel", "--port=9"]
    drafter = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3})
    command = vllm_engine.command([*words, "--speculative-config", drafter])
    assert command[:3] == [fake_vllm, "serve", "org/model"]
    assert json.loads(command[command.index("--speculative-config") + 1]) == json.loads(drafter)
    assert command[-4:] == ["--tensor-parallel-size", "4", "--enable-expert-parallel", "--port=9"]
    assert "--engine" not in command


def test_fledges_names_become_folders(fake_vllm: str, tiny_folder: Path, tmp_path: Path) -> None:
    command = vllm_engine.command([str(tiny_folder), "--drafter", str(tmp_path), "--depth", "3", "--engine=vllm"])
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    command = vllm_engine.command([str(tiny_folder), "--drafter", "ngram"])
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "ngram"
    assert "--speculative-config" not in vllm_engine.command([str(tiny_folder)])


def test_flags_of_our_own_engine_are_refused(fake_vllm: str) -> None:
    with pytest.raises(UserError, match="--max-queue"):
        vllm_engine.command(["org/model", "--max-queue", "3"])


def test_a_missing_vllm_is_told_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(vllm_engine.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match="pip install vllm"):
        vllm_engine.command(["org/model"])
