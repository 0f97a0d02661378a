"""How much of its training answers a drafter's vocabulary covers, where its folder says so."""

from __future__ import annotations

import json
import re
from pathlib import Path


def recorded_coverage(folder: Path) -> float | None:
    """From `provenance.json`, which training writes: "16,384 of 49,152 tokens, 98.50% of the answers"; None: nothing there."""
    try:
        record = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
        found = re.search(r"([\d.]+)% of the answers", record["draft_vocabulary"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if found is None else min(float(found[1]) / 100, 1.0)
