"""Figures of one drafter under one condition, added up text by text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.drift.acceptance import walk
from fledge.drift.probes import AttentionFigures, rms, slope
from fledge.drift.rollout import Rollout, TargetText
from fledge.models.drafter import EagleDrafter
from fledge.speculation.stats import AcceptanceStats, macro_acceptance_length

SHARES = {"sink": "sink_MH", "prompt": "prompt_MH", "answer": "answer_MH", "own": "own_MH", "drafted": "drafted_MH"}


class StepMeans:
    """Means by draft step over all rows of all texts, each with its own count of rows."""

    def __init__(self) -> None:
        self.totals: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, values_MJ: Tensor, counted_MJ: Tensor | None = None) -> None:
        values = values_MJ.double()
        counted = torch.ones(values.shape[:2], device=values.device) if counted_MJ is None else counted_MJ
        counted = counted.double().reshape(*counted.shape, *[1] * (values.dim() - 2))
        total, count = ((values * counted).sum(0).cpu(), counted.sum(0).cpu())
        if name in self.totals:
            total, count = total + self.totals[name][0], count + self.totals[name][1]
        self.totals[name] = (total, count)

    def means(self, name: str) -> list[Any]:
        """By step; None where no row counts."""
        if name not in self.totals:
            return []
        total, count = self.totals[name]
        if total.dim() == 1:
            return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
        return [(t / c).tolist() if c.any() else None for t, c in zip(total, count, strict=True)]


class Tally:
    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = tuple(depths)
        self.steps = StepMeans()
        self.walks: list[dict[int, AcceptanceStats]] = []  # per text
        self.looping: list[bool] = []

    def add(self, rollout: Rollout, looping: bool) -> None:
        self.walks.append({depth: walk(rollout.matched_M, depth) for depth in self.depths})
        self.looping.append(looping)
        steps, inside, on_path = self.steps, rollout.inside_MJ, rollout.inside_MJ & rollout.on_path_MJ
        steps.add("accuracy", rollout.hit_MJ, inside)
        steps.add("conditional_acceptance", rollout.hit_MJ, on_path)
        steps.add("joint_acceptance", rollout.hit_MJ.long().cumprod(1), inside)
        steps.add("rms", rollout.rms_MJ)
        steps.add("cosine", rollout.cosine_MJ, on_path)
        if rollout.cosine_hidden_MJ is not None:
            steps.add("cosine_hidden", rollout.cosine_hidden_MJ, on_path)
        if rollout.attention:
            self._add_attention(rollout.attention)

    def _add_attention(self, attention: Sequence[AttentionFigures]) -> None:
        for name, attribute in {**SHARES, "entropy": "entropy_MH"}.items():
            by_head = torch.stack([getattr(figures, attribute) for figures in attention], 1)  # [M, J, H]
            self.steps.add(f"{name}_by_head", by_head)

    def to_dict(self) -> dict[str, Any]:
        plain = [walks for walks, loops in zip(self.walks, self.looping, strict=True) if not loops]
        figures: dict[str, Any] = {
            "acceptance_length": self._lengths(self.walks),
            "acceptance_length_macro": {
                depth: macro_acceptance_length(walks[depth] for walks in self.walks) for depth in self.depths
            },
            "acceptance_length_not_looping": self._lengths(plain) if plain else None,
            "steps": {depth: sum(walks[depth].steps for walks in self.walks) for depth in self.depths},
            "texts": len(self.walks),
            "looping_texts": sum(self.looping),
        }
        for name in ("accuracy", "conditional_acceptance", "joint_acceptance", "rms", "cosine", "cosine_hidden"):
            if values := self.steps.means(name):
                figures[name] = values
        for name in (*SHARES, "entropy"):
            if by_head := self.steps.means(f"{name}_by_head"):
                key = name if name == "entropy" else f"{name}_share"
                figures[key] = [None if heads is None else sum(heads) / len(heads) for heads in by_head]
                figures[f"{key}_by_head"] = by_head
        figures.update(drift_summary(figures))
        return figures

    def _lengths(self, walks: Sequence[dict[int, AcceptanceStats]]) -> dict[int, float]:
        return {depth: AcceptanceStats.total(one[depth] for one in walks).acceptance_length for depth in self.depths}


def drift_summary(figures: dict[str, Any], step: int = 8) -> dict[str, Any]:
    """How far the states and shares have moved at `step` (or the deepest drafted), and by how much a step."""
    sizes = figures.get("rms") or []
    if len(sizes) < 2:
        return {}
    at = min(step, len(sizes))
    summary: dict[str, Any] = {"drift_step": at, "rms_ratio": sizes[at - 1] / sizes[0] if sizes[0] else None}
    for name in ("sink_share", "own_share", "prompt_share", "drafted_share", "entropy"):
        if values := figures.get(name):
            summary[f"{name}_slope"] = slope(values[:at])
    return summary


class TargetTally:
    """Sizes of what the target gives a drafter: each captured state and the fc output, by where the token stands."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.sums: dict[str, dict[str, list[float]]] = {}

    def add(self, text: TargetText, sink: int) -> None:
        states = {f"layer {i}": tap for i, tap in zip(self.drafter.config.aux_layer_ids, text.taps, strict=True)}
        states["fc output"] = self.drafter.fuse(text.taps)
        column = torch.arange(len(text.tokens_T), device=text.tokens_T.device)
        is_answer, is_sink = column >= text.answer_start, column == sink
        for name, state in states.items():
            size = rms(state)
            for place, where in (("sink", is_sink), ("prompt", ~is_answer & ~is_sink), ("answer", is_answer)):
                entry = self.sums.setdefault(name, {}).setdefault(place, [0.0, 0])
                entry[0] += float(size[where].sum())
                entry[1] += int(where.sum())

    def to_dict(self) -> dict[str, dict[str, float]]:
        return {
            name: {place: total / count for place, (total, count) in places.items() if count}
            for name, places in self.sums.items()
        }
