"""Probes on a running engine, for its drift guard and its metrics. They sample a few drafts and leave all others unchanged.

`LiveProbe` measures every n-th draft of a speculator while it drafts. `RowProbe` is for captured cycles: once every few hundred
launches it repeats the draft of one row, outside the CUDA graph and just before the cycle. It reads what the cycle will read:
the row's state, its pages, and the lengths on the device. It writes the keys of drafted tokens where the cycle is about to
write the same keys; no other row reads them. Figures are copied to the host asynchronously. The repeated draft is greedy at any
temperature, since greedy and sampled drafts start from the same states. A draft's first token comes from the state left by the
previous cycle's sync pass, whose attention is not visible here: for step 0 only the size of the state is reported.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fledge.drift.probes import ATTENTION, attention_figures, attention_scores, find_own_sink, rms
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.request import Request
from fledge.kernels.attention.metadata import AttentionMetadata, given
from fledge.kernels.attention.paged import SequenceLayout
from fledge.kernels.attention.rope_cache import rotate
from fledge.ops.base import AttentionModule, FusedAttentionModule
from fledge.ops.cuda_ops import CudaOps
from fledge.ops.torch_ops import TorchOps
from fledge.speculation.methods.base import AcceptedSpan, DraftedRequest
from fledge.speculation.methods.eagle import CapturedEagle, EagleSpeculator

NAMES = ("rms", "sink_share", "own_share", "entropy")
EVERY = 256  # default: one probe sample per this many drafts; on a CPU a sample takes as long as a whole step
Figures = Mapping[str, Sequence[float | None]]  # by name and draft step; None: not measured at that step
# Called with the figures of each probed sequence.
Listener = Callable[[DraftedRequest, Figures], None]


class LiveProbe:
    """Running means by draft step over the probed drafts, since the start or the last `reset`.

    A sample costs one more product of queries and keys per step. Only chains are probed: a tree has no single drafting row.
    """

    def __init__(
        self, speculator: EagleSpeculator, *, every: int = EVERY, sink: int = 0, listener: Listener | None = None
    ) -> None:
        self.speculator, self.every, self.sink, self.listener = speculator, max(1, every), sink, listener
        self.seen = 0
        self.step_index: int | None = None  # draft step of the current draft; None: this draft is not probed
        self.wanted: list[int] = []  # indexes of the sequences of the sync pass that continue to draft
        self.reset()
        self.figures: list[dict[str, list[float]]] = []  # of the current draft, one entry per `wanted` sequence
        self.place_of: dict[int, int] = {}  # index into `figures`, by the id() of a sequence's list of pages
        speculator.observer = self

    def detach(self) -> None:
        self.speculator.observer = None

    def reset(self) -> None:
        self.totals: dict[str, list[float]] = {name: [] for name in NAMES}
        self.counts: dict[str, list[int]] = {name: [] for name in NAMES}
        self.num_sampled = 0

    def snapshot(self) -> dict[str, Any]:
        """Returns the number of probed drafts and the means by step; None for a step without a measurement."""
        means = {}
        for name in NAMES:
            pairs = zip(list(self.totals[name]), list(self.counts[name]), strict=False)
            means[name] = [total / count if count else None for total, count in pairs]
        return {"drafts": self.num_sampled, **means}

    def record(self, request: DraftedRequest, figures: Figures) -> None:
        """Adds the figures of one probed draft."""
        self.num_sampled += 1
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
        ops = _ProbedDraftOps(speculator, rows, chosen, self.step_index, self.sink)
        tensors = torch.tensor([tokens, positions], device=speculator.device)
        meta = AttentionMetadata.from_layouts(layouts, tensors[1], speculator.cache.page_size, max(positions))
        output = speculator.network.step(tensors[0], h, meta, ops)
        sizes = rms(output.feedback_ND[rows[chosen]])
        seen = torch.cat([sizes[:, None], torch.stack(ops.by_layer).mean(0)], 1)
        for index, values in zip(chosen, seen.tolist(), strict=True):
            figures = self.figures[self.place_of[id(layouts[index].pages)]]
            for name, value in zip(NAMES, values, strict=True):
                figures[name].append(value)
        self.step_index += 1
        return output


class _ProbedDraftOps(TorchOps):
    """Attends as usual, and records the attention shares of each chosen sequence's drafting row."""

    def __init__(self, speculator: EagleSpeculator, rows: Tensor, chosen: list[int], step: int, sink: int) -> None:
        super().__init__(speculator.cache, speculator.network.rotary)
        self.rows, self.chosen, self.step, self.sink = rows.tolist(), chosen, step, sink
        self.by_layer: list[Tensor] = []  # each [chosen, NAMES without "rms"]

    def attend(self, module: AttentionModule, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata | None) -> Tensor:
        out = super().attend(module, q, k, v, meta)
        keys, window = self.cache.keys[module.layer], module.window
        assert meta is not None
        host, seen = given(meta.host), []
        for index in self.chosen:
            length = host.sequences[index].kv_len
            row, known = self.rows[index], keys[:, host.regions[index]].transpose(0, 1)
            scores = attention_scores(q[row : row + 1], known)
            if window is not None:
                scores[..., : max(0, length - window)] = -torch.inf
            pivot = torch.tensor([length - 1 - self.step], device=q.device)
            seen.append(_seen(scores.softmax(-1), pivot, self.sink))
        self.by_layer.append(torch.cat(seen))
        return out


