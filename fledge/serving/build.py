"""Builds the engine that a server runs from the command line's flags."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from fledge import progress, sources
from fledge.checkpoints.tensors import read_json
from fledge.drift.live import coverage, watch_drafts
from fledge.engine.build import build_engine
from fledge.engine.engine import Engine
from fledge.engine.memory import memory_plan
from fledge.errors import UserError
from fledge.kernels.attention.paged import PagedKV
from fledge.serving.defaults import generation_defaults
from fledge.serving.flags import ServeFlags
from fledge.serving.metrics import Metrics
from fledge.speculation.methods.eagle import EagleSpeculator
from fledge.speculation.methods.ngram import NgramSpeculator

log = logging.getLogger("fledge.serving")


def build(flags: ServeFlags, metrics: Metrics) -> tuple[Engine, dict[str, Any]]:
    """Builds and warms up the engine. Returns it with the model's sampling defaults."""
    imported = process_seconds()
    found = sources.find(flags.model)  # a GGUF file has no generation_config.json
    defaults: dict[str, Any] = {}
    if flags.generation_config != "vllm":
        defaults = generation_defaults(found if flags.generation_config == "auto" else Path(flags.generation_config))
    config = flags.engine_config
    method = quantization_of(found)
    if method and config.quantization == method:  # fp8: the checkpoint is in fp8 already, so nothing is left to quantise
        config = replace(config, quantization="none")
    if flags.checkpoint_quantization not in (None, method):
        is_so = f"quantised by {method}" if method else "not quantised"
        raise UserError(f"--quantization {flags.checkpoint_quantization}: {flags.model} is {is_so}; leave it out")
    speculative = flags.speculative_config
    if flags.learn is not None:
        from fledge.learning.setup import build_learning_engine  # imported here: it imports all of training, which takes time

        engine = build_learning_engine(flags.model, speculative.speculation, config, flags.learn)
    else:
        engine = build_engine(flags.model, speculative.speculation, config)
    log.info(memory_plan(engine).describe())
    longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
    if isinstance(engine.drafter, NgramSpeculator) and longest and shortest:
        engine.drafter.longest, engine.drafter.shortest = longest, shortest
    loaded = process_seconds()
    with progress.task("warming up"):
        lines = engine.warm_up()
    for line in lines:
        log.info(line)
    log.info(
        "the engine took %.1f s to start: %.1f s for imports, %.1f s for weights and cache, %.1f s to warm up",
        *((ready := process_seconds()), imported, loaded - imported, ready - loaded),
    )
    if flags.engine_config.kv_cache_tokens:  # explicit size: allocated at once, so that the server's memory does not grow later
        for owner in (engine.executor, engine.drafter):
            if isinstance(cache := getattr(owner, "cache", None), PagedKV):
                cache.take_memory()
    if flags.drift_probe_every and not isinstance(engine.drafter, EagleSpeculator):
        raise UserError("--drift-probe-every probes EAGLE drafts only; give an EAGLE drafter, or leave it out")
    if flags.drift_probe_every or engine.controller.guard is not None:
        metrics.probe = probe = watch_drafts(engine, flags.drift_probe_every or None)
        if probe is not None:
            log.info(coverage(engine, probe))
    return engine, defaults


def quantization_of(found: Path) -> str | None:
    """Returns the quantisation method that a checkpoint's config.json names; None: it is not quantised."""
    file = found / "config.json"
    settings = read_json(file).get("quantization_config") if file.is_file() else None
    return settings.get("quant_method") if isinstance(settings, dict) else None


def process_seconds() -> float:
    """Returns the seconds since this process started. Without /proc: a clock's time, so only differences are valid."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return time.perf_counter()
