"""Compares quantised targets with bf16, for `gpu.py`."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial

import torch
from gpu_kernels import DEVICE, graph_time

from fledge.kernels.linear.dispatch import linear
from fledge.kernels.quantization import QuantizedLinear, quantize_linears
from fledge.models.decoder import Decoder, causal_attend
from fledge.ops.cuda_ops import weight_of

MODES = {"bf16": "none", "int8": "int8", "int4": "int4", "fp8": "fp8"}  # quantisation by name
CONCURRENCY = (1, 4, 16, 64)
DEPTH = 3
CHECKED_PROMPTS, CHECKED_TOKENS = 16, 128


def quantized(decoder: Decoder, quantization: str) -> Decoder:
    if quantization == "none":
        return decoder
    decoder = deepcopy(decoder)
    quantize_linears(decoder, quantization, DEVICE)
    return decoder


def compare_modes(bench, speed: Callable, shown: Callable) -> dict[str, object]:
    """Speed and agreement of every mode. `bench`, `speed` and `shown`: those of `gpu.py`."""
    found: dict[str, object] = {}
    if unknown := set(bench.args.modes.split(",")) - set(MODES):
        raise SystemExit(f"--modes {', '.join(unknown)}: use {', '.join(MODES)}")
    reference = said(bench)
    for name in bench.args.modes.split(","):
        quantization = MODES[name]
        other = replace(bench, decoder=quantized(bench.decoder, quantization))
        figures: dict[str, object] = {"weight_bytes": read_bytes(other.decoder)}
        counts = [count for count in CONCURRENCY if count <= max(bench.args.concurrency)]
        plain, drafting = other.engine(max(counts)), other.engine(max(counts), speculate=True) if bench.drafter else None
        for count in counts:
            for label, engine, depth in (("plain", plain, 0), (f"depth {DEPTH}", drafting, DEPTH)):
                if engine is not None:
                    figures[f"{count}, {label}"] = shown(f"{name}, {count}, {label}", speed(other, engine, count, depth))
        del plain, drafting
        figures["same_answers"] = shown(name, same_answers(other))
        if quantization != "none":
            figures["agreement"] = shown(name, agreement(other.decoder, bench, reference))
        found[name] = figures
        torch.cuda.empty_cache()
    found["linears, us"] = linear_times(bench.decoder)
    for name, times in found["linears, us"].items():
        shown(name, times)
    return found


def read_bytes(decoder: Decoder) -> int:
    """Bytes that a step of one row reads: all weights except the embedding table, of which it reads one row."""
    modules = [module for module in decoder.modules() if isinstance(module, torch.nn.Linear | QuantizedLinear)]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def said(bench, rows: int = 8, depth: int = 0, prompts: list[list[int]] | None = None) -> list[list[int]]:
    generator = bench.answers(rows, depth=depth)
    prompts = prompts or bench.some_prompts(CHECKED_PROMPTS)
    return [answer.tokens for answer in sorted(generator.generate(prompts, max_tokens=CHECKED_TOKENS, stop_ids=()))]


def same_answers(bench) -> dict[str, str]:
    """How many answers are the same for other batches and with speculation; all of them must be."""
    prompts = bench.some_prompts(CHECKED_PROMPTS)
    wanted = said(bench)
    others = {
        "one at a time": said(bench, rows=1),
        "all at once": said(bench, rows=64),
        "in reverse": said(bench, prompts=prompts[::-1])[::-1],
    }
    if bench.drafter is not None:
        others |= {f"depth {depth}": said(bench, depth=depth) for depth in (1, 3, 5)}
    return {
        name: f"{sum(a == b for a, b in zip(wanted, other, strict=True))} of {len(wanted)}" for name, other in others.items()
    }


@torch.inference_mode()
def agreement(decoder: Decoder, bench, reference: list[list[int]]) -> dict[str, float]:
    """How often the quantised network's most likely token is bf16's, given bf16's text; and after how many tokens its own
    answers differ from bf16's."""
    same = total = along = 0
    for prompt, answer, own in zip(
        bench.some_prompts(CHECKED_PROMPTS), reference, said(replace(bench, decoder=decoder)), strict=True
    ):
        text = torch.tensor(prompt + answer[:-1], device=DEVICE)
        hidden, _ = decoder(text, torch.arange(len(text), device=DEVICE), causal_attend())
        best = decoder.logits(hidden[len(prompt) - 1 :]).argmax(-1).tolist()
        same, total = same + sum(a == b for a, b in zip(best, answer, strict=True)), total + len(answer)
        along += next((place for place, (a, b) in enumerate(zip(answer, own, strict=True)) if a != b), len(answer))
    return {"next_token": same / total, "tokens_until_they_part": along / len(reference)}


def linear_times(decoder: Decoder) -> dict[str, dict[str, float]]:
    """Microseconds of norm and gate_up of all layers, one after the other as in a step."""
    ways = {name: quantized(decoder, quantization) for name, quantization in MODES.items()}
    found = {}
    for rows in (1, 4, 16, 64):
        x = torch.randn(rows, decoder.config.hidden_size, device=DEVICE, dtype=torch.bfloat16)

        def run(network: Decoder, x: torch.Tensor = x) -> None:
            for layer in network.layers:
                linear(x, weight_of(layer.mlp.gate_up_proj), norm=layer.post_attention_layernorm, gated=True)

        found[f"norm+gate_up of all layers, {rows} rows"] = {
            name: graph_time(partial(run, network), 1) for name, network in ways.items()
        }
    return found
