"""The command line of `fledge serve`, with vLLM's names and JSON keys, so that a vLLM command line works unchanged. One default
differs: `--host` is 127.0.0.1.

A vLLM flag that Fledge does not support is refused with the reason and what to do instead; one that has no effect is logged.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from fledge.engine.config import EngineConfig, check_quantization
from fledge.engine.options import DEFAULT_DEPTH, Speculation
from fledge.errors import UserError
from fledge.learning.config import LearnConfig
from fledge.serving import limits
from fledge.serving.flag_parser import DEFAULT_MODEL, PROCESS_CORES, parser
from fledge.serving.foreign_flags import normalise, refuse_foreign
from fledge.serving.limits import Limits
from fledge.serving.speculative_config import BOTH_GIVEN, SpeculativeConfig, json_object
from fledge.sources import BUILT_INS
from fledge.speculation.depth import TreeShape

DTYPES = {"half": "float16", "float": "float32"}
# vLLM's names of quantisation methods -> the method in the checkpoint's config.json. Not fp8, which can be applied at load.
CHECKPOINT_METHODS = {
    "awq": "awq",
    "awq_marlin": "awq",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
    "compressed-tensors": "compressed-tensors",
}
WORKER_CORES, MAX_WORKERS = 4, 4  # one HTTP process per WORKER_CORES cores


@dataclass(frozen=True)
class ServeFlags:
    """A parsed command line. Fields that vLLM has too have vLLM's names."""

    model: str = DEFAULT_MODEL
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
    trusted_proxies: tuple[str, ...] = ()
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    allowed_origins: tuple[str, ...] = ()
    allow_credentials: bool = False
    api_key: tuple[str, ...] = ()
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    chat_template: str | None = None  # the template's text
    max_logprobs: int = 20
    seed: int | None = None
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    disable_log_stats: bool = False
    shutdown_timeout: float = 30.0
    engine_process: bool = False  # whether the engine runs in a process of its own
    api_workers: int = 1  # number of HTTP processes
    max_queue: int = 256
    limits: Limits = field(default_factory=Limits)
    log_interval: float = 10.0
    drift_probe_every: int = 0
    learn: LearnConfig | None = None
    checkpoint_quantization: str | None = None  # the method that the command line says the checkpoint has
    notes: tuple[str, ...] = ()  # flags that have no effect, for the log
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    speculative_config: SpeculativeConfig = field(default_factory=lambda: SpeculativeConfig(Speculation("auto")))

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


def chosen_engine(words: Sequence[str]) -> str:
    """Returns the value of --engine before anything else is parsed, since vLLM's flags are not checked here."""
    for word, following in pairwise([*words, ""]):
        if word == "--engine":
            return following
        if word.startswith("--engine="):
            return word.partition("=")[2]
    return "fledge"


