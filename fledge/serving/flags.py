"""The command line of `fledge serve`: vLLM's names, defaults and JSON keys, so that a command line moves over unchanged.

A flag of vLLM's that has no meaning here is refused with the reason and what to do instead; nothing is ignored in silence.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NoReturn

from fledge.engine.config import EngineConfig, check_quantization
from fledge.engine.options import DEFAULT_DEPTH, Speculation
from fledge.errors import UsageError, UserError
from fledge.learning.config import LearnConfig
from fledge.serving import limits
from fledge.serving.foreign_flags import MAY_BE, REFUSED
from fledge.serving.limits import Limits
from fledge.sources import BUILT_INS
from fledge.speculation.depth import TreeShape

DEFAULT_MODEL = "smollm2-135m"
DTYPES = {"half": "float16", "float": "float32"}
METHODS = ("eagle3", "eagle", "ngram")
# From so many cores on the engine has a process of its own, and for every so many there is an HTTP process.
PROCESS_CORES, WORKER_CORES, MAX_WORKERS = 4, 4, 4


# Keys of --speculative-config that may be given with these values only, and why.
FIXED = {
    "draft_tensor_parallel_size": ((1, None), "the drafter runs on one device; use --engine vllm for more"),
    "quantization": ((None,), "drafters are served in --dtype"),
    "max_model_len": ((None,), "the drafter follows the target's --max-model-len"),
    "revision": ((None,), "fetch the revision you want and give its folder as 'model'"),
    "enforce_eager": ((None, True, False), ""),
    "disable_by_batch_size": ((None,), 'speculation stays on; switch it off per request with "speculate": false'),
    "speculative_token_tree": ((None,), "give the tree's shape with --tree-width and --tree-nodes"),
    "rejection_sample_method": ((None, "strict", "standard"), "verification is exact here; leave it out"),
    "parallel_drafting": ((None, False), "drafters that propose a block in one pass are not supported"),
}


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's `--speculative-config`, as far as it applies."""

    speculation: Speculation
    prompt_lookup_max: int | None = None  # n-gram: the longest match tried
    prompt_lookup_min: int | None = None

    @classmethod
    def parse(cls, text: str | dict[str, Any], tree: TreeShape | None = None) -> SpeculativeConfig:
        given = _json_object("--speculative-config", text) if isinstance(text, str) else dict(text)
        for key, (values, reason) in FIXED.items():
            if given.pop(key, None) not in values:
                raise UserError(f"--speculative-config: {key!r} does not apply here: {reason}")
        model, method = given.pop("model", None), given.pop("method", None)
        depth = given.pop("num_speculative_tokens", None)
        longest, shortest = given.pop("prompt_lookup_max", None), given.pop("prompt_lookup_min", None)
        if given:
            known = ["method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"]
            raise UserError(f"--speculative-config: unknown key {next(iter(given))!r}; known: {', '.join(known)}")
        if method is None:
            method = "ngram" if model in (None, "ngram", "[ngram]") else "eagle3"
        if method not in METHODS:
            raise UserError(
                f"--speculative-config: method {method!r} is not supported; supported: {', '.join(METHODS)}. "
                "For others use --engine vllm"
            )
        if method != "ngram" and not model:
            raise UserError("--speculative-config: 'model' is missing; name the drafter's folder, or use method 'ngram'")
        if method == "ngram":
            longest = 5 if longest is None and shortest is None else longest or shortest
            shortest = shortest or longest
            if not all(isinstance(one, int) and one > 0 for one in (longest, shortest)) or shortest > longest:
                raise UserError("--speculative-config: prompt_lookup_min and _max are numbers, 1 <= min <= max")
        elif longest is not None or shortest is not None:
            raise UserError("--speculative-config: prompt_lookup_min and _max belong to method 'ngram'")
        speculation = Speculation("ngram" if method == "ngram" else model, depth or DEFAULT_DEPTH, tree)
        return cls(speculation, longest, shortest)

    def with_depth_rules(self, adaptive: bool, drift_guard: bool) -> SpeculativeConfig:
        return replace(self, speculation=replace(self.speculation, adaptive=adaptive, drift_guard=drift_guard))


