"""How much of everything a lab run measures."""

from __future__ import annotations

from dataclasses import dataclass

from fledge.drift import templates
from fledge.drift.contexts import LENGTHS
from fledge.drift.system_prompts import QUICK, SYSTEM_PROMPTS


@dataclass(frozen=True)
class Settings:
    max_tokens: int = 128  # of each answer
    depth: int = 16  # drafted, on every suite
    probe_depth: int = 16  # drafted, on the probes over all prompts
    prompts: int = 24  # of each template and system prompt
    prompts_per_category: int = 0  # 0: all
    templates: tuple[str, ...] = templates.NAMES
    system_prompts: tuple[str, ...] = tuple(SYSTEM_PROMPTS)
    lengths: tuple[int, ...] = LENGTHS
    documents: int = 4
    questions: int = 6  # of each document
    noise: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    conversations: int = 8

    @classmethod
    def quick(cls) -> Settings:
        """Made for two minutes on two CPU cores."""
        return cls(
            max_tokens=32,
            depth=7,
            prompts=3,
            prompts_per_category=1,
            templates=templates.QUICK,
            system_prompts=QUICK,
            lengths=(256, 512, 1024),
            documents=1,
            questions=3,
            noise=(0.25, 0.5),
            temperatures=(0.0, 1.0),
            conversations=2,
        )
