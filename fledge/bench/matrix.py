"""Runs the benchmark: every drafter, depth and draft shape at every concurrency, with plain decoding in the same run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fledge import progress, sources
from fledge.bench.baselines import check_baselines, run_baseline, run_llamacpp
from fledge.bench.datasets import Item
from fledge.bench.kernels import runs_blocks
from fledge.bench.provenance import provenance
from fledge.bench.runs import IsLooping, Run, acceptance, copy_bandwidth, identical, run_items
from fledge.checkpoints.eagle3 import load_drafter
from fledge.checkpoints.gguf import target_config
from fledge.checkpoints.gguf_file import open_gguf
from fledge.checkpoints.gguf_tokenizer import GgufTokenizer
from fledge.engine.build import Speculation, build_engine
from fledge.engine.config import EngineConfig
from fledge.engine.engine import Engine
from fledge.engine.options import FIXED_DEPTH
from fledge.models.decoder import Decoder
from fledge.sampling import SamplingParams
from fledge.speculation.depth import TreeShape
from fledge.tokenizer import Tokenizer

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Case:
    """One speculative configuration to measure."""

    drafter: str
    depth: int | str
    tree: TreeShape | None = None
    adaptive: bool = False  # `depth` is the maximum, as in serving; False: a fixed depth

    @property
    def label(self) -> str:
        """The label of a single case. Among several cases it may need more of its drafter's path: see `labelled`."""
        return next(iter(labelled([self])))

    def label_as(self, name: str) -> str:
        shape = f"tree {self.tree.nodes}" if self.tree else "chain"
        return f"{name}, depth {'up to ' if self.adaptive else ''}{self.depth}, {shape}"


def labelled(cases: Sequence[Case]) -> dict[str, Case]:
    """The cases by unique labels; duplicates are dropped."""
    names = drafter_names([case.drafter for case in cases])
    return {case.label_as(names[case.drafter]): case for case in cases}


def drafter_names(drafters: Sequence[str]) -> dict[str, str]:
    """A unique name for each drafter: the last part of its path, or more parts if needed, because training names all `best`."""
    paths = {drafter: _path_parts(drafter) for drafter in drafters}
    return {drafter: _shortest_name(parts, set(paths.values()) - {parts}) for drafter, parts in paths.items()}


def _path_parts(drafter: str) -> tuple[str, ...]:
    if drafter in ("auto", "ngram", "none"):
        return (drafter,)
    return Path(os.path.abspath(Path(drafter).expanduser())).parts


def _shortest_name(parts: tuple[str, ...], others: set[tuple[str, ...]]) -> str:
    ends = (parts[-count:] for count in range(1, len(parts) + 1))
    own = next((end for end in ends if not any(other[-len(end) :] == end for other in others)), parts)
    return str(Path(*own))