@dataclass(frozen=True)
class ServeFlags:
    """A parsed command line. What vLLM has too bears vLLM's name."""

    model: str = DEFAULT_MODEL
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    root_path: str = ""
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
    gpu_memory_utilization: float | None = None
    shutdown_timeout: float = 30.0
    engine_process: bool = False  # the engine in a process of its own
    api_workers: int = 1  # processes that speak HTTP
    max_queue: int = 256
    limits: Limits = field(default_factory=Limits)
    log_interval: float = 10.0
    drift_probe_every: int = 0
    learn: LearnConfig | None = None
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    speculative_config: SpeculativeConfig = field(default_factory=lambda: SpeculativeConfig(Speculation("auto")))

    @property
    def names(self) -> tuple[str, ...]:
        return self.served_model_name or (self.model,)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def parser() -> argparse.ArgumentParser:
    from fledge.serving.reasoning import REASONING_PARSERS
    from fledge.serving.tool_parsers import TOOL_PARSERS

    top = _Parser(
        prog="fledge serve",
        description="Serve a model over an OpenAI-compatible API, with vLLM's flags. Without a model: the built-in one.",
        allow_abbrev=False,
    )
    top.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help=f"name, folder, GGUF file or hub id (default {DEFAULT_MODEL})"
    )
    top.add_argument("--model", help="the same, as a flag")
    top.add_argument("--engine", choices=("fledge", "vllm"), default="fledge", help="vllm: run vLLM with these arguments")

    api = top.add_argument_group("API")
    api.add_argument("--served-model-name", nargs="+", default=(), help="names that requests may use")
    api.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network; give an --api-key then")
    api.add_argument("--port", type=int, default=8000, help="TCP port")
    api.add_argument("--uds", help="a Unix socket instead of host and port")
    api.add_argument("--root-path", default="", help="the path under which a proxy shows the server")
    api.add_argument("--api-key", nargs="+", default=(), help="wanted on every route but /health; also from VLLM_API_KEY")
    api.add_argument("--ssl-keyfile", help="private key, for HTTPS")
    api.add_argument("--ssl-certfile", help="certificate, for HTTPS")
    api.add_argument(
        "--allowed-origins", type=_json_list, default=(), metavar="JSON", help="sites whose pages may ask; none by default"
    )
    api.add_argument("--allow-credentials", action="store_true", help="let those pages send cookies and keys")
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    api.add_argument("--uvicorn-log-level", choices=levels, default="info", help="what the HTTP side logs")
    api.add_argument("--disable-uvicorn-access-log", action="store_true", help="no log line for each request")
    api.add_argument("--disable-log-stats", action="store_true", help="no line of figures per interval")
    api.add_argument("--chat-template", help="a file, or the template itself")
    api.add_argument("--enable-auto-tool-choice", action="store_true", help="the model decides when to call a tool")
    api.add_argument("--tool-call-parser", choices=sorted(TOOL_PARSERS), help="how the model writes tool calls")
    api.add_argument("--reasoning-parser", choices=sorted(REASONING_PARSERS), help="how the model writes thoughts")
    api.add_argument("--max-logprobs", type=int, default=20, help="most alternatives that a request may ask for")
    api.add_argument("--generation-config", default="auto", help="auto: the model's own sampling defaults; vllm: none")
    api.add_argument("--override-generation-config", default="{}", metavar="JSON", help="sampling defaults of your own")
    api.add_argument("--shutdown-timeout", type=float, default=30.0, help="seconds for running requests after SIGTERM")

    engine = top.add_argument_group("engine")
    engine.add_argument("--speculative-config", "-sc", metavar="JSON", help="method, model, num_speculative_tokens, …")
    engine.add_argument(
        "--dtype",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        default="auto",
        help="type of plain weights",
    )
    engine.add_argument("--quantization", "-q", default="none", help="int8, int4, or gguf (as a GGUF file has them)")
    engine.add_argument("--kv-cache-dtype", default="auto", help="auto, float32, float16 or q8_0 (CPU)")
    engine.add_argument("--max-model-len", type=human_int, default=0, help="tokens of prompt and answer; 0: the model's")
    engine.add_argument("--max-num-seqs", type=int, default=0, help="answers decoded together; 0: by device")
    engine.add_argument("--max-num-batched-tokens", type=human_int, default=0, help="tokens of a step; 0: by device")
    engine.add_argument("--block-size", type=int, default=16, help="tokens a cache page")
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="prompts share pages"
    )
    engine.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's memory for weights and cache")
    engine.add_argument("--seed", type=int, help="for requests that give none")

    own = top.add_argument_group("Fledge's own")
    own.add_argument("--drafter", help="auto, none, ngram, a name, a folder or a hub id; instead of --speculative-config")
    own.add_argument("--depth", help=f"tokens drafted a step, or auto (default {DEFAULT_DEPTH})")
    own.add_argument("--tree-width", type=int, help="draft a tree with so many candidates a node")
    own.add_argument("--tree-nodes", type=int, help="and so many nodes")
    own.add_argument(
        "--adaptive-depth",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draft less deeply, down to not at all, under load that makes drafting slower than plain decoding",
    )
    own.add_argument(
        "--drift-guard",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draft less deeply for a request whose drafts fare clearly worse than usual",
    )
    own.add_argument("--device", default="auto", help="auto, cpu or cuda")
    own.add_argument(
        "--deterministic",
        action="store_true",
        help="accepted, and has nothing left to switch: answers do not depend on the batch or on speculation anyway",
    )
    own.add_argument("--threads", type=int, default=0, help="CPU threads")
    own.add_argument("--kv-cache-tokens", type=human_int, default=0, help="room in the cache")
    own.add_argument(
        "--engine-process",
        action=argparse.BooleanOptionalAction,
        help="run the engine in a process of its own; without it, in a thread of the only HTTP process "
        f"(default: with {PROCESS_CORES} or more cores)",
    )
    own.add_argument(
        "--api-workers",
        type=int,
        default=0,
        help="processes that speak HTTP (default: by cores, at most 4); several need --engine-process",
    )
    own.add_argument("--max-queue", type=int, default=256, help="requests that may wait; more get a 503")
    own.add_argument("--drift-probe-every", type=int, default=0, help="look at every n-th draft; figures in /metrics")
    own.add_argument("--learn", action="store_true", help="train the drafter on what is served, in the gaps; see docs/learn.md")
    own.add_argument("--learn-budget", type=float, metavar="PERCENT", help="of the time that requests run, for it (default 5)")
    own.add_argument("--learn-dir", type=Path, help="keep generations of the drafter there; without it nothing is written")
    own.add_argument("--learn-memory", type=int, metavar="MIB", help="for texts to learn from (default 256; 2048 on a GPU)")
    own.add_argument("--learn-max-age", type=float, metavar="HOURS", help="after which a text is dropped (default 24)")
    own.add_argument(
        "--learn-replay", metavar="DATA", help="prompts that the drafter must not get worse on (default: built in)"
    )
    own.add_argument("--log-interval", type=float, default=10.0, help="seconds between lines of figures")
    limits.add_flags(own, human_int)
    return top


