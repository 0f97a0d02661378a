"""Prometheus metrics under vLLM's names, and the periodic log line."""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from fledge.speculation.stats import AcceptanceStats

if TYPE_CHECKING:
    from fledge.drift.live import LiveProbe
    from fledge.engine.engine import Engine
    from fledge.engine.request import Request
    from fledge.speculation.guard import DriftGuard, GuardCounts

log = logging.getLogger("fledge.serving")

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
LABELS = ("model_name", "engine")
DRIFT = {
    "rms": "RMS of the drafter's hidden state by draft step.",
    "sink_share": "Share of the drafter's attention on the sink, by draft step.",
    "own_share": "Share of the drafter's attention on its own draft, by draft step.",
    "entropy": "Entropy of the drafter's attention by draft step.",
}
LEARN_COUNTERS = {
    "steps": "Training steps.",
    "tokens": "Tokens trained on, replayed ones included.",
    "requests": "Finished requests that may be learnt from.",
    "opted_out": "Finished requests that were not to be learnt from.",
    "swaps": "Times that a candidate replaced the serving weights.",
    "rollbacks": "Times that the previous weights were restored because live acceptance had fallen.",
    "non_finite": "Training steps and candidates dropped because of NaN or Inf.",
    "resets": "Times that training started again from the serving weights.",
    "serving_seconds": "Time in which requests ran.",
    "learning_seconds": "Part of serving_seconds that learning took.",
    "idle_seconds": "Time spent on learning while nothing ran.",
}
LEARN_GAUGES = {
    "generation": "Number of the weights that are served; 0: the weights at start.",
    "samples": "Texts kept in memory to learn from.",
    "sample_tokens": "Tokens of the texts kept in memory.",
    "clients": "Clients that the kept texts are from.",
    "held_out": "Recent texts held out to evaluate candidates on.",
    "memory_bytes": "Maximum memory for learning, without a step's activations.",
    "loss": "Loss of the last training step.",
}
Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]