def parse(arguments: Sequence[str]) -> ServeFlags:
    own = parser()
    known = {option for action in own._actions for option in action.option_strings}
    followed, notes = refuse_foreign(normalise(arguments), known)
    given = own.parse_args(followed)
    if given.model_tag and given.model and given.model_tag != given.model:
        raise UserError(f"two models were named, {given.model_tag} and --model {given.model}; name one")
    model = given.model_tag or given.model or DEFAULT_MODEL
    keys = tuple(given.api_key) or tuple(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if not all(keys):
        raise UserError("--api-key: a key must not be empty")
    if given.enable_auto_tool_choice and not given.tool_call_parser:
        raise UserError("--enable-auto-tool-choice needs --tool-call-parser, which says how the model writes its calls")
    bounds: dict[str, tuple[float, float]] = {
        "--log-interval": (given.log_interval, 0.001),
        "--max-queue": (given.max_queue, 0),
        "--max-logprobs": (given.max_logprobs, 0),
        "--block-size": (given.block_size, 0),
        "--drift-probe-every": (given.drift_probe_every, 0),
        "--max-num-seqs": (given.max_num_seqs, 0),
        "--shutdown-timeout": (given.shutdown_timeout, 0),
        "--api-workers": (given.api_workers, 0),
    }
    for one in fields(limits.Limits):
        least = 0 if one.name == "request_timeout" else 1 if one.metadata["kind"] is int else 0.001
        bounds[f"--{one.name.replace('_', '-')}"] = (getattr(given, one.name), least)
    for name, (value, least) in bounds.items():
        if not value >= least:
            raise UserError(f"{name} must be at least {least}, not {value}")
        if value == math.inf:
            raise UserError(f"{name} must be a finite number, not {value}")
    if given.max_logprobs > 20:
        raise UserError("--max-logprobs: at most 20 alternatives can be reported")
    quantization, of_checkpoint = _quantization(given.quantization)
    speculative = _speculative_config(given, model).with_depth_rules(given.adaptive_depth, given.drift_guard)
    config = EngineConfig(
        device=given.device,
        dtype=DTYPES.get(given.dtype, given.dtype),
        quantization=quantization,
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        max_batched_tokens=given.max_num_batched_tokens,
        kv_cache_tokens=given.kv_cache_tokens,
        kv_cache_dtype=DTYPES.get(given.kv_cache_dtype, given.kv_cache_dtype),
        gpu_memory_utilization=given.gpu_memory_utilization or 0.0,
        page_size=given.block_size,
        prefix_caching=given.enable_prefix_caching,
        deterministic=given.deterministic,
        threads=given.threads,
    )
    changed: dict[str, Any] = {
        "model": model,
        "served_model_name": tuple(given.served_model_name),
        "api_key": keys,
        "chat_template": read_template(given.chat_template),
        "override_generation_config": json_object("--override-generation-config", given.override_generation_config),
        "checkpoint_quantization": of_checkpoint,
        "notes": (*notes, *speculative.notes),
        "engine_config": config,
        "limits": limits.from_flags(given),
        "learn": _learn_config(given),
        "speculative_config": speculative,
        **_processes(given),
    }
    return ServeFlags(
        **changed, **{one.name: getattr(given, one.name) for one in fields(ServeFlags) if one.name not in changed}
    )


def _quantization(name: str) -> tuple[str, str | None]:
    """Returns the quantisation to apply at load and the one the checkpoint should have: as in vLLM, the flag names either."""
    if name in ("null", "None"):
        return "none", None
    method = CHECKPOINT_METHODS.get(name)
    return ("none", method) if method else (check_quantization(name), None)


def _learn_config(given: argparse.Namespace) -> LearnConfig | None:
    asked = {
        "budget": given.learn_budget,
        "folder": given.learn_dir,
        "memory_mb": given.learn_memory,
        "max_age": None if given.learn_max_age is None else given.learn_max_age * 3600,
        "replay": given.learn_replay,
    }
    asked = {name: value for name, value in asked.items() if value is not None}
    if not given.learn:
        if asked:
            raise UserError("--learn-budget, -dir, -memory, -max-age and -replay say how to learn; add --learn")
        return None
    for name, flag in (("memory_mb", "--learn-memory"), ("max_age", "--learn-max-age")):
        if name in asked and not asked[name] > 0:
            raise UserError(f"{flag} must be more than 0")
    if "budget" in asked and not 0 < asked["budget"] <= 100:
        raise UserError(f"--learn-budget is a percentage, more than 0 and at most 100, not {asked['budget']:g}")
    return LearnConfig(**asked)


def _processes(given: argparse.Namespace) -> dict[str, Any]:
    """Returns whether the engine has its own process, and the number of HTTP processes: as given, else by cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    own_process, workers = given.engine_process, given.api_workers
    if workers > 1 and own_process is False:
        raise UserError("--api-workers above 1 needs the engine in its own process; leave out --no-engine-process")
    if workers > 1 and given.uds:
        raise UserError("--api-workers above 1 does not work with --uds; leave one of them out")
    own_process = (workers > 1 or cores >= PROCESS_CORES) if own_process is None else own_process
    return {
        "engine_process": own_process,
        "api_workers": workers or (min(MAX_WORKERS, max(1, cores // WORKER_CORES)) if own_process and not given.uds else 1),
    }


def _speculative_config(given: argparse.Namespace, model: str) -> SpeculativeConfig:
    tree = None
    if given.tree or given.tree_width is not None or given.tree_nodes is not None:
        asked = {"width": given.tree_width, "nodes": given.tree_nodes}
        tree = TreeShape(**{name: value for name, value in asked.items() if value is not None})
    if given.speculative_config is None:
        # As in vLLM, a model is served without speculation unless a drafter is given; built-in models use their own.
        drafter = given.drafter or ("auto" if model in BUILT_INS else "none")
        return SpeculativeConfig(Speculation(drafter, given.depth or DEFAULT_DEPTH, tree))
    if given.drafter or given.depth:
        raise UserError(BOTH_GIVEN)
    return SpeculativeConfig.parse(given.speculative_config, tree)


def read_template(text: str | None) -> str | None:
    """Returns a chat template: the contents of the file `text`, or `text` itself if it looks like a template."""
    if text is None:
        return None
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if any(mark in text for mark in "{}\n"):
            return text
        raise UserError(
            f"--chat-template {text}: the file cannot be read ({error}), and it does not look like a template"
        ) from None