class Bench:
    """A target that is loaded once, from which the engines of all cases are built."""

    def __init__(self, model: str, config: EngineConfig, items: Sequence[Item], max_tokens: int, *, raw: bool = False) -> None:
        self.model, self.raw = model, raw
        found = sources.find(model)
        blocks = runs_blocks(found, config)  # if so, the GGUF file is not converted to a folder
        self.tokenizer = GgufTokenizer(open_gguf(found)) if blocks else Tokenizer(sources.resolve(model))
        # Every engine has its own KV cache, so the context is no longer than the data needs.
        longest = max(self._longest(item, max_tokens) for item in items)
        config = replace(config, max_model_len=config.max_model_len or min(longest, target_config(model).max_positions))
        self.plain = build_engine(model, Speculation("none"), config, tokenizer=self.tokenizer)
        self.decoder: Decoder = self.plain.decoder
        self.config = self.plain.config

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        if self.raw or not self.tokenizer.has_chat_template:
            return self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=True)

    def _longest(self, item: Item, max_tokens: int) -> int:
        """The context length for all turns of a conversation. An answer may take more tokens when it is encoded again."""
        said = [len(self.encode([{"role": "user", "content": text}])) for text in item.turns]
        return sum(said) + len(item.turns) * (max_tokens + max_tokens // 4 + 16)

    def engine(self, case: Case) -> Engine:
        found = Speculation(case.drafter, case.depth, case.tree).resolve_drafter(self.model)
        drafter = load_drafter(found, self.decoder.config) if isinstance(found, Path) else found
        speculation = Speculation(drafter, case.depth, case.tree)
        speculation = speculation if case.adaptive else speculation.fixed_depth()
        return build_engine(self.decoder, speculation, self.config, tokenizer=self.tokenizer)


def run_bench(
    bench: Bench,
    cases: Sequence[Case],
    items: Sequence[Item],
    *,
    concurrencies: Sequence[int],
    params: SamplingParams,
    is_looping: IsLooping,
    repeats: int = 1,
    on_progress: progress.Report = progress.silent,
) -> dict[str, Any]:
    """Runs all cases. Of `repeats` runs the fastest counts, because other work on the machine can only slow a run down."""
    bandwidth = copy_bandwidth(bench.config.device)
    ways = labelled(cases)
    engines = {"": bench.plain} | {label: bench.engine(case) for label, case in ways.items()}
    for label, engine in engines.items():
        on_progress(f"warming up {label or 'plain decoding'}")
        short = replace(params, max_tokens=WARM_UP_TOKENS)
        first = [replace(item, turns=item.turns[:1]) for item in items]
        run_items(engine, first[: max(concurrencies)], bench.encode, short, max(concurrencies), speculate=bool(label))
    results = []
    turns = sum(len(item.turns) for item in items)
    total, done = turns * len(engines) * repeats * len(concurrencies), 0
    for concurrency in concurrencies:
        runs: dict[str, Run] = {}
        for number in range(repeats):
            for label, engine in engines.items():
                what = f"concurrency {concurrency}, round {number + 1}: {label or 'plain decoding'}"

                def count(answered: int, what: str = what, done: int = done) -> None:
                    on_progress(what, done + answered, total)

                count(0)
                run = run_items(engine, items, bench.encode, params, concurrency, speculate=bool(label), on_turn=count)
                done += turns
                if label not in runs or run.seconds < runs[label].seconds:
                    runs[label] = run
        plain = runs.pop("")
        results.append(
            {
                "concurrency": concurrency,
                "plain": _speed(plain, bandwidth),
                "speculative": [
                    {"label": label} | _compared(case, engines[label], runs[label], plain, bandwidth, params, is_looping)
                    for label, case in ways.items()
                ],
            }
        )
    return {
        "model": bench.model,
        "device": bench.config.device,
        "dtype": bench.config.dtype,
        "quantization": bench.config.quantization,
        "weights": bench.config.weights,
        "kv_cache_dtype": bench.config.kv_cache_dtype,
        "copy_bandwidth_bytes_per_second": bandwidth,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "conversations": len(items),
        "turns": sum(len(item.turns) for item in items),
        "repeats": repeats,
        "results": results,
        "definitions": DEFINITIONS,
        "provenance": provenance([item.turns for item in items]),
    }


def baselines(
    bench: Bench,
    cases: Sequence[Case],
    items: Sequence[Item],
    names: Sequence[str],
    concurrencies: Sequence[int],
    params: SamplingParams,
    vllm_python: str = "",
    assistant: str = "",
    on_progress: progress.Report = progress.silent,
) -> list[dict[str, Any]]:
    """Runs other engines on the first turns, greedily, and compares each answer with this engine's plain answer."""
    check_baselines(names, greedy=params.greedy, assistant=assistant)
    first = [replace(item, turns=item.turns[:1]) for item in items]
    prompts = [bench.encode([{"role": "user", "content": item.turns[0]}]) for item in first]
    expected = run_items(bench.plain, first, bench.encode, params, max(concurrencies), speculate=False)
    results = []
    for number, name in enumerate(names):
        on_progress(f"running {name}", number, len(names))
        if name == "llama_cpp":
            result = _llamacpp(bench, prompts, params.max_tokens)
        else:
            result = run_baseline(
                name,
                prompts,
                model=sources.resolve(bench.model),
                drafter=_eagle_drafters(bench.model, cases),
                depths=sorted({case.depth for case in cases if isinstance(case.depth, int)}) or [FIXED_DEPTH],
                concurrencies=concurrencies,
                max_tokens=params.max_tokens,
                device=bench.config.device,
                dtype=bench.config.dtype,
                python=vllm_python if name == "vllm" else "",
                assistant=assistant,
            )
        for run in result.get("runs", ()):
            same = sum(a == b.tokens for a, b in zip(run.pop("answers"), expected.turns, strict=True))
            run["identical"] = {"same": same, "of": len(expected.turns)}
        results.append(result)
    return results


def _llamacpp(bench: Bench, prompts: Sequence[Sequence[int]], max_tokens: int) -> dict[str, Any]:
    file = sources.find(bench.model)
    if bench.config.device != "cpu" or not file.is_file():
        return {"baseline": "llama_cpp", "skipped": "it runs only on a CPU, with a GGUF file"}
    context = max(map(len, prompts)) + max_tokens
    found = run_llamacpp(file, prompts, max_tokens, threads=torch.get_num_threads(), context=context)
    return found or {"baseline": "llama_cpp", "skipped": "llama-cpp-python is not installed"}


def _eagle_drafters(model: str, cases: Sequence[Case]) -> dict[str, Path]:
    """The cases' EAGLE drafters by name; each once, even if `auto` resolves to one that is also named."""
    folders: dict[Path, str] = {}
    for drafter, name in drafter_names([case.drafter for case in cases]).items():
        found = Speculation(drafter).resolve_drafter(model)
        if isinstance(found, Path):
            folders.setdefault(found.resolve(), name)
    return {name: folder for folder, name in folders.items()}


DEFINITIONS = {
    "tokens_per_second_per_user": "tokens after the first of each answer / seconds after its first token, over all answers; "
    "if several tokens come first (transformers' assisted generation), the tokens after those",
    "tokens_per_second": "all tokens / wall-clock seconds of the run, prompts included",
    "speed_up": "tokens_per_second_per_user against plain decoding at the same concurrency, in the same run",
    "acceptance_length_micro": "1 + accepted / steps over all answers (vLLM's)",
    "acceptance_length_macro": "the same for each answer, then averaged (SPEED-Bench's)",
    "tokens_per_pass": "tokens after the first / target passes after the prompt's; equals micro where every pass drafts",
    "overhead": "o = tokens_per_pass / speed_up - 1: what drafting and wider verification cost",
    "bandwidth_use": "bytes of weights and KV cache that each step must read / time, relative to a measured copy",
}


def _speed(run: Run, bandwidth: float) -> dict[str, Any]:
    return {
        "tokens_per_second_per_user": run.tokens_per_second_per_user,
        "tokens_per_second": run.tokens_per_second,
        "first_token_seconds": run.first_token_seconds,
        "tokens": run.tokens,
        "seconds": run.seconds,
        "engine_steps": run.engine_steps,
        "bandwidth_use": run.bytes_per_second / bandwidth,
    }


def _compared(
    case: Case, engine: Engine, run: Run, plain: Run, bandwidth: float, params: SamplingParams, is_looping: IsLooping
) -> dict[str, Any]:
    base = plain.tokens_per_second_per_user
    speed_up = run.tokens_per_second_per_user / base if base else 0.0
    accepted = acceptance(run.turns, is_looping)
    return {
        "drafter": engine.drafter.description if engine.drafter is not None else "none",
        "depth": case.depth,
        "adaptive": case.adaptive,
        "tree": None if case.tree is None else {"width": case.tree.width, "nodes": case.tree.nodes},
        **_speed(run, bandwidth),
        "speed_up": speed_up,
        "speed_up_total": run.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else 0.0,
        "acceptance": accepted,
        "tokens_per_pass": run.tokens_per_pass,
        "overhead": run.tokens_per_pass / speed_up - 1 if speed_up else None,
        # Sampled answers differ by chance, so they are not compared.
        "identical": identical(plain, run) if params.greedy else None,
    }