class Histogram:
    """Counts by bucket. prometheus_client's histogram takes 3 µs per value, and an engine step has one value per request."""

    def __init__(self, name: str, text: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> None:
        self.name, self.text, self.labels, self.bounds = name, text, labels, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    def family(self) -> Metric:
        names = [*map(str, map(float, self.bounds)), "+Inf"]
        family = HistogramMetricFamily(self.name, self.text, labels=LABELS)
        family.add_metric(self.labels, list(zip(names, accumulate(self.counts), strict=True)), self.sum)
        return family


class Metrics:
    """The server's metrics: counters that the engine loop updates, and gauges that are read from the engine on request."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = (model_name, "0")
        self.engine: Engine | None = None  # None until it is built
        self.probe: LiveProbe | None = None  # samples drafts, if enabled
        self.num_queued: Callable[[], int] = lambda: 0  # answers that are queued outside the engine
        self.max_loop_lag = 0.0

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, LABELS, registry=self.registry).labels(*self.labels)

        self.histograms: list[Histogram] = []

        def histogram(name: str, text: str, bounds: tuple[float, ...] = SECONDS) -> Histogram:
            self.histograms.append(Histogram(name, text, self.labels, bounds))
            return self.histograms[-1]

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that produced their first token.")
        self.generation_tokens = counter("vllm:generation_tokens", "Tokens produced.")
        self.rejected = counter("fledge:requests_rejected", "Requests refused because a queue was full.")
        self.loop_lag = histogram("fledge:event_loop_lag_seconds", "How late the event loop ran a timer, ten times a second.")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.")
        self.inter_token = histogram("vllm:inter_token_latency_seconds", "Between a request's steps with new tokens.")
        self.per_token = histogram("vllm:request_time_per_output_token_seconds", "Mean time per token after the first.")
        self.latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue_time = histogram("vllm:request_queue_time_seconds", "From arrival to the first step.")
        self.prefill_time = histogram("vllm:request_prefill_time_seconds", "From the first step to the first token.")
        self.decode_time = histogram("vllm:request_decode_time_seconds", "From the first token to the last.")
        self.request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens per request.", TOKENS)
        self.request_generation = histogram("vllm:request_generation_tokens", "Tokens produced per request.", TOKENS)
        self.success = Counter(
            "vllm:request_success", "Finished requests.", (*LABELS, "finished_reason"), registry=self.registry
        )
        for reason in ("stop", "length", "abort"):
            self.success.labels(*self.labels, reason)
        self.registry.register(self)
        self.tokens_in = self.tokens_out = 0  # for the log line
        self._logged, self._logged_at = self._snapshot(), time.perf_counter()

    def render(self) -> bytes:
        return generate_latest(self.registry)

    # Updated by the engine loop

    def began(self, request: Request, now: float) -> None:
        """Records a request's first token."""
        self.first_token.observe(now - request.arrival)
        self.prompt_tokens.inc(len(request.prompt))
        self.tokens_in += len(request.prompt)

    def progressed(self, num_tokens: int, gaps: Mapping[float, int]) -> None:
        """Records a step's tokens over all requests. `gaps`: the number of requests by seconds since their previous tokens."""
        self.generation_tokens.inc(num_tokens)
        self.tokens_out += num_tokens
        for seconds, count in gaps.items():
            self.inter_token.observe(seconds, count)

    def observed(self, lags: Iterable[float], rejected: int) -> None:
        """Records what an HTTP process reports: its event loop's lags, and requests it refused."""
        for lag in lags:
            self.loop_lag.observe(lag)
            self.max_loop_lag = max(self.max_loop_lag, lag)
        if rejected:
            self.rejected.inc(rejected)

    def finished(self, request: Request, started: float | None) -> None:
        self.success.labels(*self.labels, request.finish_reason or "abort").inc()
        if request.first_token_time is None or request.finish_time is None:
            return
        total, decode = request.finish_time - request.arrival, request.finish_time - request.first_token_time
        self.latency.observe(total)
        self.decode_time.observe(decode)
        if started is not None:
            self.queue_time.observe(max(0.0, started - request.arrival))
            self.prefill_time.observe(max(0.0, request.first_token_time - started))
        if request.num_answer > 1:
            self.per_token.observe(decode / (request.num_answer - 1))
        self.request_prompt.observe(len(request.prompt))
        self.request_generation.observe(request.num_answer)

    # Read on request

    def collect(self) -> Iterable[Metric]:
        engine = self.engine
        stats = engine.stats if engine is not None else AcceptanceStats()
        running, waiting = self.queue_lengths()
        for one in self.histograms:
            yield one.family()
        yield self._gauge("vllm:num_requests_running", "Requests being decoded.", running)
        text = "The largest event loop lag so far."
        yield self._gauge("fledge:event_loop_lag_max_seconds", text, self.max_loop_lag)
        yield self._gauge("vllm:num_requests_waiting", "Requests in the queue.", waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", self.cache_usage())
        preemptions = engine.scheduler.num_preemptions if engine is not None else 0
        yield self._counter("vllm:num_preemptions", "Preemptions (KV freed, recomputed later).", preemptions)
        queried, found = (engine.pool.num_queried, engine.pool.num_found) if engine is not None else (0, 0)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queried)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", found)
        yield self._counter("vllm:spec_decode_num_drafts", "Verification passes that carried a draft.", stats.steps)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.", stats.accepted)
        name, text = "vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted draft tokens by position."
        yield self._labelled(CounterMetricFamily, name, text, ("position",), enumerate(list(stats.accepted_at)))
        text = "Mean tokens per verification pass since the start."
        yield self._gauge("fledge:acceptance_length", text, stats.acceptance_length)
        if self.probe is not None:
            yield from self._drift(self.probe.snapshot())
        if engine is not None and engine.controller.guard is not None:
            yield from self._guard(engine.controller.guard.counts, engine.controller.coverage.share)
        if engine is not None and engine.hook is not None:
            yield from self._learn(engine.hook.stats())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(GaugeMetricFamily, name, text, (), [((), value)])

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._labelled(CounterMetricFamily, name, text, (), [((), value)])

    def _labelled(self, kind: Kind, name: str, text: str, by: tuple[str, ...], figures: Iterable[tuple[Any, float]]) -> Metric:
        """Returns a metric with further labels `by`. Each figure comes with their values: a tuple, or the only one."""
        family = kind(name, text, labels=(*LABELS, *by))
        for key, value in figures:
            family.add_metric((*self.labels, *(key if isinstance(key, tuple) else (str(key),))), value)
        return family

    @property
    def guard(self) -> DriftGuard | None:
        return self.engine.controller.guard if self.engine is not None else None

    def _guard(self, counts: GuardCounts, outside_share: float) -> Iterable[Metric]:
        text = "Requests whose depth the drift guard has reduced at some time."
        yield self._counter("fledge:drift_guard_requests_shortened", text, counts.requests)
        text = "Times that a request's depth came back to the full depth."
        yield self._counter("fledge:drift_guard_recoveries", text, counts.recoveries)
        text = "Speculative steps with a depth that the drift guard had reduced."
        yield self._counter("fledge:drift_guard_short_steps", text, counts.short_steps)
        yield self._gauge("fledge:drift_guard_shortened", "Requests whose depth is reduced now.", counts.shortened)
        text = "Times that a request's depth was halved, by the figure that left its usual range: acceptance, rms or sink."
        by_reason = counts.shortenings.items()
        yield self._labelled(CounterMetricFamily, "fledge:drift_guard_shortenings", text, ("reason",), by_reason)
        text = "Share of the target's recent tokens that are not in the drafter's vocabulary."
        yield self._gauge("fledge:drift_guard_outside_vocabulary_share", text, outside_share)

    def _drift(self, figures: dict[str, Any]) -> Iterable[Metric]:
        yield self._counter("fledge:drift_drafts_probed", "Drafts that the drift probe sampled.", figures["drafts"])
        for name, text in DRIFT.items():
            by_step = ((step, value) for step, value in enumerate(figures[name]) if value is not None)
            yield self._labelled(GaugeMetricFamily, f"fledge:drift_{name}", text, ("step",), by_step)

    def _learn(self, stats: dict[str, Any]) -> Iterable[Metric]:
        """Returns the metrics of `--learn`. `stats`: from the learning hook's `stats`."""
        for name, text in LEARN_COUNTERS.items():
            yield self._counter(f"fledge:learn_{name}", text, stats[name])
        for name, text in LEARN_GAUGES.items():
            yield self._gauge(f"fledge:learn_{name}", text, stats[name])
        yield self._gauge("fledge:learn_stopped", "1: learning has stopped; the log says why.", bool(stats["stopped"]))
        decisions = [(name, stats[name]) for name in ("accepted", "refused")]
        text = "Candidates that the gate accepted or refused."
        yield self._labelled(CounterMetricFamily, "fledge:learn_gate_decisions", text, ("decision",), decisions)
        name, dropped = "fledge:learn_samples_dropped", stats["dropped"].items()
        yield self._labelled(CounterMetricFamily, name, "Texts that were not kept to learn from.", ("reason",), dropped)
        text = "Acceptance length by domain cluster: before learning, and with the weights that are served."
        lengths = (
            ((domain, when), value)
            for domain, figures in stats["domains"].items()
            for when, value in figures.items()
            if value is not None
        )
        yield self._labelled(GaugeMetricFamily, "fledge:learn_acceptance_length", text, ("domain", "when"), lengths)

    def queue_lengths(self) -> tuple[int, int]:
        """Returns the numbers of running and of waiting requests."""
        if self.engine is None:
            return 0, 0
        return len(self.engine.scheduler.running), len(self.engine.scheduler.waiting) + self.num_queued()

    def cache_usage(self) -> float:
        pool = self.engine.pool if self.engine is not None else None
        return 1 - pool.num_free / pool.num_pages if pool is not None and pool.num_pages else 0.0

    def has_activity(self) -> bool:
        """Whether there is activity that was not logged yet."""
        return self._snapshot()[:2] != self._logged[:2] or any(self.queue_lengths())

    def resume(self) -> None:
        """Restarts the interval after a time without requests, so that rates do not count it."""
        self._logged_at = time.perf_counter()

    def log_when_due(self, seconds: float) -> None:
        """Logs one line per interval of `seconds` while there is activity."""
        now = time.perf_counter()
        if now - self._logged_at < seconds:
            return
        if self.has_activity():
            log.info(self._line(self._logged, self._snapshot(), now - self._logged_at))
        self._logged, self._logged_at = self._snapshot(), now

    def _snapshot(self) -> tuple[int, int, int, int, list[int], int]:
        stats = self.engine.stats if self.engine is not None else AcceptanceStats()
        shortenings = sum(self.guard.counts.shortenings.values()) if self.guard is not None else 0
        return self.tokens_in, self.tokens_out, stats.steps, stats.accepted, list(stats.accepted_at), shortenings

    def _line(self, before: tuple, after: tuple, seconds: float) -> str:
        running, waiting = self.queue_lengths()
        line = (
            f"prompt {(after[0] - before[0]) / seconds:.1f} tokens/s, "
            f"generation {(after[1] - before[1]) / seconds:.1f} tokens/s, "
            f"{running} running, {waiting} waiting, cache {self.cache_usage():.1%}"
        )
        steps = after[2] - before[2]
        if steps:
            earlier = [*before[4], *[0] * (len(after[4]) - len(before[4]))]
            rates = " ".join(f"{(new - old) / steps:.2f}" for new, old in zip(after[4], earlier, strict=True))
            line += f", acceptance length {1 + (after[3] - before[3]) / steps:.2f}, by position {rates}"
        if self.guard is not None and after[5] > before[5]:
            line += f"; drift guard: {after[5] - before[5]} depths reduced, {self.guard.counts.shortened} now reduced"
        return line
