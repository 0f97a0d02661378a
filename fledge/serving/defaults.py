"""Sampling defaults for parameters that a request does not set: the model's own, overridden by the operator's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fledge.errors import RequestError, UserError
from fledge.sampling import SamplingParams

# Names in generation_config.json, with the names in SamplingParams.
DEFAULTABLE = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Returns the sampling defaults in a model's generation_config.json, if it has one. Other keys are ignored."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(given, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read ({error}); correct it, or give --generation-config vllm") from None
    known = {name: given[name] for name in DEFAULTABLE if given.get(name) is not None}
    return checked(known, f"{file}", "correct it, or give --generation-config vllm")


def overriding_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the sampling defaults given with --override-generation-config."""
    for name in given:
        if name not in DEFAULTABLE:
            known = ", ".join(DEFAULTABLE)
            raise UserError(f"--override-generation-config: {name!r:.80} is not a sampling parameter; give one of {known}")
    given = {name: value for name, value in given.items() if value is not None}
    return checked(given, "--override-generation-config", "give another value")


def checked(given: dict[str, Any], source: str, remedy: str) -> dict[str, Any]:
    """Returns the defaults, checked. UserError at the start, rather than an error in every request that uses a default."""
    given = {name: int(value) if isinstance(value, float) and value.is_integer() else value for name, value in given.items()}
    for name, value in given.items():
        try:
            SamplingParams(**{DEFAULTABLE[name]: value})
        except (RequestError, TypeError) as error:
            raise UserError(f"{source}: {name} is {value!r:.40}, but {error}; {remedy}") from None
    return given
