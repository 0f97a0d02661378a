"""Flags of other engines that Fledge does not have: other spellings, and flags that do not apply, with what to do instead.
`python -m benchmarks.figures` writes `SGLANG` and `LLAMA_CPP` into docs/moving.md."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from fledge.errors import UsageError, UserError
from fledge.serving.speculative_config import EAGER


class Allowed(NamedTuple):
    """A flag that is accepted with values that match what Fledge does anyway. No values: a switch."""

    values: tuple[str, ...]
    reason: str = ""  # why other values are refused
    note: str = ""  # why it has no effect, for the log; "": not logged, because Fledge does what it asks for


_ONE_DEVICE = "one server process drives one device; use --engine vllm, or several servers behind a balancer"
_PARALLEL = Allowed(("1",), _ONE_DEVICE)

MAY_BE = {
    "--tensor-parallel-size": _PARALLEL,
    "-tp": _PARALLEL,
    "--pipeline-parallel-size": _PARALLEL,
    "-pp": _PARALLEL,
    "--data-parallel-size": _PARALLEL,
    "-dp": _PARALLEL,
    "--load-format": Allowed(("auto", "safetensors", "gguf"), "weights are read from safetensors or GGUF files"),
    "--tokenizer-mode": Allowed(("auto", "hf"), "the model's fast tokenizer is used"),
    "--runner": Allowed(("auto", "generate"), "only text generation is served; use --engine vllm for embeddings"),
    "--task": Allowed(("auto", "generate"), "only text generation is served; use --engine vllm for embeddings"),
    "--chat-template-content-format": Allowed(("auto", "string"), "messages reach the template as plain text"),
    "--response-role": Allowed(("assistant",), "answers have the role assistant"),
    "--scheduling-policy": Allowed(("fcfs",), "clients are scheduled round-robin, each one's requests in order of arrival"),
    "--guided-decoding-backend": Allowed(("auto", "xgrammar"), "structured output runs on xgrammar"),
    "--swap-space": Allowed(("0",), "a preempted request is computed again instead of swapped; leave it out"),
    "--cpu-offload-gb": Allowed(("0",), "weights stay on the device; use --engine vllm"),
    "--logprobs-mode": Allowed(("raw_logprobs",), "log-probabilities are the model's own, before penalties and masks"),
    "--enable-chunked-prefill": Allowed(()),
    "--enable-prompt-tokens-details": Allowed(()),
    "--disable-fastapi-docs": Allowed(()),
    "--disable-log-requests": Allowed(()),
    "--no-enable-log-requests": Allowed(()),
    "--no-async-scheduling": Allowed((), note="a GPU always launches the next step before it reads the last one's output"),
    "--enforce-eager": Allowed((), note=EAGER),
}
# vLLM's name of a switch -> Fledge's.
SAME = {"--disable-frontend-multiprocessing": "--no-engine-process"}

_MULTIMODAL = "only text is served; use --engine vllm for images, audio and video"
_LORA = "adapters are not applied while serving; merge them into the model's weights, or use --engine vllm"
_MACHINES = "one machine and one device; use --engine vllm for more"
_TUNING = "it tunes vLLM's own engine; leave it out, or use --engine vllm"

REFUSED = {
    "--tokenizer": "the tokenizer is read from the model's folder; put its files there",
    "--revision": "fetch the revision you want and give its folder",
    "--tokenizer-revision": "fetch the revision you want and give its folder",
    "--code-revision": "no code of a model's repository is run",
    "--trust-remote-code": "no code of a model's repository is run; use --engine vllm for models that need it",
    "--hf-config-path": "the configuration is read from the model's folder",
    "--hf-overrides": "edit config.json in the model's folder instead",
    "--hf-token": "run `hf auth login` instead",
    "--download-dir": "set FLEDGE_CACHE (built-in models) or HF_HOME (the hub) instead",
    "--config": "give the flags on the command line",
    "--skip-tokenizer-init": "the server needs the tokenizer; use /v1/completions with token ids to bypass it in requests",
    "--no-enable-chunked-prefill": "long prompts are always prefilled in chunks (1,024 tokens on a GPU)",
    "--enable-log-requests": "what users write is not logged; put a logging proxy in front",
    "--max-log-len": "what users write is not logged",
    "--middleware": "put a proxy in front instead",
    "--lora-modules": _LORA,
    "--enable-lora": _LORA,
    "--max-loras": _LORA,
    "--max-lora-rank": _LORA,
    "--limit-mm-per-prompt": _MULTIMODAL,
    "--mm-processor-kwargs": _MULTIMODAL,
    "--allowed-local-media-path": _MULTIMODAL,
    "--enable-expert-parallel": _MACHINES,
    "--distributed-executor-backend": _MACHINES,
    "--data-parallel-rank": _MACHINES,
    "--data-parallel-address": _MACHINES,
    "--headless": _MACHINES,
    "--nnodes": _MACHINES,
    "--node-rank": _MACHINES,
    "--master-addr": _MACHINES,
    "--kv-transfer-config": _MACHINES,
    "--compilation-config": _TUNING,
    "-O": _TUNING,
    "--attention-backend": _TUNING,
    "--async-scheduling": _TUNING,
    "--num-gpu-blocks-override": "use --kv-cache-tokens",
    "--kv-cache-memory-bytes": "use --kv-cache-tokens",
    "--max-cudagraph-capture-size": _TUNING,
    "--additional-config": _TUNING,
    "--otlp-traces-endpoint": "traces are not exported; /metrics has the latencies",
    "--allowed-methods": "all methods of the API are allowed; set --allowed-origins",
    "--allowed-headers": "all headers of the API are allowed; set --allowed-origins",
    "--ssl-ca-certs": "certificates of clients are not checked; use --api-key, or a proxy",
    "--ssl-cert-reqs": "certificates of clients are not checked; use --api-key, or a proxy",
    "--return-tokens-as-token-ids": "log-probabilities name tokens by their text; /tokenize gives the ids",
    "--tool-parser-plugin": "--tool-call-parser takes the built-in ones that --help lists; use --engine vllm for others",
    "--enable-request-id-headers": "answers carry their id in the body",
    "--structured-outputs-config": "structured output runs on xgrammar; leave it out",
    "--pooler-config": "only text generation is served; use --engine vllm for embeddings",
    "--num-speculative-tokens": "use --speculative-config '{\"num_speculative_tokens\": …}' or --depth",
    "--speculative-model": "use --speculative-config '{\"model\": …}' or --drafter",
    "--enable-reasoning": "--reasoning-parser alone is enough",
}

_CHAIN = "--tree, whose shape --tree-width and --tree-nodes give; 1 is a chain, the default"
_ONE_GPU = "one server drives one GPU; use --engine vllm, or several servers behind a balancer"
# Main flags of other engines' servers -> what to give here.
SGLANG = {
    "--model-path": "--model",
    "--context-length": "--max-model-len",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--max-running-requests": "--max-num-seqs",
    "--max-total-tokens": "--kv-cache-tokens",
    "--chunked-prefill-size": "--max-num-batched-tokens",
    "--page-size": "--block-size",
    "--disable-radix-cache": "--no-enable-prefix-caching",
    "--speculative-algorithm": "--drafter, or --speculative-config",
    "--speculative-draft-model-path": "--drafter",
    "--speculative-num-steps": "--depth",
    "--speculative-eagle-topk": _CHAIN,
    "--speculative-num-draft-tokens": "--tree-nodes, or for a chain --depth",
    "--random-seed": "--seed",
    "--log-level": "--uvicorn-log-level",
    "--grammar-backend": "leave it out: structured output runs on xgrammar",
    "--enable-metrics": "leave it out: /metrics is always there",
    "--disable-cuda-graph": f"leave it out: {EAGER}",
    "--tp": _ONE_GPU,
    "--tp-size": _ONE_GPU,
    "--dp-size": _ONE_GPU,
}
LLAMA_CPP = {
    "-m": "--model",
    "-hf": "the hub id as MODEL; fetch a GGUF file yourself and give its path",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-t": "--threads",
    "-tb": "--threads",
    "--threads-batch": "--threads",
    "-np": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-b": "--max-num-batched-tokens",
    "--batch-size": "--max-num-batched-tokens",
    "-ub": "--max-num-batched-tokens",
    "--ubatch-size": "--max-num-batched-tokens",
    "-ngl": "--device cuda: all layers are on one device",
    "--n-gpu-layers": "--device cuda: all layers are on one device",
    "-ctk": "--kv-cache-dtype",
    "--cache-type-k": "--kv-cache-dtype",
    "-ctv": "--kv-cache-dtype",
    "--cache-type-v": "--kv-cache-dtype",
    "-md": "--drafter, which takes EAGLE drafters; draft models are not run",
    "--model-draft": "--drafter, which takes EAGLE drafters; draft models are not run",
    "--draft-max": "--depth",
    "--draft": "--depth",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-s": "--seed",
    "-n": "max_tokens in the request",
    "--temp": "temperature in the request, or --override-generation-config",
    "--jinja": "leave it out: the model's template is always used",
    "--metrics": "leave it out: /metrics is always there",
    "-fa": "leave it out: there is nothing to choose",
    "--flash-attn": "leave it out: there is nothing to choose",
    "-cb": "leave it out: batching is always continuous",
    "--cont-batching": "leave it out: batching is always continuous",
    "--reasoning-format": "--reasoning-parser",
    "--timeout": "--request-timeout",
    "--lora": _LORA,
    "--mmproj": _MULTIMODAL,
}


def normalise(arguments: Sequence[str]) -> list[str]:
    """Converts vLLM's spellings: underscores in flags, and `--speculative-config.method ngram` for a key of a JSON flag."""
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
    for flag, keys in nested.items():
        result += [flag, json.dumps(keys)]
    return result


def refuse_foreign(arguments: list[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Removes flags that need no action, and refuses those that are not supported. `known`: Fledge's own flags.

    Returns the other arguments, and a log line for each flag that has no effect.
    """
    result: list[str] = []
    notes: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in SAME:
            result.append(SAME[name])
            continue
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
        if allowed.note:
            notes.append(f"{name} has no effect: {allowed.note}")
    return result, notes


def _refusal(name: str, known: Collection[str]) -> str:
    if name in REFUSED:
        return f"{name} does not apply here: {REFUSED[name]}"
    for engine, table in (("SGLang", SGLANG), ("llama.cpp", LLAMA_CPP)):
        if name in table:
            return f"{name} is a flag of {engine}; here: {table[name]}"
    near = difflib.get_close_matches(name, known, n=1)
    suggestion = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is not a flag of fledge serve{suggestion} (see `fledge serve --help`; --engine vllm takes all of vLLM's)"


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _is_number(text: str) -> bool:
    return text[1:].replace(".", "", 1).isdigit()
