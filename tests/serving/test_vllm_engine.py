"""`--engine vllm`: the command line that starts vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fledge.checkpoints.eagle3 import save_drafter
from fledge.errors import UserError
from fledge.serving import vllm_engine
from tests.tiny import tiny_drafter


def make_python(folder: Path, kind: str) -> str:
    """Writes a fake interpreter that prints `kind`, the answer to the probe."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "python3"
    program.write_text(f"#!/bin/sh\necho {kind}\n")
    program.chmod(0o755)
    return str(program)


@pytest.fixture
def fake_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A fake `vllm` on PATH, installed in another environment than ours."""
    python = make_python(tmp_path / "bin", "script 0.32.0")
    program = tmp_path / "bin" / "vllm"
    program.write_text(f"#!{python}\n")
    program.chmod(0o755)
    monkeypatch.delenv(vllm_engine.PYTHON_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(vllm_engine.sys, "executable", make_python(tmp_path / "ours", "absent"))
    return python


def test_a_vllm_without_metadata_is_started_as_a_module(
    fake_vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = make_python(tmp_path / "cpu", "module")
    monkeypatch.setenv(vllm_engine.PYTHON_VARIABLE, python)
    command = vllm_engine.command(["org/model", "--pipeline-parallel-size", "2", "--some-new-flag", "x"])
    assert command[:5] == [python, "-m", "vllm.entrypoints.openai.api_server", "--model", "org/model"]
    assert command[5:] == ["--pipeline-parallel-size", "2", "--some-new-flag", "x"]


def test_the_probe_finds_how_vllm_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert vllm_engine._probe(sys.executable) == "absent"
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise SystemExit('must not be imported')")
    assert vllm_engine._probe(sys.executable) == "module"
    (tmp_path / "vllm-0.32.0.dist-info").mkdir()
    (tmp_path / "vllm-0.32.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    assert vllm_engine._probe(sys.executable) == "script"


def test_the_process_is_replaced_by_vllm(tmp_path: Path) -> None:
    """vLLM has the same process id, so that signals reach it, and its exit code is returned."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        "print(os.getpid(), *sys.argv[1:], flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, vllm_engine.PYTHON_VARIABLE: sys.executable}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = [sys.executable, "-m", "fledge", "serve", "org/model", "--engine", "vllm", "--tensor-parallel-size", "2"]
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, *arguments = process.stdout.readline().split()
        assert int(pid) == process.pid
        assert arguments == ["--model", "org/model", "--tensor-parallel-size", "2"]
        process.terminate()
        assert process.wait(30) == 7


