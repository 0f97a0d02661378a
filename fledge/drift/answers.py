"""The target's answers, each made once and shared by all drafters."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from fledge.drift.suites import TokenIds
from fledge.engine.config import EngineConfig
from fledge.engine.offline import answer_generator
from fledge.models.decoder import Decoder
from fledge.progress import Report

SEED = 1234  # of sampled answers


class Answers:
    def __init__(self, decoder: Decoder, config: EngineConfig, max_tokens: int, on_progress: Report) -> None:
        self.decoder, self.config, self.max_tokens, self.progress = decoder, config, max_tokens, on_progress
        self.known: dict[tuple[TokenIds, float], list[int]] = {}
        self._generator = None

    def __call__(self, prompts: Sequence[TokenIds], temperature: float = 0.0) -> list[list[int]]:
        new = [prompt for prompt in dict.fromkeys(prompts) if (prompt, temperature) not in self.known]
        if new:
            self._generator = self._generator or answer_generator(
                self.decoder,
                device=self.config.device,
                dtype=self.config.dtype,
                concurrency=self.config.max_num_seqs,
                max_model_len=self.config.max_model_len,
            )
            done = self._generator.generate(new, max_tokens=self.max_tokens, temperature=temperature, seed=SEED)
            for count, answer in enumerate(done, 1):
                self.known[new[answer.index], temperature] = list(answer.tokens)
                self.progress("the target answers", count, len(new))
        return [self.known[prompt, temperature] for prompt in prompts]

    def release(self) -> None:
        """Gives the generator's cache back; answers stay."""
        self._generator = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
