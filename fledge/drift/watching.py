"""Probes on a running engine, for its drift guard and its metrics."""

from __future__ import annotations

from fledge.drift.live import EVERY, LiveProbe
from fledge.drift.row_probe import EVERY_LAUNCHES, RowProbe
from fledge.drift.sinks import find_own_sink
from fledge.engine.engine import Engine
from fledge.engine.executors.cuda_graph import CudaGraphExecutor
from fledge.speculation.drafting import EagleSpeculator


def watch_drafts(engine: Engine, every: int | None = None, sink: int | None = None) -> LiveProbe | None:
    """Looks at some drafts of an engine and tells its drift guard; None where there are no EAGLE drafts to look at.

    `every`: drafts to a look; None: few enough looks to cost nothing that one would notice.
    `sink`: its column; None: found from the target's own attention, or column 0 where there is no tokenizer to ask it with.
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
    """Which drafts a probe sees, for the log: silence would read as if it saw all."""
    seen = f"drift probe: one draft in {probe.every}, sink at column {probe.sink}"
    if isinstance(engine.executor, CudaGraphExecutor) and isinstance(engine.executor.before_drafts, RowProbe):
        return f"{seen}; where cycles are captured, one row in {engine.executor.before_drafts.every} of their launches"
    return seen if probe.speculator.tree is None else f"{seen}; chains only, so none of the trees that are drafted here"