def test_arguments_are_passed_to_vllm_unchanged(fake_vllm: str, tmp_path: Path) -> None:
    words = ["org/model", "--engine", "vllm", "--tensor-parallel-size", "4", "--enable-expert-parallel", "--port=9"]
    drafter = json.dumps({"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3})
    command = vllm_engine.command([*words, "--speculative-config", drafter])
    assert command[:5] == [fake_vllm, "-m", "vllm.entrypoints.cli.main", "serve", "org/model"]
    assert json.loads(command[command.index("--speculative-config") + 1]) == json.loads(drafter)
    assert command[-4:] == ["--tensor-parallel-size", "4", "--enable-expert-parallel", "--port=9"]
    assert "--engine" not in command


@pytest.mark.parametrize(
    ("words", "rest"),
    [
        (["--port", "9", "org/model"], ["--port", "9"]),
        (["--port=9", "org/model", "--engine", "vllm"], ["--port=9"]),
        (["--engine", "vllm", "--enforce-eager", "org/model", "--port", "9"], ["--enforce-eager", "--port", "9"]),
        (["-tp", "2", "org/model"], ["-tp", "2"]),
        (["--some-new-flag", "x", "org/model"], ["--some-new-flag", "x"]),
        (["--served-model-name", "a", "b", "--model", "org/model"], ["--served-model-name", "a", "b"]),
        (["--some-new-path", "/tmp", "--model", "org/model"], ["--some-new-path", "/tmp"]),
        (["--max-model-len", "-1", "org/model"], ["--max-model-len", "-1"]),
        (["--lora-modules", "a=/x", "b=/y", "--model", "org/model"], ["--lora-modules", "a=/x", "b=/y"]),
        (["--some-sizes", "1", "2", "4", "--model", "org/model"], ["--some-sizes", "1", "2", "4"]),
        (["--some-sizes", "1", "2", "4", "--port", "9", "org/model"], ["--some-sizes", "1", "2", "4", "--port", "9"]),
        (["org/model", "--port", "9", "--model", "org/other"], ["--port", "9"]),
    ],
)
def test_the_model_may_follow_flags(fake_vllm: str, words: list[str], rest: list[str]) -> None:
    command = vllm_engine.command(words)
    assert command[3:] == ["serve", "org/model", *rest]


@pytest.mark.parametrize(
    ("words", "unclear"),
    [
        (["--some-new-switch", "org/model"], "org/model"),
        (["--some-sizes", "1", "2", "4", "org/model"], "org/model"),
        (["--some-sizes", "1", "2"], "2"),
    ],
)
def test_an_ambiguous_model_argument_is_refused(fake_vllm: str, words: list[str], unclear: str) -> None:
    with pytest.raises(UserError, match=f"^{unclear} may be the model or a flag's value"):
        vllm_engine.command(words)


def test_fledges_drafter_flags_become_a_speculative_config(fake_vllm: str, tiny_folder: Path, tmp_path: Path) -> None:
    command = vllm_engine.command([str(tiny_folder), "--drafter", str(tmp_path), "--depth", "3", "--engine=vllm"])
    config = json.loads(command[command.index("--speculative-config") + 1])
    assert config == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3}
    command = vllm_engine.command([str(tiny_folder), "--drafter", "ngram"])
    assert json.loads(command[command.index("--speculative-config") + 1])["method"] == "ngram"
    assert "--speculative-config" not in vllm_engine.command([str(tiny_folder)])


def test_a_drafter_stored_in_8_bits_is_unpacked_for_vllm(
    fake_vllm: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    small = save_drafter(tiny_drafter(), tmp_path / "small", int8=True)
    for words in (["--drafter", str(small)], ["--speculative-config", json.dumps({"method": "eagle3", "model": str(small)})]):
        command = vllm_engine.command([str(tiny_folder), *words])
        given = Path(json.loads(command[command.index("--speculative-config") + 1])["model"])
        assert given.parent == tmp_path / "cache" / "drafters"
        assert "quantization_config" not in json.loads((given / "config.json").read_text())


def test_flags_of_fledges_own_engine_are_refused(fake_vllm: str) -> None:
    with pytest.raises(UserError, match="--max-queue"):
        vllm_engine.command(["org/model", "--max-queue", "3"])


def test_a_missing_vllm_is_reported_with_how_to_install_it(
    fake_vllm: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PATH", str(empty))
    with pytest.raises(UserError, match="pip install vllm"):
        vllm_engine._interpreter()
    monkeypatch.setenv(vllm_engine.PYTHON_VARIABLE, make_python(tmp_path / "named", "absent"))
    with pytest.raises(UserError, match=r"FLEDGE_VLLM_PYTHON names .*named/python3, which has no vLLM"):
        vllm_engine._interpreter()
    monkeypatch.setenv(vllm_engine.PYTHON_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="nowhere cannot be run"):
        vllm_engine._interpreter()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--drafter", "ngram", "--depth", "many"], "depth"),
        (["--drafter", "ngram", "--speculative-config", '{"method": "ngram"}'], "--drafter"),
        (["--speculative-config", "[]"], "JSON object"),
    ],
)
def test_invalid_speculation_flags_are_refused(fake_vllm: str, words: list[str], named: str) -> None:
    with pytest.raises(UserError, match=named):
        vllm_engine.command(["org/model", *words])
