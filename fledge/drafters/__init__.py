"""Drafters that ship with Fledge: a folder each, named after its target."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent

# target's built-in name -> folder of its default drafter
DEFAULTS = {"smollm2-135m": "smollm2-135m-eagle3.1"}


def default_drafter(model: str) -> Path | None:
    """The drafter shipped for a built-in target, if there is one."""
    folder = HERE / DEFAULTS.get(model, "-")
    return folder if (folder / "config.json").is_file() else None


def shipped() -> list[Path]:
    return sorted(path.parent for path in HERE.glob("*/config.json"))
