"""Commands check their input before they import slow packages: torch alone takes 1.5 s, so user errors come before it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.test_gguf_engine import write

HEAVY = ("torch", "transformers", "matplotlib", "fastapi")
RUN = """
import sys
from fledge.cli.main import main
sys.argv = ["fledge", *sys.argv[1:]]
try:
    main()
finally:
    print("imported:", *[name for name in {heavy!r} if name in sys.modules])
"""


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", RUN.format(heavy=HEAVY), *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["generate", "--help"], ["serve", "--help"], ["train", "--help"]])
def test_help_imports_nothing_slow(words: list[str]) -> None:
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == "imported:"


@pytest.mark.parametrize("words", [["generate", "hello", "-m"], ["chat", "-m"], ["demo", "-m"], ["serve"]])
def test_a_truncated_gguf_is_refused_before_anything_slow_is_imported(tmp_path: Path, words: list[str]) -> None:
    file = write(tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-4096])
    done = run(*words, str(file))
    assert done.returncode == 1
    assert "damaged or truncated GGUF" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == "imported:\n"
