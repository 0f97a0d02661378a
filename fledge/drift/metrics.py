"""Metrics of drafts over known texts: acceptance with standard errors, and probes by draft step, accumulated text by text.

Used by training's evaluation, by the gate of `fledge learn` and by the drift lab.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.drift.probes import ATTENTION, rms, slope
from fledge.drift.rollout import Rollout
from fledge.drift.texts import TargetText
from fledge.models.drafter import EagleDrafter
from fledge.speculation.stats import AcceptanceStats


def walk(matched: Sequence[int], depth: int) -> AcceptanceStats:
    """Returns the statistics of a greedy run. `matched[i]`: how many drafts from row i are the target's next tokens.

    A step accepts up to `depth` of them and adds the target's own next token; the answer ends where the rows end.
    """
    stats, at = AcceptanceStats(), 0
    while at < len(matched):
        accepted = min(matched[at], depth)
        left = len(matched) - at  # tokens the answer still has
        stats.add_step(depth, depth, accepted, min(accepted + 1, left))
        at += accepted + 1
    return stats


class Count(NamedTuple):
    """Accepted drafts and steps of one text. Whole numbers if greedy, expectations if sampled."""

    accepted: float
    steps: float


def counted(matched: Sequence[int], depth: int) -> Count:
    """Returns only the two counts of `walk`, without its other statistics."""
    accepted = steps = at = 0
    while at < len(matched):
        taken = min(matched[at], depth)
        accepted += taken
        steps += 1
        at += taken + 1
    return Count(accepted, steps)


def expected_walk(accept_prob: Sequence[Sequence[float]], depth: int) -> Count:
    """Returns the exact expected counts over all paths: a step that starts at row i and accepts a drafts ends at row i + a + 1.

    `accept_prob[i][j]`: probability that draft j of row i is accepted, given that those before it are.
    """
    starts = [0.0] * (len(accept_prob) + depth + 2)  # probability that a step starts at each row
    starts[0] = 1.0
    accepted = steps = 0.0
    for row, chances in enumerate(accept_prob):
        here = starts[row]
        if not here:
            continue
        steps += here
        reached = here
        for at in range(depth):
            on = reached * chances[at]
            starts[row + at + 1] += reached - on
            reached = on
            accepted += on
            if not reached:
                break
        else:
            starts[row + depth + 1] += reached
    return Count(accepted, steps)


class Estimate(NamedTuple):
    value: float
    error: float | None  # standard error with texts as the independent samples; None: a single text


def acceptance_length(counts: Sequence[Count]) -> Estimate:
    """Returns the micro average: 1 + accepted / steps, summed over all texts."""
    value, influence = length_and_influence(counts)
    return Estimate(value, standard_error(influence))


def length_ratio(counts: Sequence[Count], base: Sequence[Count]) -> Estimate:
    """Returns the ratio of two acceptance lengths on the same texts or questions, with the paired standard error."""
    (value, mine), (other, theirs) = length_and_influence(counts), length_and_influence(base)
    ratio = value / other
    return Estimate(ratio, standard_error([ratio * (a / value - b / other) for a, b in zip(mine, theirs, strict=True)]))


def pooled(conditions: Sequence[Mapping[str, Count]]) -> dict[str, Count]:
    """Returns each question's counts, summed over all conditions in which it is asked."""
    found: dict[str, Count] = {}
    for counts in conditions:
        for text, count in counts.items():
            kept = found.get(text, Count(0, 0))
            found[text] = Count(kept.accepted + count[0], kept.steps + count[1])
    return found


def length_and_influence(counts: Sequence[Count]) -> tuple[float, list[float]]:
    """Returns the acceptance length and each text's influence on it (delta method)."""
    steps = sum(count.steps for count in counts)
    if not steps:
        return 1.0, [0.0] * len(counts)
    mean = sum(count.accepted for count in counts) / steps
    return 1 + mean, [(count.accepted - mean * count.steps) / steps for count in counts]


def standard_error(influence: Sequence[float]) -> float | None:
    """Returns the standard error of a figure from the influence of each independent sample on it."""
    count = len(influence)
    if count < 2:
        return None
    return (count / (count - 1) * sum(one * one for one in influence)) ** 0.5


@dataclass(frozen=True)
class TextFigures:
    """The figures of one text from one rollout."""

    counts: dict[int, Count]  # by depth
    sums: dict[str, tuple[Tensor, Tensor]]  # by name: totals over the rows and the number of rows counted, both by step