def _seen(p_MHS: Tensor, pivot_M: Tensor, sink: int) -> Tensor:
    """Returns the attention figures [M, NAMES without "rms"], mean over the heads."""
    figures = attention_figures(p_MHS, pivot_M, sink, prompt_length=0).mean(1)
    return torch.stack([figures[:, ATTENTION.index(name)] for name in ("sink", "own", "entropy")], -1)


# Default: one probe sample per this many launches. A sample costs about 1 ms on the host and half a cycle on the device.
EVERY_LAUNCHES = 512
# Rows with more keys are not sampled: a sample holds all their keys in memory at once, in float32.
MOST_KEYS = 16384


class _Sample(NamedTuple):
    """Figures that are being copied to the host."""

    request: Request
    figures: Tensor  # [1 + names, depth]; the first line says whether the row was active
    event: torch.cuda.Event | None


class RowProbe:
    def __init__(self, executor: CudaGraphExecutor, probe: LiveProbe, every: int) -> None:
        """`probe`: records the figures. `every`: launches of speculative cycles per sample."""
        assert isinstance(executor.batch.method, CapturedEagle)
        self.rows, self.drafter, self.probe, self.every = executor.batch, executor.batch.method, probe, every
        self.seen = 0
        self.samples: deque[_Sample] = deque()
        # Compiles and loads what a sample needs now; otherwise the first sampled request would wait for it.
        self.sample(self.rows.state.dummy_row, max(executor.controller.acceptance.depths), self.rows.config.page_size)
        executor.before_drafts = self

    def __call__(self, drafted_for: dict[int, Request], depth: int) -> None:
        """Called just before cycles that draft for these rows are launched; samples one row at every `every`-th call."""
        self.seen += 1
        if self.seen % self.every == 0:
            size = self.rows.config.page_size
            rows = [(row, request) for row, request in drafted_for.items() if len(request.pages) * size <= MOST_KEYS]
            if rows:
                row, request = rows[self.seen // self.every % len(rows)]
                figures = self.sample(row, depth, len(request.pages) * size)
                self.samples.append(_Sample(request, *self.rows.download(figures)))
        self.deliver()

    def deliver(self) -> None:
        """Passes on all samples that have arrived on the host."""
        while self.samples and (self.samples[0].event is None or self.samples[0].event.query()):
            sample = self.samples.popleft()
            (active, *_), *lines = sample.figures.tolist()
            if active and not sample.request.finished:
                figures = {
                    name: [None if math.isnan(value) else value for value in line]
                    for name, line in zip(NAMES, lines, strict=True)
                }
                self.probe.record(sample.request, figures)

    @torch.inference_mode()
    def sample(self, row: int, depth: int, num_keys: int) -> Tensor:
        """Repeats `CapturedEagle.draft` for this row alone. It works on copies: the row's own tensors must not change, and
        slices that are not aligned would make kernels compile again."""
        slots, drafter = self.rows.state, self.drafter
        own = slice(row, row + 1)
        length, active = slots.rows.length[own].clone(), slots.rows.active[own].clone()
        pages, h = slots.page_table[own].clone(), drafter.states_RD[own].clone()
        drafts = torch.zeros_like(slots.drafts[own])
        sizes, attention = [self.size(h)], [torch.full((1, len(NAMES) - 1), torch.nan, device=h.device)]
        choice = drafter.choose(h, None, 0)
        for step in range(1, depth):
            inputs = drafter.inputs(h, choice, step, drafts_RD=drafts, length_R=length, active_R=active)
            meta = AttentionMetadata.decode(pages, given(inputs.starts_B), given(inputs.counts_B))
            probed = _ProbedRowOps(drafter, meta, step, self.probe.sink, num_keys)
            h = drafter.run(inputs, meta, probed)
            choice = drafter.choose(h, None, step)
            sizes.append(self.size(h))
            attention.append(torch.stack(probed.by_layer).mean(0))
        return torch.cat([active.expand(depth)[None].float(), torch.cat(sizes)[None], torch.cat(attention).t()])

    def size(self, h: Tensor) -> Tensor:
        network = self.drafter.network
        return rms(network.norm(h) if network.config.norm_output else h)


class _ProbedRowOps(CudaOps):
    """Attends as usual, and records the row's attention shares."""

    def __init__(self, drafter: CapturedEagle, meta: AttentionMetadata, step: int, sink: int, num_keys: int) -> None:
        self.cache, self.rope_tables, self.arrivals = drafter.cache, drafter.ops.rope_tables, drafter.ops.arrivals
        self.position, self.step, self.sink = given(meta.starts_B).long(), step, sink
        size = self.cache.page_size
        self.column = torch.arange(num_keys, device=self.position.device)
        self.places = given(meta.page_table_BP)[0].long()[self.column // size] * size + self.column % size
        self.by_layer: list[Tensor] = []

    def attention(self, module: FusedAttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        heads = qkv_NX.clone().view(1, -1, module.head_dim)[:, : module.num_heads]
        query = rotate(heads if module.q_norm is None else module.q_norm(heads), *self.angles(meta, len(qkv_NX)))
        out = super().attention(module, qkv_NX, meta)  # may rotate `qkv_NX` in place; stores the row's own key
        self.note(module, query)
        return out

    def attend(self, module: AttentionModule, q: Tensor, k: Tensor, v: Tensor, meta: AttentionMetadata | None) -> Tensor:
        out = super().attend(module, q, k, v, meta)
        self.note(module, q)
        return out

    def note(self, module: AttentionModule, query_1HE: Tensor) -> None:
        scores = attention_scores(query_1HE, self.cache.keys[module.layer][:, self.places].transpose(0, 1))
        unseen = self.column > self.position
        if module.window is not None:
            unseen |= self.column <= self.position - module.window
        shares = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        self.by_layer.append(_seen(shares, self.position - self.step, self.sink))


def watch_drafts(engine: Engine, every: int | None = None, sink: int | None = None) -> LiveProbe | None:
    """Attaches a probe to an engine and reports to its drift guard. Returns None if the engine has no EAGLE drafter.

    `every`: drafts per probe sample; None: the defaults, whose cost is negligible.
    `sink`: column of the attention sink; None: found from the target's attention, or column 0 if there is no tokenizer.
    """
    if not isinstance(engine.drafter, EagleSpeculator):
        return None
    if sink is None:
        sink = 0 if engine.tokenizer is None else find_own_sink(engine.decoder, engine.tokenizer).column
    guard = engine.controller.guard
    listener = None if guard is None else guard.record_probe
    probe = LiveProbe(engine.drafter, every=every or EVERY, sink=sink, listener=listener)
    if isinstance(engine.executor, CudaGraphExecutor):
        RowProbe(engine.executor, probe, every or EVERY_LAUNCHES)
    return probe


def coverage(engine: Engine, probe: LiveProbe) -> str:
    """Returns a log line that says which drafts the probe samples; without it, one would assume that it samples all."""
    seen = f"drift probe: one draft in {probe.every}, sink at column {probe.sink}"
    if isinstance(engine.executor, CudaGraphExecutor) and isinstance(engine.executor.before_drafts, RowProbe):
        return f"{seen}; in captured cycles, one row every {engine.executor.before_drafts.every} launches"
    return seen if probe.speculator.tree is None else f"{seen}; only draft chains are probed, so not the trees drafted here"
