"""Compares types of the KV cache on a CPU: decoding speed after a long prompt, bytes per token, and changes of the output.

    python benchmarks/kv_cache.py [MODEL] [--lengths 1000 4000] [--rounds 3] [--json FILE]
    python benchmarks/kv_cache.py [MODEL] --quality [--json FILE]

Speed: engines of all types in one process, alternating; medians. `--quality`: with the project's own documents, 512 tokens per
pass, compared with float32: how often the most likely next token is the same, and the mean KL divergence.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from fledge import LLM, SamplingParams
from fledge.bench.provenance import provenance, write_json
from fledge.engine.config import CPU_CACHE_DTYPES
from fledge.engine.memory import memory_plan
from fledge.kernels.attention.metadata import AttentionMetadata
from fledge.kernels.attention.paged import PagedKV, SequenceLayout
from fledge.kernels.formats.kv_cache import KV_DTYPES
from fledge.models.decoder import Decoder
from fledge.ops.cpu_ops import eager_ops

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("docs/serving.md", "docs/architecture.md", "docs/drift-lab.md", "docs/training-notes.md")
TOKENS, CHUNK, PAGE = 33, 512, 16


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def speed(model: str, drafter: str, ids: list[int], length: int, rounds: int) -> dict[str, Any]:
    """Decoding speed of every type. The prompt is prefilled in the first round and taken from the prefix cache afterwards."""
    options = {"max_model_len": length + TOKENS + 32, "max_num_seqs": 1}
    llms = {name: LLM(model, drafter, kv_cache_dtype=name, **options) for name in CPU_CACHE_DTYPES}
    prompt, params = ids[:length], SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in llms}
    prefill: dict[str, float] = {}
    answers = {}
    for number in range(rounds + 1):
        for name, llm in llms.items():
            done = llm.generate([prompt], params)[0]
            answers[name] = done.token_ids
            if number:
                rates[name].append(done.tokens_per_second)
            else:
                prefill[name] = length / done.first_token_seconds
    found = {}
    for name, llm in llms.items():
        found[name] = {
            "tokens_per_second": statistics.median(rates[name]),
            "rounds": rates[name],
            "prefill_tokens_per_second": prefill[name],
            "cache_bytes_per_token": memory_plan(llm.engine).cache_per_token,
            "same_text_as_float32": answers[name] == answers["float32"],
        }
        one = found[name]
        print(
            f"{length:5d} tokens  {name:8s} {one['tokens_per_second']:6.1f} tokens/s, prefill {prefill[name]:6.0f}, "
            f"{one['cache_bytes_per_token'] / 1024:.1f} KiB per token, same text as float32: {one['same_text_as_float32']}",
            flush=True,
        )
    return found


class Scorer:
    """Computes log-probabilities for a text, chunk by chunk, with a KV cache of one type."""

    def __init__(self, decoder: Decoder, name: str, num_tokens: int) -> None:
        config = decoder.config
        self.decoder, self.pages = decoder, list(range(-(-num_tokens // PAGE)))
        sizes = (config.num_layers, config.num_kv_heads, config.head_dim, len(self.pages), PAGE)
        self.ops = eager_ops(decoder, PagedKV(*sizes, KV_DTYPES[name], "cpu"))

    def logprobs(self, ids: list[int], start: int) -> torch.Tensor:
        end = min(start + CHUNK, len(ids))
        tensors = torch.tensor([ids[start:end], list(range(start, end))])
        meta = AttentionMetadata.from_layouts([SequenceLayout(self.pages, end - start, end)], tensors[1], PAGE, end - 1)
        x, _ = self.decoder.run(self.decoder.embed(tensors[0]), meta, self.ops, ())
        return self.ops.linear(self.decoder.lm_head, self.ops.norm(self.decoder.norm, x)).log_softmax(-1)


def quality(decoder: Decoder, ids: list[int]) -> dict[str, Any]:
    scorers = {name: Scorer(decoder, name, len(ids)) for name in CPU_CACHE_DTYPES}
    same, divergence = dict.fromkeys(scorers, 0), dict.fromkeys(scorers, 0.0)
    with torch.inference_mode():
        for start in range(0, len(ids), CHUNK):
            say(f"tokens {start} to {min(start + CHUNK, len(ids))} of {len(ids)}")
            expected = scorers["float32"].logprobs(ids, start)
            for name in list(scorers)[1:]:
                found = scorers[name].logprobs(ids, start)
                same[name] += int((found.argmax(-1) == expected.argmax(-1)).sum())
                divergence[name] += float((expected.exp() * (expected - found)).sum(-1).double().sum())
    result = {}
    for name in list(scorers)[1:]:
        one = {"same_choice": same[name] / len(ids), "kl_divergence": divergence[name] / len(ids), "tokens": len(ids)}
        print(f"{name:8s} same choice {one['same_choice']:.2%}, KL {one['kl_divergence']:.2e} over {len(ids)} tokens")
        result[name] = one
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quality", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    text = "\n\n".join((ROOT / name).read_text() for name in TEXTS)
    longest = max(options.lengths)
    llm = LLM(options.model, "none", max_model_len=longest, max_num_seqs=1)
    ids = llm.tokenizer.encode(text)
    ids = (ids * (longest // len(ids) + 1))[:longest]
    content: dict[str, Any] = {"model": Path(options.model).name, "drafter": options.drafter}
    if options.quality:
        content["quality"] = quality(llm.engine.decoder, ids)
    else:
        del llm
        content["speed"] = {
            str(length): speed(options.model, options.drafter, ids, length, options.rounds) for length in options.lengths
        }
    if options.json:
        write_json(options.json, content | {"provenance": provenance([text])})


if __name__ == "__main__":
    main()
