"""The flags of `fledge serve` for argparse: names, types, defaults and help."""

from __future__ import annotations

import argparse
import ipaddress
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fledge.engine.options import DEFAULT_DEPTH
from fledge.errors import UsageError
from fledge.serving import limits
from fledge.speculation.depth import CPU_LIMIT, GPU_LIMIT, TreeShape

DEFAULT_MODEL = "smollm2-135m"
# Flags that vLLM has too; the others exist only in Fledge.
OF_VLLM = {
    "-h", "--help", "--engine", "--model", "--dtype", "--quantization", "-q", "--max-model-len", "--chat-template",
    "--generation-config", "--override-generation-config", "--seed", "--speculative-config", "-sc", "--max-num-seqs",
    "--max-num-batched-tokens", "--kv-cache-dtype", "--block-size", "--enable-prefix-caching", "--no-enable-prefix-caching",
    "--gpu-memory-utilization", "--host", "--port", "--uds", "--root-path", "--served-model-name", "--api-key",
    "--ssl-keyfile", "--ssl-certfile", "--allowed-origins", "--allow-credentials", "--api-server-count", "--shutdown-timeout",
    "--enable-auto-tool-choice", "--tool-call-parser", "--reasoning-parser", "--max-logprobs", "--uvicorn-log-level",
    "--disable-uvicorn-access-log", "--disable-log-stats",
}  # fmt: skip
# With at least this many cores the engine runs in a process of its own.
PROCESS_CORES = 4


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


