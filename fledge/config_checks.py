"""Checks of configuration values: each must have the right type and a size that a model can have.

Files are untrusted, and their values decide how much memory is allocated and what the kernels index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, overload

from fledge.errors import ModelError, printable

# Upper limits, with room above the largest known model.
LARGEST = {
    "vocab_size": 1 << 22,
    "draft_vocab_size": 1 << 22,
    "hidden_size": 1 << 18,
    "target_hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_layers": 1024,
    "num_heads": 4096,
    "num_kv_heads": 4096,
    "head_dim": 1024,  # kernels keep a head's state on the stack
    "max_positions": 1 << 24,
}


def architecture_of(config: Mapping[str, Any]) -> str:
    """The first entry of `architectures`, which must be a list of names; "(none named)" if there is none."""
    named = config.get("architectures")
    if named in (None, []):
        return "(none named)"
    if not isinstance(named, list) or not isinstance(named[0], str):
        raise ModelError(f"config.json: architectures must be a list of names, not {shown(named)}")
    return named[0]


def whole_number(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The value of `key` as an integer; `default` if the key is missing, null or 0. Without a default the key is required."""
    value = config[key] if default is None else config.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value or value in (math.inf, -math.inf):
        raise ModelError(f"config.json: {key} must be a whole number, not {shown(value)}")
    if value != int(value):
        raise ModelError(f"config.json: {key} must be a whole number, not {shown(value)}")
    return int(value)


@overload
def number(config: Mapping[str, Any], key: str, default: float) -> float: ...


@overload
def number(config: Mapping[str, Any], key: str, default: None = None) -> float | None: ...


def number(config: Mapping[str, Any], key: str, default: float | None = None) -> float | None:
    """The value of `key` as a float; `default` if the key is missing or null, or 0 with a default other than 0."""
    value = config.get(key)
    if value is None or (value == 0 and default):
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ModelError(f"config.json: {key} must be a number, not {shown(value)}")
    return float(value)


def mapping(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A copy of the object under `key`; empty if the key is missing or null."""
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ModelError(f"config.json: {key} must be an object, not {shown(value)}")
    return dict(value)


def token_ids(value: Any, key: str = "eos_token_id") -> tuple[int, ...]:
    """The ids in `value`: one id, a list of them, or None."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelError(f"{key} must be a token id or a list of them, not {shown(value)}")
    return tuple(ids)


def check_sizes(config: Any, what: str) -> None:
    """Checks all sizes of a ModelConfig or DrafterConfig that memory and kernels depend on."""
    for name, most in LARGEST.items():
        size = getattr(config, name, 1)
        if not isinstance(size, int) or not 1 <= size <= most:
            raise ModelError(f"{what}: {name} must lie between 1 and {most}, not {shown(size)}")
    if config.num_heads % config.num_kv_heads:
        raise ModelError(f"{what}: {config.num_heads} heads cannot share {config.num_kv_heads} key/value heads")
    if getattr(config, "rotary_dim", config.head_dim) % 2:  # latent attention rotates only a part of a head
        raise ModelError(f"{what}: head_dim {config.head_dim} is odd; rotary embeddings need an even number")
    if not 0 <= config.rms_norm_eps < 1:
        raise ModelError(f"{what}: rms_norm_eps must lie between 0 and 1, not {shown(config.rms_norm_eps)}")


def shown(value: Any) -> str:
    """The value as one short printable line, for error messages."""
    return printable(repr(value), 60)
