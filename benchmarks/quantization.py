"""Measures 8-bit and 4-bit targets: tokens/s plain and speculative for one user, bytes, time floor, agreement.

    python benchmarks/quantization.py [--json FILE] [--prompts FILE] [--device cuda] [--tokens 128] [--rounds 3]

All runs are in one process and alternate, so that other load on the machine affects all of them; the median of the rounds
counts. Agreement with the unquantised target, greedy: the fraction of an answer before the first differing token, and the
fraction of positions of the unquantised answer at which the quantised target, given that answer so far, chooses the same token.

A model from a GGUF file is already quantised: int4 may then restore the file's own weights, and agreement compares with those
and not with the weights that the file was made from.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from typing import Any

import torch

from fledge.bench.datasets import Item, load_items
from fledge.bench.matrix import Bench, Case
from fledge.bench.provenance import provenance, write_json
from fledge.bench.runs import Run, copy_bandwidth, network_bytes, run_items
from fledge.engine.config import EngineConfig
from fledge.models.decoder import Decoder, causal_attend
from fledge.sampling import SamplingParams

Runs = dict[tuple[str, str], list[Run]]  # (quantisation, plain or speculative) -> runs


def main() -> None:
    options = arguments()
    items = [replace(item, turns=item.turns[:1]) for item in load_items(options.prompts, limit=options.limit)]
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True)
    case = Case(options.drafter, options.depth)
    engines = {}
    for quantization in options.quantizations.split(","):
        dtype = (
            "auto" if quantization == "gguf" else options.dtype
        )  # with an explicit dtype, a GGUF file's blocks would be unpacked
        config = EngineConfig(options.device, dtype, quantization, max_num_seqs=1, prefix_caching=False)
        bench = Bench(options.model, config, items, options.tokens)
        engines[quantization] = (bench, {"plain": bench.plain, "speculative": bench.engine(case)})
    runs = alternating(engines, items, params, options.rounds)
    device = next(iter(engines.values()))[0].config.device
    bandwidth = max(copy_bandwidth(device) for _ in range(3))
    results = {name: figures(name, engines, runs, items, bandwidth) for name in engines}
    print(f"{options.model} on {device}, {bench.config.dtype}, one user, {len(items)} answers of {options.tokens} tokens")
    for name, result in results.items():
        print(line(name, result))
    if options.json:
        settings = {"model": options.model, "device": device, "dtype": bench.config.dtype, "tokens": options.tokens}
        settings |= {"drafter": case.label, "copy_bandwidth_bytes_per_second": bandwidth, "rounds": options.rounds}
        write_json(options.json, settings | {"results": results, "provenance": provenance([item.turns for item in items])})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--depth", default=5)
    parser.add_argument("--quantizations", default="none,int8,int4", help="the first is the reference")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--prompts", default="builtin", help="a data set, as for `fledge bench --data`")
    parser.add_argument("--limit", type=int, default=1, help="conversations per category; 0: all")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    return parser.parse_args()


def alternating(engines: dict, items: list[Item], params: SamplingParams, rounds: int) -> Runs:
    runs: Runs = {}
    for number in range(rounds + 1):
        for name, (bench, ways) in engines.items():
            for way, engine in ways.items():
                run = run_items(engine, items, bench.encode, params, 1, speculate=way == "speculative")
                if number:  # the first one warms up
                    runs.setdefault((name, way), []).append(run)
    return runs


def figures(name: str, engines: dict, runs: Runs, items: list[Item], bandwidth: float) -> dict[str, Any]:
    bench, first = engines[name][0], next(iter(engines))
    ours, theirs = ([turn.tokens for turn in runs[which, "plain"][0].turns] for which in (name, first))
    read = network_bytes(bench.decoder)
    prompts = [bench.encode([{"role": "user", "content": item.turns[0]}]) for item in items]
    choices = [same_choices(bench.decoder, prompt, answer) for prompt, answer in zip(prompts, theirs, strict=True)]
    rates = {way: [run.tokens_per_second_per_user for run in runs[name, way]] for way in ("plain", "speculative")}
    speculative = runs[name, "speculative"][0]
    return {
        "weight_bytes": read,
        "floor_milliseconds": 1e3 * read / bandwidth,
        "tokens_per_second": {way: statistics.median(values) for way, values in rates.items()},
        "rounds": rates,
        "tokens_per_pass": speculative.tokens_per_pass,
        "speculative_equals_plain": [turn.tokens for turn in speculative.turns] == ours,
        "same_before_first_difference": statistics.mean(map(common_share, ours, theirs)),
        "same_choice_given_the_same_text": statistics.mean(choices),
    }


def common_share(ours: list[int], theirs: list[int]) -> float:
    differing = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    return next(differing, min(len(ours), len(theirs))) / len(theirs)


@torch.inference_mode()
def same_choices(decoder: Decoder, prompt: list[int], answer: list[int]) -> float:
    tokens = torch.tensor([*prompt, *answer[:-1]], device=decoder.norm.weight.device)
    hidden = decoder(tokens, torch.arange(len(tokens), device=tokens.device), causal_attend()).hidden_ND
    chosen = decoder.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist()
    return sum(a == b for a, b in zip(chosen, answer, strict=True)) / len(answer)


def line(name: str, result: dict[str, Any]) -> str:
    plain, speculative = (result["tokens_per_second"][way] for way in ("plain", "speculative"))
    return (
        f"{name:5s} {result['weight_bytes'] / 1e6:6.0f} MB  floor {result['floor_milliseconds']:6.3f} ms  "
        f"plain {plain:7.1f} tok/s ({1e3 / plain:6.3f} ms)  speculative {speculative:7.1f} tok/s ({speculative / plain:.2f}×, "
        f"{'the same' if result['speculative_equals_plain'] else 'NOT the same'} answers)  "
        f"agreement {result['same_before_first_difference']:.0%} before a difference, "
        f"{result['same_choice_given_the_same_text']:.1%} of choices"
    )


if __name__ == "__main__":
    main()