def by_text(rollout: Rollout, num_texts: int, depths: Sequence[int], *, sampled: bool = False) -> list[TextFigures]:
    """Returns the figures of each text. Sums are taken on the rollout's device: only a few numbers per text are copied."""
    inside, on_path = rollout.inside_MJ, rollout.inside_MJ & rollout.on_path_MJ
    values: dict[str, tuple[Tensor, Tensor | None]] = {"rms": (rollout.rms_MJ, None), "cosine": (rollout.cosine_MJ, on_path)}
    if not sampled:
        right = rollout.accept_prob_MJ
        values["accuracy"] = (right, inside)
        values["conditional_acceptance"] = (right, on_path)
        values["joint_acceptance"] = (right.long().cumprod(1), inside)
    if rollout.cosine_hidden_MJ is not None:
        values["cosine_hidden"] = (rollout.cosine_hidden_MJ, on_path)
    if rollout.attention:
        for name, by_head in zip(ATTENTION, torch.stack(rollout.attention, 1).unbind(-1), strict=True):  # [M, J, H]
            values[f"{name}_by_head"] = (by_head, None)
    sums = {name: _summed(*pair, rollout.text_M, num_texts) for name, pair in values.items()}
    rows_of_text = torch.bincount(rollout.text_M, minlength=num_texts).tolist()
    found = []
    for number, mine in enumerate(rollout.accept_prob_MJ.cpu().split(rows_of_text)):
        if sampled:
            counts = {depth: expected_walk(mine.tolist(), depth) for depth in depths}
        else:
            matched = mine.long().cumprod(1).sum(1).tolist()
            counts = {depth: counted(matched, depth) for depth in depths}
        found.append(TextFigures(counts, {name: (t[number], c[number]) for name, (t, c) in sums.items()}))
    return found


def _summed(values_MJ: Tensor, counted_MJ: Tensor | None, text_M: Tensor, num_texts: int) -> tuple[Tensor, Tensor]:
    """Returns totals and counts by text and step, on the CPU."""
    values = values_MJ.double()
    counted = torch.ones(values.shape[:2], device=values.device) if counted_MJ is None else counted_MJ
    counted = counted.double().reshape(*counted.shape, *[1] * (values.dim() - 2))
    total, count = (x.new_zeros(num_texts, *x.shape[1:]).index_add_(0, text_M, x).cpu() for x in (values * counted, counted))
    return total, count


