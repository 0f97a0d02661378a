"""The settings of `fledge serve --learn`. 0 means: chosen by the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.errors import UserError

if TYPE_CHECKING:  # the server's HTTP processes use this class and do not import torch
    import torch


LONGEST_SAMPLE = 4096  # tokens; running requests keep hidden states for at most this many


@dataclass(frozen=True)
class LearnConfig:
    budget: float = 5.0  # percent of the time in which requests run; idle time is used in addition
    memory_mb: int = 0  # for collected samples with their hidden states; 0: 256 on a CPU, 2048 on a GPU
    folder: Path | None = None  # where generations are saved; None: nothing is written to disk
    replay: str | None = None  # data set for the fixed set; None: the built-in prompts
    max_age: float = 24 * 3600.0  # seconds after which a sample is dropped
    learning_rate: float = 0.0  # at the start; 0: 1e-4 for a drafter that was given, 5e-4 for one made at startup
    max_grad_norm: float = 0.5
    ttt_steps: int = 0  # draft steps unrolled in training; 0: 3 on a CPU, 5 on a GPU
    batch_tokens: int = 0  # tokens of a training step; 0: 512 on a CPU, 8192 on a GPU, where launches take most of a step
    micro_batch_tokens: int = 0  # tokens of a micro-batch; 0: 256 on a CPU, all tokens of a step on a GPU
    steps_per_candidate: int = 0  # training steps between two gates; 0: 16 on a CPU, 32 on a GPU
    held_out_texts: int = 0  # recent texts kept for the gate; 0: 32 on a CPU, 96 on a GPU
    min_held_out: int = 8  # the gate waits until there are this many held-out texts
    fixed_texts: int = 0  # of the fixed set, half for replay and half for the gate; 0: 96 on a CPU, 256 on a GPU
    fixed_tokens: int = 0  # longest answer of the fixed set; 0: 48 on a CPU, where they are computed at each start, 96 on a GPU
    fixed_share: float = 0.2  # share of a batch that is replay of the fixed set
    samples_per_second: float = 30.0  # finished requests considered as samples; the others leave nothing behind
    min_gain: float = 0.005  # smallest relative gain in acceptance length on recent traffic that the gate accepts
    standard_errors: float = 2.0  # the gain must also exceed this many of its standard errors
    max_fixed_loss: float = 0.015  # share of acceptance length that may be lost on the fixed set; more if within noise
    keep_generations: int = 8
    seed: int = 0

    @property
    def sample_tokens(self) -> int:
        """Length of the longest sample: of a longer text, the first token and the last ones are kept."""
        return min(self.micro_batch_tokens, LONGEST_SAMPLE)

    def resolve(self, device: torch.device) -> LearnConfig:
        if not 0 < self.budget <= 100:
            raise UserError(f"--learn-budget is a percentage above 0 and up to 100, not {self.budget}")
        is_cpu = device.type == "cpu"
        batch_tokens = self.batch_tokens or (512 if is_cpu else 8192)
        return replace(
            self,
            memory_mb=self.memory_mb or (256 if is_cpu else 2048),
            ttt_steps=self.ttt_steps or (3 if is_cpu else 5),
            batch_tokens=batch_tokens,
            micro_batch_tokens=min(self.micro_batch_tokens or (256 if is_cpu else batch_tokens), batch_tokens),
            steps_per_candidate=self.steps_per_candidate or (16 if is_cpu else 32),
            held_out_texts=self.held_out_texts or (32 if is_cpu else 96),
            fixed_texts=self.fixed_texts or (96 if is_cpu else 256),
            fixed_tokens=self.fixed_tokens or (48 if is_cpu else 96),
        )
