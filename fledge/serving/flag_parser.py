"""The flags of `fledge serve` for argparse: names, types, defaults and help."""

from __future__ import annotations

import argparse
import ipaddress
import json
from pathlib import Path
from typing import NoReturn

from fledge.engine.options import DEFAULT_DEPTH
from fledge.errors import UsageError
from fledge.serving import limits

DEFAULT_MODEL = "smollm2-135m"
# From so many cores on the engine has a process of its own.
PROCESS_CORES = 4


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
    engine.add_argument("--quantization", "-q", default="none", help="fp8 (GPU), int8, int4, or gguf (as a GGUF file has them)")
    engine.add_argument("--kv-cache-dtype", default="auto", help="auto, float32, float16 or q8_0 (CPU)")
    engine.add_argument("--max-model-len", type=human_int, default=0, help="tokens of prompt and answer; 0: the model's")
    engine.add_argument("--max-num-seqs", type=int, default=0, help="answers decoded together; 0: by device")
    engine.add_argument("--max-num-batched-tokens", type=human_int, default=0, help="tokens of a step; 0: by device")
    engine.add_argument("--block-size", type=int, default=0, help="tokens of a KV page; 0: 16 on CPU, 128 on GPU")
    engine.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True, help="prompts share pages"
    )
    engine.add_argument("--gpu-memory-utilization", type=float, help="share of the GPU's memory for weights and cache")
    engine.add_argument("--seed", type=int, help="for requests that give none")

    own = top.add_argument_group("Fledge's own")
    own.add_argument("--drafter", help="auto, none, ngram, a name, a folder or a hub id; instead of --speculative-config")
    own.add_argument("--depth", help=f"tokens drafted a step at most, or auto: as many as pay (default {DEFAULT_DEPTH})")
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
    own.add_argument(
        "--trusted-proxies",
        type=_addresses,
        default=(),
        metavar="ADDRESS,…",
        help="proxies (addresses or networks) whose X-Forwarded-For tells callers apart; none by default",
    )
    own.add_argument(
        "--max-queue",
        type=int,
        default=256,
        help="answers, and grammars, that may wait; a further quarter is kept for callers who have little in it",
    )
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


def _addresses(text: str) -> tuple[str, ...]:
    """`10.0.0.1,10.1.0.0/16`. Not `*` or `0.0.0.0/0`: then every caller could say who it is."""
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
