"""Reads `provenance.json`, the record of a drafter's training. Imports no torch: the server's HTTP processes read it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """The record of a drafter's training. Properties are None where the record has no such value."""

    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Provenance:
        """Reads the record of a drafter's folder; empty if it is missing or cannot be read."""
        try:
            record = json.loads((folder / FILE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return cls()
        return cls(record if isinstance(record, dict) else {})

    @property
    def target_fingerprint(self) -> str | None:
        return self.record.get("target_fingerprint")

    @property
    def coverage(self) -> float | None:
        """The fraction of the training answers' tokens that are in the draft vocabulary."""
        found = self._number("draft_vocabulary", "coverage")
        return None if found is None else min(found, 1.0)

    @property
    def trained_on(self) -> str:
        """The target and the amount of training data, as text for reports."""
        conversations, tokens = self._number("data", "conversations"), self._number("data", "tokens")
        amount = "" if conversations is None or tokens is None else f" in {conversations:,} conversations of {tokens:,} tokens"
        target = str(self.record.get("target", "an unknown target"))
        target = Path(target).name if target.startswith(("/", ".", "~")) else target
        return f"trained on answers of {target}{amount}"

    @property
    def step(self) -> int | None:
        return self.record.get("step")

    @property
    def recipe(self) -> Mapping[str, Any] | None:
        found = self.record.get("recipe")
        return found if isinstance(found, dict) else None

    def _number(self, section: str, name: str) -> Any:
        part = self.record.get(section)
        found = part.get(name) if isinstance(part, dict) else None
        return found if isinstance(found, int | float) else None
