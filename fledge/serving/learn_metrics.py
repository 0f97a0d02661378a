"""Figures of learning under `fledge:learn_*`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

COUNTERS = {
    "steps": "Training steps.",
    "tokens": "Tokens trained on, replayed ones included.",
    "requests": "Finished requests that might be learnt from.",
    "opted_out": "Finished requests that were not to be learnt from.",
    "swaps": "Times that a candidate replaced the serving weights.",
    "rollbacks": "Times that the weights before were served again because live acceptance had fallen.",
    "non_finite": "Training steps and candidates dropped because a number in them was not finite.",
    "resets": "Times that training started again from the serving weights.",
    "serving_seconds": "Time in which requests ran.",
    "learning_seconds": "Of that time, what learning took.",
    "idle_seconds": "Time spent on learning while nothing ran.",
}
GAUGES = {
    "generation": "Number of the weights that are served; 0: those of the start.",
    "samples": "Texts kept in memory to learn from.",
    "sample_tokens": "Their tokens.",
    "clients": "Callers that they are of.",
    "held_out": "Recent texts kept to judge candidates by.",
    "memory_bytes": "Memory that learning takes at most, apart from a step's activations.",
    "loss": "Loss of the last training step.",
}

Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


def learn_metrics(stats: dict[str, Any], labels: Sequence[str], values: Sequence[str]) -> Iterable[Metric]:
    """`stats`: of `Learning.stats`. `labels`, `values`: those that all metrics bear."""

    def family(kind: Kind, name: str, text: str, by: str, figures: dict[str, float]) -> Metric:
        metric = kind(f"fledge:learn_{name}", text, labels=(*labels, *([by] if by else [])))
        for key, value in figures.items():
            metric.add_metric((*values, *([key] if by else [])), value)
        return metric

    for name, text in COUNTERS.items():
        yield family(CounterMetricFamily, name, text, "", {"": stats[name]})
    for name, text in GAUGES.items():
        yield family(GaugeMetricFamily, name, text, "", {"": stats[name]})
    stopped = float(bool(stats["stopped"]))
    yield family(GaugeMetricFamily, "stopped", "1: learning has ended; the log says why.", "", {"": stopped})
    decisions = {"accepted": stats["accepted"], "refused": stats["refused"]}
    yield family(CounterMetricFamily, "gate_decisions", "Candidates that the gate judged.", "decision", decisions)
    yield family(CounterMetricFamily, "samples_dropped", "Texts that were not taken in.", "reason", stats["dropped"])
    lengths = GaugeMetricFamily(
        "fledge:learn_acceptance_length",
        "Acceptance length by domain cluster: before anything was learnt, and of the generation that is served.",
        labels=(*labels, "domain", "when"),
    )
    for domain, figures in stats["domains"].items():
        for when, value in figures.items():
            if value is not None:
                lengths.add_metric((*values, domain, when), value)
    yield lengths
