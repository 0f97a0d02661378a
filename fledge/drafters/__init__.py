"""Drafters that ship with Fledge: a folder each, named after its target."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fledge import sources
from fledge.errors import ModelError

HERE = Path(__file__).parent

# names of a target (built in, on the hub) -> folder of its default drafter
DEFAULTS = {
    "smollm2-135m": "smollm2-135m-eagle3.1",
    "HuggingFaceTB/SmolLM2-135M-Instruct": "smollm2-135m-eagle3.1",
}


def default_drafter(model: str) -> Path | None:
    """The drafter shipped for a target: by its name, or by the weights of its folder, its GGUF file or its copy on the hub."""
    if model in DEFAULTS:
        folder = HERE / DEFAULTS[model]
        return folder if (folder / "config.json").is_file() else None
    try:
        path = sources.find(model)
    except ModelError:  # not there: whoever loads it says so
        return None
    from fledge.checkpoints.fingerprint import is_same_model, target_fingerprint  # torch, which HTTP processes do without

    found = target_fingerprint(path)
    known = {folder: provenance(folder).get("target_fingerprint") for folder in shipped()}
    return next((folder for folder, one in known.items() if found and one and is_same_model(found, one)), None)


def shipped() -> list[Path]:
    return sorted(path.parent for path in HERE.glob("*/config.json"))


def provenance(folder: Path) -> dict[str, Any]:
    """What training wrote beside a drafter; empty where nothing is there."""
    try:
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def trained_on(folder: Path) -> str:
    """For people: the target and the amount of data that a drafter was trained with."""
    record = provenance(folder)
    report = str((record.get("data") or {}).get("report", ""))
    counted = re.match(r"([\d,]+) of [\d,]+ conversations kept: ([\d,]+) tokens", report)
    amount = f" in {counted[1]} conversations of {counted[2]} tokens" if counted else ""
    target = str(record.get("target", "an unknown target"))
    target = Path(target).name if target.startswith(("/", ".", "~")) else target
    return f"trained on answers of {target}{amount}"