class MetricAccumulator:
    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = tuple(depths)
        self.texts: dict[str, dict[int, Count]] = {}  # by the text's name within its condition
        self.looping: set[str] = set()
        self.sums: dict[str, dict[str, tuple[Tensor, Tensor]]] = {}  # by figure and text

    def add(self, name: str, figures: TextFigures, looping: bool = False) -> None:
        self.texts[name] = figures.counts
        if looping:
            self.looping.add(name)
        for key, pair in figures.sums.items():
            self.sums.setdefault(key, {})[name] = pair

    def counts(self, depth: int, names: Sequence[str] | None = None) -> list[Count]:
        return [self.texts[name][depth] for name in (self.texts if names is None else names)]

    @property
    def non_looping(self) -> list[str]:
        """Texts whose answers do not loop."""
        return [name for name in self.texts if name not in self.looping]

    def total(self, name: str, texts: Sequence[str] | None = None) -> tuple[Tensor, Tensor] | None:
        """Returns, by step, the sum and the number of rows counted, over all texts or only `texts`."""
        parts = [pair for text, pair in self.sums.get(name, {}).items() if texts is None or text in texts]
        if not parts:
            return None
        total, count = parts[0]
        for more_total, more_count in parts[1:]:
            total, count = total + more_total, count + more_count
        return total, count

    def means(self, name: str, texts: Sequence[str] | None = None) -> list[Any]:
        """Returns the means by step; None for a step in which no row counts."""
        found = self.total(name, texts)
        if found is None:
            return []
        total, count = found
        if total.dim() == 1:
            return [float(t / c) if c else None for t, c in zip(total, count, strict=True)]
        return [(t / c).tolist() if c.any() else None for t, c in zip(total, count, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        non_looping = self.non_looping
        lengths = {depth: acceptance_length(self.counts(depth)) for depth in self.depths}
        without_loops = (
            {depth: acceptance_length(self.counts(depth, non_looping)) for depth in self.depths} if non_looping else {}
        )
        figures: dict[str, Any] = {
            "acceptance_length": {depth: one.value for depth, one in lengths.items()},
            "standard_error": {depth: one.error for depth, one in lengths.items()},
            "acceptance_length_macro": {depth: self._macro(depth) for depth in self.depths},
            "acceptance_length_not_looping": {depth: one.value for depth, one in without_loops.items()} or None,
            "standard_error_not_looping": {depth: one.error for depth, one in without_loops.items()} or None,
            "steps": {depth: sum(one.steps for one in self.counts(depth)) for depth in self.depths},
            "texts": len(self.texts),
            "looping_texts": len(self.looping),
        }
        for name in ("accuracy", "conditional_acceptance", "joint_acceptance", "rms", "cosine", "cosine_hidden"):
            if values := self.means(name):
                figures[name] = values
        if found := self.total("conditional_acceptance"):  # rows whose drafts are all right so far: few at late steps
            figures["rows_on_path"] = [int(count) for count in found[1]]
        if found := self.total("joint_acceptance"):  # rows whose text is long enough for the step
            figures["rows_inside"] = [int(count) for count in found[1]]
        if found := self.total("joint_acceptance", non_looping):
            figures["joint_acceptance_not_looping"] = self.means("joint_acceptance", non_looping)
            figures["rows_inside_not_looping"] = [int(count) for count in found[1]]
        for name in ATTENTION:
            if by_head := self.means(f"{name}_by_head"):
                key = name if name == "entropy" else f"{name}_share"
                figures[key] = [None if heads is None else sum(heads) / len(heads) for heads in by_head]
                figures[f"{key}_by_head"] = by_head
        figures.update(drift_summary(figures))
        if "drift_step" in figures:
            for key, name in (("rms", "rms"), ("sink_share", "sink_by_head"), ("own_share", "own_by_head")):
                if name in self.sums:
                    figures[f"{key}_change_error"] = self._change_error(name, figures["drift_step"])
        return figures

    def _change_error(self, name: str, step: int) -> float | None:
        """Returns the standard error of the ratio of the means at `step` and step 1, with texts as the independent samples."""
        found = self.total(name)
        assert found is not None, "asked of names in `sums`"
        total, count = map(_over_heads, found)
        if not total[0] or not count[step - 1]:
            return None
        mean, influence = total / count, []
        for part in self.sums[name].values():
            mine, rows = (_over_heads(x) for x in part)
            moved = (mine - mean * rows) / total
            influence.append(float(mean[step - 1] / mean[0] * (moved[step - 1] - moved[0])))
        return standard_error(influence)

    def _macro(self, depth: int) -> float:
        """Returns the macro average: the mean over texts of each text's tokens per step."""
        lengths = [1 + one.accepted / one.steps for one in self.counts(depth) if one.steps]
        return sum(lengths) / len(lengths) if lengths else 1.0


def _over_heads(x: Tensor) -> Tensor:
    """Sums over heads: [J] from [J, H]; [J] stays as it is."""
    return x if x.dim() == 1 else x.sum(-1)


def drift_summary(figures: dict[str, Any], step: int = 8) -> dict[str, Any]:
    """Returns how far the state's size has moved at `step` (or the deepest one drafted), and the slopes of the shares."""
    sizes = figures.get("rms") or []
    if len(sizes) < 2:
        return {}
    at = min(step, len(sizes))
    ratio = sizes[at - 1] / sizes[0] if sizes[0] and sizes[at - 1] is not None else None
    summary: dict[str, Any] = {"drift_step": at, "rms_ratio": ratio}
    for name in ("sink_share", "own_share", "prompt_share", "drafted_share", "entropy"):
        if values := figures.get(name):
            summary[f"{name}_slope"] = slope(values[:at])
    return summary


def fused_parts(drafter: EagleDrafter, taps: Sequence[Tensor]) -> dict[str, Tensor]:
    """Returns the fc output and each tapped layer's part of it, which weights scale: the taps' sizes do not show the parts."""
    entered: list[Tensor] = []
    watching = drafter.fc.register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    try:
        output = drafter.fuse(taps)
    finally:
        watching.remove()
    chunks = entered[0].chunk(len(taps), -1)
    found = {"fc output": output}
    for at, layer in enumerate(drafter.config.aux_layer_ids):
        alone = [chunk if number == at else torch.zeros_like(chunk) for number, chunk in enumerate(chunks)]
        found[f"fc part of layer {layer}"] = drafter.fc(torch.cat(alone, -1))
    return found


class TargetAccumulator:
    """Sizes of the drafter's inputs (captured states, fc output and its parts) at the sink, in the prompt, in the answer."""

    def __init__(self, drafter: EagleDrafter) -> None:
        self.drafter = drafter
        self.sums: dict[str, dict[str, list[float]]] = {}

    def add(self, text: TargetText, sink: int) -> None:
        states = {f"layer {i}": tap for i, tap in zip(self.drafter.config.aux_layer_ids, text.taps, strict=True)}
        states |= fused_parts(self.drafter, text.taps)
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