class _Help(argparse.HelpFormatter):
    """Appends the default to each help text, except 0 and off, which the text explains itself."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        is_told = re.search(r"\bdefault\b", text) or default in (None, False, 0, "", (), argparse.SUPPRESS) or callable(default)
        return text if is_told else f"{text} (default {'on' if default is True else '%(default)s'})"


def parser() -> argparse.ArgumentParser:
    from fledge.serving.reasoning import REASONING_PARSERS
    from fledge.serving.tool_parsers import TOOL_PARSERS

    top = _Parser(
        prog="fledge serve",
        description="Serve a model over an OpenAI-compatible API, with vLLM's flags. Without a model: the built-in one.",
        usage="fledge serve [MODEL] [--drafter DRAFTER | --speculative-config JSON] [flags below]",
        allow_abbrev=False,
        formatter_class=_Help,
    )

    model = top.add_argument_group("Model")
    model.add_argument(
        "model_tag", nargs="?", metavar="MODEL", help=f"name, folder, GGUF file or hub id (default {DEFAULT_MODEL})"
    )
    model.add_argument("--model", help="the same, as a flag")
    model.add_argument("--device", default="auto", help="auto, cpu or cuda")
    model.add_argument(
        "--dtype",
        choices=("auto", "half", "float16", "bfloat16", "float", "float32"),
        default="auto",
        help="weight dtype; auto: bfloat16 on a GPU; on a CPU a GGUF file's own blocks, else float16",
    )
    model.add_argument(
        "--quantization",
        "-q",
        default="none",
        help="quantise the weights at load: fp8 (GPU), int8, int4; gguf: keep the file's quantised blocks (default for GGUF on "
        "CPU); awq, gptq, compressed-tensors: accepted for a checkpoint that has it",
    )
    _number(model, "--max-model-len", help="tokens of prompt and answer; 0: the model's limit", type=human_int)
    model.add_argument("--chat-template", help="a file, or the template itself")
    model.add_argument("--generation-config", default="auto", help="auto: the model's own sampling defaults; vllm: none")
    model.add_argument("--override-generation-config", default="{}", metavar="JSON", help="sampling defaults of your own")
    model.add_argument("--seed", type=int, help="for requests that give none")
    model.add_argument("--engine", choices=("fledge", "vllm"), default="fledge", help="vllm: run vLLM with these arguments")

    draft = top.add_argument_group("Speculation")
    draft.add_argument(
        "--drafter",
        help="auto (the one shipped for the model, else ngram), none, ngram, a name, a folder or a hub id (default auto for a "
        "built-in model, none for others)",
    )
    draft.add_argument(
        "--speculative-config",
        "-sc",
        metavar="JSON",
        help="vLLM's: method, model, num_speculative_tokens, …; instead of --drafter",
    )
    draft.add_argument(
        "--depth",
        metavar="N",
        help=f"tokens drafted per step at most; auto: as many as pay, up to {CPU_LIMIT} on a CPU and {GPU_LIMIT} on a GPU "
        f"(default {DEFAULT_DEPTH})",
    )
    draft.add_argument("--tree", action="store_true", help="draft a tree instead of a chain")
    draft.add_argument(
        "--tree-width", type=int, metavar="N", help=f"candidates per tree node (default {TreeShape.width}); implies --tree"
    )
    draft.add_argument(
        "--tree-nodes", type=int, metavar="N", help=f"tree nodes verified per step (default {TreeShape.nodes}); implies --tree"
    )
    _switch(
        draft,
        "--adaptive-depth",
        help="draft less deeply, down to not at all, under load that makes drafting slower than plain decoding",
    )
    _switch(
        draft, "--drift-guard", help="draft less deeply for a request whose drafts are accepted clearly less often than usual"
    )
    _number(
        draft,
        "--drift-probe-every",
        help="probe every N-th draft for drift metrics (default 256 with the drift guard, else never)",
    )
    draft.add_argument(
        "--deterministic",
        action="store_true",
        help="on a CPU without a C compiler: exact, slower kernels; refuses --tree. Else no effect: output is exact anyway",
    )

    engine = top.add_argument_group("Engine")
    _number(engine, "--max-num-seqs", help="requests decoded together; 0: 64 on CPU, 256 on GPU")
    _number(engine, "--max-num-batched-tokens", help="max tokens per step; 0: 256 on CPU, 8192 on GPU", type=human_int)
    engine.add_argument("--kv-cache-dtype", default="auto", help="auto; on a CPU also float32, float16 or q8_0")
    _number(engine, "--kv-cache-tokens", help="KV cache size in tokens; 0: from free memory", type=human_int)
    _number(engine, "--block-size", help="tokens per KV page; 0: 16 on CPU, 128 on GPU")
    _switch(engine, "--enable-prefix-caching", help="reuse KV pages of common prompt prefixes")
    engine.add_argument(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of the GPU's memory for weights, KV cache and graphs (default: what is free, less some)",
    )
    _number(engine, "--threads", help="CPU threads; 0: torch's choice, which follows OMP_NUM_THREADS")
    engine.add_argument(
        "--engine-process",
        action=argparse.BooleanOptionalAction,
        help="run the engine in a process of its own; without it, in a thread of the only HTTP process "
        f"(default: with {PROCESS_CORES} or more cores)",
    )

    api = top.add_argument_group("HTTP")
    api.add_argument("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network; give an --api-key then")
    api.add_argument("--port", type=int, default=8000, help="TCP port")
    api.add_argument("--uds", help="a Unix socket instead of host and port")
    api.add_argument("--root-path", default="", help="the path under which a proxy shows the server")
    api.add_argument("--served-model-name", nargs="+", default=(), help="names that requests may use (default: MODEL)")
    api.add_argument(
        "--api-key", nargs="+", default=(), help="required on every route but /health and /ready; also from VLLM_API_KEY"
    )
    api.add_argument("--ssl-keyfile", help="private key, for HTTPS")
    api.add_argument("--ssl-certfile", help="certificate, for HTTPS")
    api.add_argument(
        "--allowed-origins",
        type=_json_list,
        default=(),
        metavar="JSON",
        help="CORS allowed origins (JSON list); none by default",
    )
    api.add_argument("--allow-credentials", action="store_true", help="CORS: allow cookies and keys")
    api.add_argument(
        "--trusted-proxies",
        type=_addresses,
        default=(),
        metavar="ADDRESS,…",
        help="proxies (addresses or networks) whose X-Forwarded-For tells clients apart; none by default",
    )
    _number(
        api, "--api-workers", "--api-server-count", help="HTTP processes; 0: by cores, at most 4; several need --engine-process"
    )
    api.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="seconds for running requests after SIGTERM"
    )

    answers = top.add_argument_group("Answers")
    answers.add_argument("--enable-auto-tool-choice", action="store_true", help="the model decides when to call a tool")
    answers.add_argument("--tool-call-parser", choices=sorted(TOOL_PARSERS), help="how the model writes tool calls")
    answers.add_argument("--reasoning-parser", choices=sorted(REASONING_PARSERS), help="how the model writes thoughts")
    _number(answers, "--max-logprobs", help="most alternatives that a request may ask for", default=20)

    learn = top.add_argument_group("Learning from traffic (docs/learn.md)")
    learn.add_argument("--learn", action="store_true", help="train the drafter on what is served, in the gaps")
    learn.add_argument(
        "--learn-budget", type=float, metavar="PERCENT", help="max share of serving time spent training (default 5)"
    )
    learn.add_argument("--learn-dir", type=Path, help="keep generations of the drafter there; without it nothing is written")
    learn.add_argument("--learn-memory", type=int, metavar="MIB", help="training-sample buffer (default 256; 2048 on a GPU)")
    learn.add_argument("--learn-max-age", type=float, metavar="HOURS", help="after which a sample is dropped (default 24)")
    learn.add_argument(
        "--learn-replay", metavar="DATA", help="prompts that the drafter must not get worse on (default: built in)"
    )

    logs = top.add_argument_group("Logging")
    levels = ("critical", "error", "warning", "info", "debug", "trace")
    logs.add_argument("--uvicorn-log-level", choices=levels, default="info", help="level of the whole log")
    logs.add_argument("--disable-uvicorn-access-log", action="store_true", help="no log line for each request")
    logs.add_argument("--disable-log-stats", action="store_true", help="disable periodic stats logging")
    logs.add_argument("--log-interval", type=float, default=10.0, metavar="SECONDS", help="seconds between stats lines")

    bounds = top.add_argument_group("Limits on requests")
    _number(
        bounds,
        "--max-queue",
        help="max queued answers and grammar compilations; +25 %% reserved for clients with few queued",
        default=256,
    )
    limits.add_flags(bounds, human_int)
    return top


def _number(group: argparse._ArgumentGroup, *names: str, help: str, type: Callable[[str], int] = int, default: int = 0) -> None:
    group.add_argument(*names, type=type, default=default, metavar="N", help=help)


def _switch(group: argparse._ArgumentGroup, name: str, help: str) -> None:
    """Adds a switch that is on unless `--no-NAME` is given."""
    group.add_argument(name, action=argparse.BooleanOptionalAction, default=True, help=help)


def human_int(text: str) -> int:
    """Parses `32k` as 32,000 and `32K` as 32,768, as vLLM does. `auto` and -1 give 0: the engine chooses."""
    if text in ("auto", "-1"):
        return 0
    scale = {"k": 1000, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
    try:
        number = float(text[:-1] if scale != 1 else text) * scale
    except ValueError:
        number = -1.0
    if not (number >= 1 and number.is_integer()):  # is_integer() is False for infinity
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 4096, 4k or 4K")
    return int(number)


def _addresses(text: str) -> tuple[str, ...]:
    """Parses `10.0.0.1,10.1.0.0/16`. Refuses `*` and `0.0.0.0/0`, with which every client could forge its address."""
    addresses = tuple(part.strip() for part in text.split(","))
    for address in addresses:
        try:
            is_everyone = ipaddress.ip_network(address).prefixlen == 0
        except ValueError:
            raise argparse.ArgumentTypeError(f"{address!r} is not an address such as 10.0.0.1 or 10.1.0.0/16") from None
        if is_everyone:
            raise argparse.ArgumentTypeError(f"{address!r} is every address; name the proxy's, such as 10.0.0.1 or 10.1.0.0/16")
    return addresses


def _json_list(text: str) -> tuple[str, ...]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"a JSON list of strings is wanted, not {text!r}")
    return tuple(value)
