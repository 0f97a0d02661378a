"""Runs other engines on the same prompts: transformers, and vLLM and llama.cpp if they are installed.

Each runs in its own process, so that they do not share memory, threads or libraries. vLLM and llama.cpp may be installed in
other environments.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fledge.checkpoints.export import plain_folder
from fledge.errors import UserError

SCRIPTS = {"transformers": "transformers_script.py", "vllm": "vllm_script.py", "llama_cpp": "llamacpp_script.py"}
# The environment in which `benchmarks/cpu_vs_llamacpp.py` installs llama-cpp-python.
LLAMACPP_VENV = Path(__file__).resolve().parents[2] / ".venv-llamacpp"


def check_baselines(names: Sequence[str], *, greedy: bool = True, assistant: str = "") -> None:
    """Refuses combinations that cannot run, before anything is measured."""
    for name in names:
        if name not in SCRIPTS:
            raise UserError(f"baseline {name!r} is not known; use one of {', '.join(SCRIPTS)}")
    if names and not greedy:
        raise UserError("baselines are compared with greedy decoding; leave out --temperature")
    if assistant and "transformers" not in names:
        raise UserError("--assistant is a model for transformers' assisted generation; add --baseline transformers")


def run_baseline(
    name: str,
    prompts: Sequence[Sequence[int]],
    *,
    model: Path,
    drafter: Path | Mapping[str, Path] | None,
    depths: Sequence[int],
    concurrencies: Sequence[int],
    max_tokens: int,
    device: str,
    dtype: str = "bfloat16",
    python: str = "",
    assistant: str = "",
    path: str = "",
    timeout: float = 3600,
    **more: Any,
) -> dict[str, Any]:
    """Runs an engine. Returns `{"runs": […]}`, or `{"skipped": reason}` if it is not installed or cannot run the model; both
    if it stopped early.

    `drafter`: one, or several by name. `path`: a folder to import the engine from. `more`: further keys of the script's task.
    """
    check_baselines([name])
    python = python or sys.executable
    # Safe path: the script's folder has modules `datasets` and `kernels`, which would hide the packages of these names.
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    if path:
        environment |= {"PYTHONPATH": path, "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1"}
    missing = _missing(python, name, environment)
    if missing:
        return {"baseline": name, "skipped": missing}
    drafters = drafter if isinstance(drafter, Mapping) else {"": drafter} if drafter else {}
    with TemporaryDirectory() as folder:
        task, out = Path(folder) / "task.json", Path(folder) / "out.json"
        content = {
            "model": str(model),
            "drafters": {label: str(plain_folder(where)) for label, where in drafters.items()},
            "assistant": assistant or None,
            "prompts": [list(prompt) for prompt in prompts],
            "depths": list(depths),
            "concurrencies": list(concurrencies),
            "max_tokens": max_tokens,
            "device": device,
            # The same as in this engine: on a CPU all activations are fp32.
            "dtype": "float32" if device == "cpu" else dtype,
            **more,
        }
        task.write_text(json.dumps(content))
        script = Path(__file__).with_name(SCRIPTS[name])
        command = [python, str(script), str(task), str(out)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment)
        except subprocess.TimeoutExpired:
            ended = {"skipped": f"it took more than {timeout:.0f} seconds"}
        else:
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            failed = done.returncode or not out.exists()
            ended = {"skipped": f"it ended with code {done.returncode}: {lines[-1]}"} if failed else {}
        return {"baseline": name, **(json.loads(out.read_text()) if out.exists() else {}), **ended}


def llamacpp_python() -> str | None:
    """A Python that has llama-cpp-python: this one, or that of the benchmark's own environment; None if neither has it."""
    if importlib.util.find_spec("llama_cpp") is not None:
        return sys.executable
    own = LLAMACPP_VENV / "bin" / "python"
    return str(own) if own.exists() and not _missing(str(own), "llama_cpp", dict(os.environ)) else None


def run_llamacpp(
    file: Path, prompts: Sequence[Sequence[int]], max_tokens: int, *, threads: int, context: int, **more: Any
) -> dict[str, Any] | None:
    """Runs llama.cpp with a GGUF file and returns what `run_baseline` does; None if it is not installed."""
    python = llamacpp_python()
    if python is None:
        return None
    more |= {"threads": threads, "context": context}
    return run_baseline(
        "llama_cpp",
        prompts,
        model=file,
        drafter=None,
        depths=(),
        concurrencies=(1,),
        max_tokens=max_tokens,
        device="cpu",
        python=python,
        **more,
    )


def _missing(python: str, name: str, environment: dict[str, str]) -> str:
    try:
        found = subprocess.run(
            [python, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is None)"],
            capture_output=True,
            timeout=120,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired):
        return f"{python} cannot be run"
    return f"{name} is not installed in {python}" if found.returncode else ""