def parse(arguments: Sequence[str]) -> ServeFlags:
    arguments = refuse_foreign(normalise(arguments))
    given = parser().parse_args(arguments)
    if given.model_tag and given.model and given.model_tag != given.model:
        raise UserError(f"two models were named, {given.model_tag} and --model {given.model}; name one")
    model = given.model_tag or given.model or DEFAULT_MODEL
    keys = tuple(given.api_key) or tuple(filter(None, [os.environ.get("VLLM_API_KEY")]))
    if not all(keys):
        raise UserError("--api-key: a key must not be empty")
    if given.enable_auto_tool_choice and not given.tool_call_parser:
        raise UserError("--enable-auto-tool-choice needs --tool-call-parser, which says how the model writes its calls")
    bounds = {
        "--max-queue": (given.max_queue, 0),
        "--max-logprobs": (given.max_logprobs, 0),
        "--block-size": (given.block_size, 1),
    }
    bounds |= {
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
    if given.max_logprobs > 20:
        raise UserError("--max-logprobs: at most 20 alternatives can be reported")
    config = EngineConfig(
        device=given.device,
        dtype=DTYPES.get(given.dtype, given.dtype),
        quantization=check_quantization("none" if given.quantization in ("null", "None") else given.quantization),
        max_model_len=given.max_model_len,
        max_num_seqs=given.max_num_seqs,
        max_batched_tokens=given.max_num_batched_tokens,
        kv_cache_tokens=given.kv_cache_tokens,
        kv_cache_dtype=DTYPES.get(given.kv_cache_dtype, given.kv_cache_dtype),
        page_size=given.block_size,
        prefix_caching=given.enable_prefix_caching,
        deterministic=given.deterministic,
        threads=given.threads,
    )
    same = (
        "host",
        "port",
        "uds",
        "root_path",
        "uvicorn_log_level",
        "disable_uvicorn_access_log",
        "ssl_keyfile",
        "ssl_certfile",
    )
    same += ("allow_credentials", "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "max_logprobs", "seed")
    same += ("generation_config", "disable_log_stats", "gpu_memory_utilization", "shutdown_timeout", "max_queue")
    same += ("log_interval", "drift_probe_every")
    return ServeFlags(
        model=model,
        served_model_name=tuple(given.served_model_name),
        api_key=keys,
        allowed_origins=tuple(given.allowed_origins),
        chat_template=read_template(given.chat_template),
        override_generation_config=_json_object("--override-generation-config", given.override_generation_config),
        engine_config=config,
        limits=limits.from_flags(given),
        learn=_learn_config(given),
        **_processes(given),
        speculative_config=_speculative_config(given, model).with_depth_rules(given.adaptive_depth, given.drift_guard),
        **{name: getattr(given, name) for name in same},
    )


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
    """Where the engine runs, and how many processes speak HTTP: by the cores, unless it is asked for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    apart, workers = given.engine_process, given.api_workers
    if workers > 1 and apart is False:
        raise UserError("--api-workers: several need an engine in a process of its own; leave out --no-engine-process")
    if workers > 1 and given.uds:
        raise UserError("--api-workers: one process listens on a --uds; leave one of them out")
    apart = (workers > 1 or cores >= PROCESS_CORES) if apart is None else apart
    return {
        "engine_process": apart,
        "api_workers": workers or (min(MAX_WORKERS, max(1, cores // WORKER_CORES)) if apart and not given.uds else 1),
    }


def _speculative_config(given: argparse.Namespace, model: str) -> SpeculativeConfig:
    tree = None
    if given.tree_width is not None or given.tree_nodes is not None:
        tree = TreeShape(given.tree_width or TreeShape.width, given.tree_nodes or TreeShape.nodes)
    if given.speculative_config is None:
        # As in vLLM a user's model is served plainly unless a drafter is asked for; a built-in one comes with its own.
        drafter = given.drafter or ("auto" if model in BUILT_INS else "none")
        return SpeculativeConfig(Speculation(drafter, given.depth or DEFAULT_DEPTH, tree))
    if given.drafter or given.depth:
        raise UserError("--speculative-config and --drafter or --depth say the same thing; give one of them")
    return SpeculativeConfig.parse(given.speculative_config, tree)


def normalise(arguments: Sequence[str]) -> list[str]:
    """vLLM's spellings: underscores in flags, `--speculative-config.method ngram` for a key of a JSON flag."""
    result: list[str] = []
    nested: dict[str, dict[str, Any]] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            result.append(word)
            continue
        name, equals, value = word.partition("=")
        path = name.split(".")
        flag = path[0].replace("_", "-")
        if len(path) == 1:
            result.append(flag + equals + value)
            continue
        if not equals:
            if not rest:
                raise UsageError(f"{name}: a value is missing")
            value = rest.pop(0)
        place = nested.setdefault(flag, {})
        for key in path[1:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = _json_or_text(value)
    for flag, value in nested.items():
        result += [flag, json.dumps(value)]
    return result


def refuse_foreign(arguments: list[str]) -> list[str]:
    """Takes out flags that ask for what is so anyway, and refuses those that cannot be followed."""
    known = {option for action in parser()._actions for option in action.option_strings}
    result: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in known or not name.startswith("-") or _is_number(name):
            result.append(word)
            continue
        allowed = MAY_BE.get(name)
        if allowed is None:
            raise UsageError(_refusal(name, known))
        if allowed.values:
            if not equals:
                value = rest.pop(0) if rest else ""
            if value.lower() not in allowed.values:
                raise UserError(f"{name} {value} is not possible here: {allowed.reason}")
    return result


def _refusal(name: str, known: set[str]) -> str:
    if name in REFUSED:
        return f"{name} does not apply here: {REFUSED[name]}"
    near = difflib.get_close_matches(name, [*known, *REFUSED, *MAY_BE], n=1)
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is not a flag of fledge serve{suggestion} (see `fledge serve --help`; --engine vllm takes all of vLLM's)"


def human_int(text: str) -> int:
    """`32k` is 32,000 and `32K` 32,768, as vLLM reads them; `auto` and -1 leave the choice to the engine."""
    if text in ("auto", "-1"):
        return 0
    scale = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    try:
        number = float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        number = -1.0
    if number < 1 or number != int(number):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4k or 4K")
    return int(number)


def read_template(text: str | None) -> str | None:
    """A chat template: the file's contents, or the text itself when it looks like one."""
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


def _json_list(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"a JSON list of strings is wanted, not {text!r}")
    return tuple(value)


def _json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{flag} is not valid JSON ({error}); put it in single quotes in a shell") from None
    if not isinstance(value, dict):
        raise UserError(f"{flag} must be a JSON object, not {text}")
    return value


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is_number(text: str) -> bool:
    return text[1:].replace(".", "", 1).isdigit()
