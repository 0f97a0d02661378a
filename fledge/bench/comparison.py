"""Compares plain and speculative decoding on the same engine, prompt by prompt, in one run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fledge import sources
from fledge.bench.baselines import run_llamacpp
from fledge.bench.prompts import Prompt
from fledge.llm import LLM, Completion
from fledge.sampling import SamplingParams
from fledge.speculation.stats import AcceptanceStats, macro_acceptance_length


@dataclass(frozen=True)
class Comparison:
    prompt: Prompt
    plain: Completion
    speculative: Completion

    @property
    def identical(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids

    @property
    def speed_up(self) -> float:
        plain = self.plain.tokens_per_second
        return self.speculative.tokens_per_second / plain if plain else 0.0

    def to_dict(self) -> dict[str, object]:
        return {
            "category": self.prompt.category,
            "prompt": self.prompt.text,
            "text": self.plain.text,
            "tokens": len(self.plain.token_ids),
            "plain_tokens_per_second": self.plain.tokens_per_second,
            "speculative_tokens_per_second": self.speculative.tokens_per_second,
            "speed_up": self.speed_up,
            "identical": self.identical,
            **self.speculative.stats.to_dict(),
        }


@dataclass(frozen=True)
class Summary:
    """Figures over all prompts. Tokens and times are summed, so long answers weigh more than short ones."""

    plain_tokens_per_second: float
    speculative_tokens_per_second: float
    acceptance_length: float
    acceptance_length_macro: float
    acceptance_by_position: list[float]
    identical: bool

    @property
    def speed_up(self) -> float:
        return self.speculative_tokens_per_second / self.plain_tokens_per_second if self.plain_tokens_per_second else 0.0

    def to_dict(self) -> dict[str, object]:
        return {**self.__dict__, "speed_up": self.speed_up}


def compare(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams, on_result: Callable[[Comparison], None] | None = None
) -> list[Comparison]:
    """Runs each prompt alone, plain and then speculative, after a warm-up of both."""
    encoded = [llm.chat_prompt([{"role": "user", "content": prompt.text}]) for prompt in prompts]
    for speculate in (False, True):
        llm.generate([encoded[0]], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), speculate=speculate)
    results = []
    for prompt, tokens in zip(prompts, encoded, strict=True):
        plain, speculative = (llm.generate([tokens], params, speculate=speculate)[0] for speculate in (False, True))
        results.append(Comparison(prompt, plain, speculative))
        if on_result is not None:
            on_result(results[-1])
    return results


def summarise(results: Sequence[Comparison]) -> Summary:
    def rate(completions: list[Completion]) -> float:
        seconds = sum(one.seconds - one.first_token_seconds for one in completions)
        return sum(len(one.token_ids) - 1 for one in completions) / seconds if seconds else 0.0

    parts = [result.speculative.stats for result in results]
    total = AcceptanceStats.total(parts)
    return Summary(
        rate([result.plain for result in results]),
        rate([result.speculative for result in results]),
        total.acceptance_length,
        macro_acceptance_length(parts),
        total.unconditional_rates,
        all(result.identical for result in results),
    )


@dataclass(frozen=True)
class LlamaCpp:
    """llama.cpp on the same file and prompts, in the same run."""

    baseline: dict[str, Any]
    summary: Summary

    @property
    def tokens_per_second(self) -> float:
        return self.baseline["runs"][0]["tokens_per_second_per_user"] if self.baseline.get("runs") else 0.0

    def describe(self) -> str:
        """The comparison with llama.cpp as one line of text."""
        rate = self.tokens_per_second
        if not rate:
            return f"llama.cpp: {self.baseline.get('skipped', 'no figures')}"
        plain, drafted = self.summary.plain_tokens_per_second / rate, self.summary.speculative_tokens_per_second / rate
        name = f"llama.cpp (llama-cpp-python {self.baseline['version']})"
        return f"{name}, same file and prompts: {rate:.1f} tok/s; plain {plain:.2f}× that, speculative {drafted:.2f}×"

    def to_dict(self) -> dict[str, Any]:
        kept = {key: value for key, value in self.baseline.items() if key != "runs"}
        return kept | {"tokens_per_second": self.tokens_per_second}


def against_llamacpp(llm: LLM, model: str, results: Sequence[Comparison], max_tokens: int) -> LlamaCpp | None:
    """Runs llama.cpp on the same prompts. None on a GPU, for a model that is not a GGUF file, or without llama-cpp-python."""
    file = sources.find(model)
    if llm.engine.config.device != "cpu" or not file.is_file():
        return None
    prompts = [result.plain.prompt_token_ids for result in results]
    context = max(map(len, prompts)) + max_tokens
    found = run_llamacpp(file, prompts, max_tokens, threads=torch.get_num_threads(), context=context)
    return None if found is None else LlamaCpp(found, summarise(results))
