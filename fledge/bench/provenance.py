"""Records how a figure was measured: commit, device, versions, command line and a hash of the prompts."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fledge.files import write_json

__all__ = ["command_line", "provenance", "write_json"]  # used by every benchmark


ROOT = Path(__file__).resolve().parents[2]
USER_INFO = re.compile(r"(\w+://)[^/@\s]*@")  # the name and password of a URL


def without_secrets(words: Sequence[str]) -> str:
    """The command line without secrets: values of `--api-key` and similar flags and passwords in URLs become ***."""
    shown, hides = [], False
    for word in words:
        if word.startswith("--"):
            name, equals, _ = word.partition("=")
            hides = "api-key" in name.replace("_", "-")
            shown.append(f"{name}=***" if hides and equals else word)
        else:
            shown.append("***" if hides else word)
    return USER_INFO.sub(r"\1***@", " ".join(shown))


def command_line() -> str:
    return without_secrets([os.path.basename(sys.argv[0]), *sys.argv[1:]])


def provenance(prompts: Iterable[object] = ()) -> dict[str, object]:
    import torch

    import fledge

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _cpu_name()
    return {
        "fledge": fledge.__version__,
        "commit": _commit(),
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": command_line(),
        "prompts_sha256": hashlib.sha256(json.dumps(list(prompts), ensure_ascii=False).encode()).hexdigest(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _commit() -> str | None:
    """The commit, with `+` if there are uncommitted changes. None for an installed package: a repository around it would be
    another project's."""
    if not (ROOT / ".git").exists():
        return None
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=ROOT, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {os.cpu_count()} cores"
    except OSError:
        pass
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
