"""Fledge: train, check and serve EAGLE 3.1 drafters."""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "SamplingParams", "TreeShape", "__version__"]

if TYPE_CHECKING:
    from fledge.llm import LLM, Completion
    from fledge.sampling import SamplingParams
    from fledge.speculation.depth import TreeShape

_HOMES = {
    "LLM": "fledge.llm",
    "Completion": "fledge.llm",
    "SamplingParams": "fledge.sampling",
    "TreeShape": "fledge.speculation.depth",
}


def __getattr__(name: str) -> object:
    """Imports a public name on first access, so that `fledge --help` does not load torch."""
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module 'fledge' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
