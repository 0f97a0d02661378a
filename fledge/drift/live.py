"""The probes on a running speculator: every n-th draft is looked at, the others pass untouched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fledge.drift.probes import attention_figures, attention_scores, rms
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import SequenceLayout
from fledge.ops.base import AttentionModule
from fledge.ops.torch_ops import TorchOps
from fledge.speculation.drafting import AcceptedSpan, DraftedRequest, EagleSpeculator

NAMES = ("rms", "sink_share", "own_share", "entropy")
EVERY = 256  # drafts to a look, unless asked otherwise; on a CPU it takes as long as a whole step
Figures = Mapping[str, Sequence[float | None]]  # by name and draft step; None: not seen at that step
# Told of each sequence that was looked at.
Listener = Callable[[DraftedRequest, Figures], None]


class LiveProbe:
    """Running means by draft step over the drafts that were looked at, since the start or the last `reset`.

    A look costs one more product of queries and keys a step, for the rows that draft. Chains only: a tree has no single row.
    """

    def __init__(
        self, speculator: EagleSpeculator, *, every: int = EVERY, sink: int = 0, listener: Listener | None = None
    ) -> None:
        self.speculator, self.every, self.sink, self.listener = speculator, max(1, every), sink, listener
        self.seen = 0
        self.step_index: int | None = None  # of the draft that is looked at; None: the current one is not
        self.wanted: list[int] = []  # sequences of the sync pass that go on to draft
        self.reset()
        self.figures: list[dict[str, list[float]]] = []  # of the draft that is looked at, by its `wanted` sequences
        self.place_of: dict[int, int] = {}  # in `figures`, by the identity of a sequence's list of pages
        speculator.observer = self

    def detach(self) -> None:
        self.speculator.observer = None

    def reset(self) -> None:
        self.totals: dict[str, list[float]] = {name: [] for name in NAMES}
        self.counts: dict[str, list[int]] = {name: [] for name in NAMES}
        self.looked_at = 0

    def snapshot(self) -> dict[str, Any]:
        """Means by step; None for a step at which something was not seen."""
        means = {}
        for name in NAMES:
            pairs = zip(list(self.totals[name]), list(self.counts[name]), strict=False)
            means[name] = [total / count if count else None for total, count in pairs]
        return {"drafts": self.looked_at, **means}

    def record(self, request: DraftedRequest, figures: Figures) -> None:
        """Adds the figures of one probed draft."""
        self.looked_at += 1
        for name, values in figures.items():
            totals, counts = self.totals[name], self.counts[name]
            missing = len(values) - len(counts)
            totals.extend([0.0] * missing)
            counts.extend([0] * missing)
            for step, value in enumerate(values):
                if value is not None:
                    totals[step], counts[step] = totals[step] + value, counts[step] + 1
        if self.listener is not None:
            self.listener(request, figures)

    # `DraftObserver`

    def begin(self, spans: Sequence[AcceptedSpan]) -> bool:
        self.step_index = None
        self.wanted = [index for index, span in enumerate(spans) if span.max_draft_tokens > 0]
        drafts = self.speculator.tree is None and bool(self.wanted)
        self.seen += drafts
        if drafts and self.seen % self.every == 0:
            self.step_index = 0
            self.figures = [{name: [] for name in NAMES} for _ in self.wanted]
            self.place_of = {id(spans[index].request.pages): place for place, index in enumerate(self.wanted)}
        return self.step_index is not None

    def end(self, spans: Sequence[AcceptedSpan]) -> None:
        if self.step_index is not None:
            for index, figures in zip(self.wanted, self.figures, strict=True):
                self.record(spans[index].request, figures)
        self.step_index = None

    def step(
        self, tokens: list[int], h: Tensor, positions: list[int], layouts: list[SequenceLayout]
    ) -> tuple[Tensor, Tensor] | None:
        if self.step_index is None:
            return None
        speculator = self.speculator
        rows = torch.tensor([layout.query_len for layout in layouts], device=speculator.device).cumsum(0) - 1
        chosen = self.wanted if self.step_index == 0 else list(range(len(layouts)))
        ops = _ProbedOps(speculator, rows, chosen, self.step_index, self.sink)
        tensors = torch.tensor([tokens, positions], device=speculator.device)
        meta = AttentionMetadata.from_layouts(layouts, tensors[1], speculator.cache.page_size, max(positions))
        output = speculator.network.step(tensors[0], h, meta, ops)
        figures = {"rms": rms(output.feedback_ND[rows[chosen]]).flatten().tolist(), **ops.means()}
        places = [self.place_of[id(layouts[index].pages)] for index in chosen]
        for name, values in figures.items():
            for place, value in zip(places, values, strict=True):
                self.figures[place][name].append(value)
        self.step_index += 1
        return output


class _ProbedOps(TorchOps):
    """Attends as usual, and notes where the drafting row of each chosen sequence looked."""

    def __init__(self, speculator: EagleSpeculator, rows: Tensor, chosen: list[int], step: int, sink: int) -> None:
        super().__init__(speculator.cache, speculator.network.rotary)
        self.rows, self.chosen, self.step, self.sink = rows.tolist(), chosen, step, sink
        self.by_layer: dict[str, list[list[float]]] = {name: [] for name in NAMES[1:]}

    def means(self) -> dict[str, list[float]]:
        """Over the layers, for each chosen sequence."""
        return {
            name: [sum(values) / len(layers) for values in zip(*layers, strict=True)] for name, layers in self.by_layer.items()
        }

    def attend(self, module: AttentionModule, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata | None) -> Tensor:
        out = super().attend(module, q, k, v, meta)
        keys, window = self.cache.keys[module.layer], module.window
        for values in self.by_layer.values():
            values.append([])
        for index in self.chosen:
            length = meta.host.sequences[index].kv_len
            row, known = self.rows[index], keys[:, meta.host.regions[index]].transpose(0, 1)
            scores = attention_scores(q[row : row + 1], known)
            if window is not None:
                scores[..., : max(0, length - window)] = -torch.inf
            pivot = torch.tensor([length - 1 - self.step], device=q.device)
            figures = attention_figures(scores.softmax(-1), pivot, self.sink, prompt_length=0)
            for name, value in (
                ("sink_share", figures.sink_MH),
                ("own_share", figures.own_MH),
                ("entropy", figures.entropy_MH),
            ):
                self.by_layer[name][-1].append(float(value.mean()))
        return out
