"""Comparison with llama.cpp, with a stub in its place: its script, the demo's last line, and the benchmark."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fledge.bench import baselines
from fledge.bench.baselines import llamacpp_python, run_llamacpp
from fledge.cli.demo import demo
from tests.checkpoints.gguf_files import write_gguf
from tests.tiny import tiny_decoder

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    decoder = tiny_decoder(3, vocab_size=288, max_positions=1024)
    return write_gguf(tmp_path_factory.mktemp("llamacpp") / "tiny.gguf", decoder, "llama", "Q8_0")


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp").mkdir()
    shutil.copy(Path(__file__).with_name("llamacpp_stub.py"), tmp_path / "llama_cpp" / "__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))


@pytest.fixture
def without_llamacpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "LLAMACPP_VENV", tmp_path / "nothing")
    monkeypatch.setattr(baselines.importlib.util, "find_spec", lambda name: None)


def test_answers_end_as_asked(file: Path, stub: None) -> None:
    assert llamacpp_python() == sys.executable
    found = run_llamacpp(file, [[40], [3, 46]], 5, threads=1, context=64)
    assert found["version"] == "0.0-stub"
    (run,) = found["runs"]
    assert run["answers"] == [[41, 42, 43, 44, 45], [47, 48, 49]]
    assert run["tokens"] == 8
    assert found["peak_bytes"] > 1 << 20
    found = run_llamacpp(file, [[46]], 5, threads=1, context=64, ignore_eos=True, num_best=2, prefill=[1, 2, 3])
    assert found["runs"][0]["answers"] == [[47, 48, 49, 0, 1]]
    assert found["runs"][0]["best"] == [[[[49, 49.0], [48, 48.0]]] * 5]
    assert found["prefill_tokens_per_second"] > 0


def test_llamacpp_is_skipped_when_not_installed(file: Path, without_llamacpp: None) -> None:
    assert llamacpp_python() is None
    assert run_llamacpp(file, [[1]], 5, threads=1, context=64) is None


def test_the_demos_last_line(file: Path, stub: None, tmp_path: Path) -> None:
    shown = _demo(file, tmp_path / "demo.json")
    figures = json.loads((tmp_path / "demo.json").read_text())
    rate, summary = figures["llama_cpp"]["tokens_per_second"], figures["summary"]
    assert rate > 0
    plain, drafted = (summary[f"{way}_tokens_per_second"] / rate for way in ("plain", "speculative"))
    last = " ".join(shown.split("identical output: ")[1].split()[1:])
    assert last.startswith("llama.cpp (llama-cpp-python 0.0-stub), same file and prompts: ")
    assert last.endswith(f"tok/s; plain {plain:.2f}× that, speculative {drafted:.2f}×")


def test_demo_without_llamacpp(file: Path, without_llamacpp: None, tmp_path: Path) -> None:
    assert _demo(file, tmp_path / "demo.json").rstrip().splitlines()[-1].startswith("identical output: ")
    assert json.loads((tmp_path / "demo.json").read_text())["llama_cpp"] is None


def test_llamacpp_failure_is_one_line(file: Path, stub: None, tmp_path: Path) -> None:
    module = tmp_path / "llama_cpp" / "__init__.py"
    module.write_text(module.read_text().replace("    return 0\n", "    return 1\n"))
    shown = " ".join(_demo(file, tmp_path / "demo.json").split())
    assert "llama.cpp: it ended with code 1: RuntimeError: llama_decode failed" in shown


def _demo(file: Path, out: Path) -> str:
    app = typer.Typer()
    app.command()(demo)
    done = CliRunner().invoke(app, ["-m", str(file), "--max-tokens", "12", "--device", "cpu", "--out", str(out)])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_benchmark(file: Path, stub: None, tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "benchmarks" / "cpu_vs_llamacpp.py"), str(file), "--context", "1024"]
    speed = ["--quick", "--rounds", "1", "--prefill", "64", "--drafter", "ngram", "--json", str(tmp_path / "speed.json")]
    done = subprocess.run([*script, *speed], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "identical output: yes" in done.stdout
    found = json.loads((tmp_path / "speed.json").read_text())
    assert found["identical"]
    assert list(found["rows"]) == ["llama.cpp", "Fledge, plain", "Fledge, drafter"]
    for row in found["rows"].values():
        figures = ("tokens_per_second", "prefill_tokens_per_second", "peak_bytes", "ready_seconds")
        assert all(row[figure] > 0 for figure in figures)
    assert {"commit", "command", "prompts_sha256", "device"} <= found["provenance"].keys()

    done = subprocess.run(
        [*script, "--texts", "--json", str(tmp_path / "texts.json")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "texts.json").read_text())
    assert (found["of"], len(found["answers"])) == (10, 10)
    parted = [one for one in found["answers"] if not one["equal"]]
    assert parted  # the stub's answers differ from the model's
    assert all(len(one["candidates"]) == len(one["logit_gaps"]) == 2 for one in parted)
