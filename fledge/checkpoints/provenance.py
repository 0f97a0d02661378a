"""What a drafter's folder says of its training: `provenance.json`. No torch: the server's HTTP processes read it too."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FILE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """The whole record, and what others ask of it; None: it does not say."""

    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Provenance:
        """Of a drafter's folder; empty where nothing is there, or nothing that can be read."""
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
        """The share of its training answers' tokens that the draft vocabulary has."""
        found = self._number("draft_vocabulary", "coverage")
        return None if found is None else min(found, 1.0)

    @property
    def trained_on(self) -> str:
        """For people: the target and the amount of data that the drafter was trained with."""
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
