"""Release files: the wheel and the source distribution contain only the package; the Dockerfiles pass their checks."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HADOLINT = Path(sys.executable).parent / "hadolint"
DOCKERFILES = ["Dockerfile", "Dockerfile.cuda"]


def source_files() -> set[str]:
    """The package's files in the repository."""
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "fledge").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """The output of `make dist`, run on a copy because building leaves files behind."""
    copy, out = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("dist")
    skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "carry", "results", "site")
    shutil.copytree(ROOT, copy, dirs_exist_ok=True, ignore=skipped)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_wheel_is_the_package(dist):
    (wheel,) = dist.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == source_files()
    assert {"fledge/serving/page/index.html", "fledge/kernels/cpu/library.c"} <= names
    assert any(name.endswith("-eagle3.1/model.safetensors") for name in names)
    (entry,) = (name for name in zipfile.ZipFile(wheel).namelist() if name.endswith("entry_points.txt"))
    assert "fledge = fledge.cli.main:main" in zipfile.ZipFile(wheel).read(entry).decode()


def test_source_distribution_has_package_and_build_files(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        names = {member.name.split("/", 1)[1] for member in file.getmembers() if member.isfile()}
    others = {name for name in names if not name.startswith(("fledge/", "fledge.egg-info/"))}
    assert names - others - {name for name in names if name.startswith("fledge.egg-info/")} == source_files()
    assert others == {"pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "setup.cfg"}


INSTALLED = """
import json, pathlib, sys
import fledge
from fledge import drafters, sources
from fledge.kernels import native_build
from fledge.serving import page_files
print(json.dumps({
    "package": fledge.__file__,
    "drafters": [str(folder) for folder in drafters.shipped() if (folder / "model.safetensors").is_file()],
    "sources": str(native_build.SOURCES / "library.c") * (native_build.SOURCES / "library.c").is_file(),
    "page": str(page_files.FOLDER) * (page_files.FOLDER / "index.html").is_file(),
}))
"""


def test_wheel_works_outside_the_repository(dist, tmp_path):
    """Installs only the wheel; its dependencies come from this environment."""
    (wheel,) = dist.glob("*.whl")
    site = tmp_path / "site"
    install = ["install", "--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(wheel)], check=True)
    env = {**os.environ, "PYTHONPATH": str(site), "FLEDGE_CACHE": str(tmp_path / "cache")}
    options = {"capture_output": True, "text": True, "check": True, "cwd": tmp_path, "env": env}
    shown = subprocess.run([sys.executable, "-m", "fledge", "--version"], **options)
    assert shown.stdout.strip() in wheel.name
    found = json.loads(subprocess.run([sys.executable, "-c", INSTALLED], **options).stdout)
    assert found["drafters"]
    for path in [found["package"], *found["drafters"], found["sources"], found["page"]]:
        assert path.startswith(str(site)), found


def test_versions_agree(dist):
    import fledge

    (wheel,) = dist.glob("*.whl")
    assert wheel.name.startswith(f"fledge-{fledge.__version__}-")


@pytest.mark.skipif(
    shutil.which("hadolint", path=str(Path(sys.executable).parent)) is None, reason="hadolint has no wheel here"
)
@pytest.mark.parametrize("name", DOCKERFILES)
def test_hadolint(name):
    done = subprocess.run([HADOLINT, ROOT / name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", DOCKERFILES)
def test_images(name):
    """Images do not run as root, have a health check, and their server is reachable from outside the container."""
    text = (ROOT / name).read_text()
    instructions = dict(re.findall(r"^([A-Z]+) (.*?)$", text.replace("\\\n", " "), re.MULTILINE))
    assert instructions["USER"] == "1000"
    assert "/health" in instructions["HEALTHCHECK"]
    entry = json.loads(instructions["ENTRYPOINT"])
    assert entry[:4] == ["fledge", "serve", "--host", "0.0.0.0"]
    from fledge.serving import flags

    parsed = flags.parse([*entry[2:], *json.loads(instructions["CMD"])])
    assert (parsed.host, parsed.port) == ("0.0.0.0", int(instructions["EXPOSE"]))
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    ignored = (ROOT / ".dockerignore").read_text()
    for path in copied:
        assert (ROOT / path).exists()
        assert f"!{path}\n" in ignored
