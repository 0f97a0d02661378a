"""`fledge serve --engine vllm`: the same command line, run by vLLM, for several GPUs or machines."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence

from fledge import sources
from fledge.engine.build import DEFAULT_DEPTH, Speculation
from fledge.errors import UserError
from fledge.serving.flags import DEFAULT_MODEL, normalise, parser
from fledge.sources import BUILT_INS


def command(arguments: Sequence[str]) -> list[str]:
    """The vLLM command: names that only Fledge knows become folders, all else is passed on as it is."""
    rest = normalise(arguments)
    own = {
        option
        for group in parser()._action_groups
        if group.title == "Fledge's own"
        for a in group._group_actions
        for option in a.option_strings
    }
    own -= {"--drafter", "--depth"}
    refused = next((word for word in rest if word.partition("=")[0] in own), None)
    if refused is not None:
        raise UserError(f"{refused.partition('=')[0]} is a flag of Fledge's own engine; leave it out with --engine vllm")
    _take(rest, "--engine")
    drafter, depth, given = _take(rest, "--drafter"), _take(rest, "--depth"), _take(rest, "--speculative-config", "-sc")
    named = _take(rest, "--model")
    model = rest.pop(0) if rest and not rest[0].startswith("-") else named or DEFAULT_MODEL
    result = [_vllm(), "serve", _folder(model)]
    if model in BUILT_INS and not any(word.partition("=")[0] == "--served-model-name" for word in rest):
        result += ["--served-model-name", model]
    speculative = _speculative_config(model, given, drafter, depth)
    if speculative is not None:
        result += ["--speculative-config", json.dumps(speculative)]
    return result + rest


def run(arguments: Sequence[str]) -> None:
    words = command(arguments)
    print("fledge: " + " ".join(words), file=sys.stderr)
    sys.stderr.flush()
    os.execv(words[0], words)


def _vllm() -> str:
    beside = os.path.join(os.path.dirname(sys.executable), "vllm")
    found = beside if os.access(beside, os.X_OK) else shutil.which("vllm")
    if found is None:
        raise UserError("vLLM is not installed; `pip install vllm` in an environment of its own, and have its `vllm` on PATH")
    return found


def _speculative_config(model: str, given: str | None, drafter: str | None, depth: str | None) -> dict | None:
    if given is not None:
        try:
            config = json.loads(given)
        except json.JSONDecodeError as error:
            raise UserError(f"--speculative-config is not valid JSON ({error})") from None
        if isinstance(config, dict) and isinstance(config.get("model"), str) and config.get("method", "eagle3") == "eagle3":
            config["model"] = str(Speculation(config["model"]).resolve_drafter(model))
        return config
    found = Speculation(drafter or ("auto" if model in BUILT_INS else "none")).resolve_drafter(model)
    if found is None:
        return None
    tokens = int(depth) if depth and depth.isdigit() else DEFAULT_DEPTH
    if found == "ngram":
        return {"method": "ngram", "num_speculative_tokens": tokens, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {"method": "eagle3", "model": str(found), "num_speculative_tokens": tokens}


def _folder(model: str) -> str:
    """vLLM knows folders and hub ids; what Fledge unpacks itself is given as a folder."""
    return str(sources.resolve(model)) if model in BUILT_INS or model.endswith(".gguf") else model


def _take(words: list[str], *names: str) -> str | None:
    """Takes a flag and its value out of the words."""
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
