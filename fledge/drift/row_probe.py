"""The probes on captured cycles: now and then one row's draft is made once more beside its cycle, and looked at.

The look is launched just before the cycle and reads what the cycle will: the row's state, its pages, the device's own lengths.
What it writes (keys of drafted tokens, in places the cycle is about to fill with the same) is read by no other row. Its figures
come to the host when they are ready; nothing waits for them. Greedy, whatever the request's temperature: drafts of either kind
start from the same states.

A draft's first token comes from the state that synchronising left, whose attention lies inside the cycle before: of that step
there is the state's size alone.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from fledge.drift.live import NAMES, LiveProbe
from fledge.drift.probes import attention_figures, attention_scores, rms
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.engine.request import Request
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.rope_cache import rotate
from fledge.ops.base import AttentionModule
from fledge.ops.cuda_ops import CudaOps
from fledge.speculation.methods.eagle import CapturedEagle

# Launches to a look, unless asked otherwise: a look takes the host about a millisecond, and the device half a cycle.
EVERY_LAUNCHES = 512
# Rows with more keys are not looked at: a look has all of them in memory at once, in float32.
MOST_KEYS = 16384


class _Look(NamedTuple):
    """Figures on their way to the host."""

    request: Request
    figures: Tensor  # [1 + names, depth]; the first line says whether the row was active
    event: torch.cuda.Event | None


class RowProbe:
    def __init__(self, executor: CudaGraphExecutor, probe: LiveProbe, every: int) -> None:
        """`probe` is told what was seen. `every`: launches of speculative cycles to a look."""
        self.rows, self.drafter, self.probe, self.every = executor.batch, executor.batch.method, probe, every
        self.seen = 0
        self.looks: deque[_Look] = deque()
        # What a look needs is compiled and loaded now: a request would wait for it.
        self.look(self.rows.state.dummy_row, max(executor.controller.acceptance.depths), self.rows.config.page_size)
        executor.before_drafts = self

    def __call__(self, drafted_for: dict[int, Request], depth: int) -> None:
        """Cycles that draft for these rows are about to be launched."""
        self.seen += 1
        if self.seen % self.every == 0:
            size = self.rows.config.page_size
            rows = [(row, request) for row, request in drafted_for.items() if len(request.pages) * size <= MOST_KEYS]
            if rows:
                row, request = rows[self.seen // self.every % len(rows)]
                figures = self.look(row, depth, len(request.pages) * size)
                self.looks.append(_Look(request, *self.rows.download(figures)))
        self.deliver()

    def deliver(self) -> None:
        """All that has arrived."""
        while self.looks and (self.looks[0].event is None or self.looks[0].event.query()):
            look = self.looks.popleft()
            (active, *_), *lines = look.figures.tolist()
            if active and not look.request.finished:
                figures = {
                    name: [None if math.isnan(value) else value for value in line]
                    for name, line in zip(NAMES, lines, strict=True)
                }
                self.probe.record(look.request, figures)

    @torch.inference_mode()
    def look(self, row: int, depth: int, num_keys: int) -> Tensor:
        """As `CapturedEagle.draft` for this row alone. Copies, so that nothing of the row's changes, and because kernels are
        compiled anew for tensors that are not aligned."""
        slots, drafter = self.rows.state, self.drafter
        own = slice(row, row + 1)
        length, active = slots.rows.length[own].clone(), slots.rows.active[own].clone()
        pages, h = slots.page_table[own].clone(), drafter.states_RD[own].clone()
        drafts = torch.zeros_like(slots.drafts[own])
        sizes, attention = [self.size(h)], [torch.full((1, len(NAMES) - 1), torch.nan, device=h.device)]
        choice = drafter.choose(h, None, 0)
        for step in range(1, depth):
            inputs = drafter.inputs(h, choice, step, drafts_RD=drafts, length_R=length, active_R=active)
            meta = AttentionMetadata.decode(pages, inputs.starts_B, inputs.counts_B)
            looking = _ProbedOps(drafter, meta, step, self.probe.sink, num_keys)
            h = drafter.run(inputs, meta, looking)
            choice = drafter.choose(h, None, step)
            sizes.append(self.size(h))
            attention.append(torch.stack(looking.by_layer).mean(0))
        return torch.cat([active.expand(depth)[None].float(), torch.cat(sizes)[None], torch.cat(attention).t()])

    def size(self, h: Tensor) -> Tensor:
        network = self.drafter.network
        return rms(network.norm(h) if network.config.norm_output else h)


class _ProbedOps(CudaOps):
    """Attends as usual, and notes where the row looked."""

    def __init__(self, drafter: CapturedEagle, meta: AttentionMetadata, step: int, sink: int, num_keys: int) -> None:
        self.cache, self.rope_tables, self.arrivals = drafter.cache, drafter.ops.rope_tables, drafter.ops.arrivals
        self.position, self.step, self.sink = meta.starts_B.long(), step, sink
        size = self.cache.page_size
        self.column = torch.arange(num_keys, device=self.position.device)
        self.places = meta.page_table_BP[0].long()[self.column // size] * size + self.column % size
        self.by_layer: list[Tensor] = []

    def attention(self, module: AttentionModule, qkv_NX: Tensor, meta: AttentionMetadata | None) -> Tensor:
        heads = qkv_NX.clone().view(1, -1, module.head_dim)[:, : module.num_heads]
        query = rotate(heads if module.q_norm is None else module.q_norm(heads), *self.angles(meta, len(qkv_NX)))
        out = super().attention(module, qkv_NX, meta)  # which may rotate in place, and stores the row's own key
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
        figures = attention_figures(shares, self.position - self.step, self.sink, prompt_length=0)
        self.by_layer.append(torch.stack([figures.sink_MH, figures.own_MH, figures.entropy_MH], -1).mean(1))
