"""The plan of `fledge make`: data, batch, memory, time and expected acceptance for one target, before anything runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fledge.config import ModelConfig, default_aux_layers
from fledge.devices import product_rate
from fledge.engine.config import EngineConfig
from fledge.engine.memory import gib, memory_left, weight_bytes
from fledge.errors import UserError
from fledge.tokenizer import Tokenizer
from fledge.training.datagen.prompts import Prompt, read_prompts
from fledge.training.planning import Plan

# Share of the time for loading and answers. In the rest, training goes through the answers about four times, at the speeds
# measured on an H200 for a 135M target (133,000 answer tokens/s including loading; 518,000 tokens/s in training).
ANSWER_SHARE = 0.35
# Time for the checks at the end (loading, robustness, doctor): a share, but at most the seconds they take in any run.
CHECK_SHARE, CHECK_SECONDS = 0.15, 120.0
MIN_TRAIN_SHARE = 0.25  # share of the time that training gets even if answers took too long
SAMPLED = 0.8  # temperature of the answers that are not greedy
# Share of the device's measured product rate in training and prefill, and of the prefill rate in decoding. On an H200 training
# reached 0.53 (135M) and 0.8 (1.5B), regenerating 0.1 of the prefill rate (135M: 152,000 tokens/s after loading).
UTILISATION, DECODE_SHARE = {"cuda": 0.6, "cpu": 0.3}, {"cuda": 0.1, "cpu": 0.25}
STEP_TOKENS = {"cuda": 32_768, "cpu": 1024}  # tokens of an optimizer step if there is enough data and time
WANTED_STEPS, MIN_STEP_TOKENS = 2500, 8192  # on a GPU with less time, steps get smaller, which hardly lowers the tokens/s
MIN_STEPS = 300  # with less data, steps get smaller until there are at least this many
MAX_EPOCHS = 20.0
# Evaluations of a run, and how many in a row without improvement end it; early on, a few of them mean little.
EVALUATIONS, PATIENCE = 18, 6
MEMORY_SHARE = 0.9  # of the free memory; the rest is for fragmentation, libraries and what the estimate does not count
SEQUENCE_LENGTH, LONGEST_SEQUENCE = 2048, 16_384  # default, and the maximum if a file's prompts are longer
SIZED_PROMPTS = 512  # prompts of a file whose tokens are counted
# (tokens seen, acceptance length at depth 5) of SmolLM2-135M on held-out prompts: docs/training-notes.md.
EXPERIENCE = ((6.6e6, 1.9), (13e6, 2.2), (39e6, 2.9), (180e6, 3.2), (340e6, 3.5))

Thinking = Literal["none", "optional", "always"]


@dataclass(frozen=True)
class AnswerPart:
    """Answers of one kind, in their own file. The next part starts when the prompts or the time of this one are used up."""

    file: str
    self_written: bool  # whether the target writes the prompts
    temperature: float
    seed: int
    until: float = 1.0  # share of the answering time at which this part ends


class Batch(NamedTuple):
    rows: int  # per step, over all processes
    micro_batch_size: int
    recompute: bool
    peak_bytes: int  # on each device


@dataclass(frozen=True)
class MakePlan:
    """The plan for training a drafter for one target in a given time."""

    model: str
    device: str
    hours: float
    prompts: str | None  # a file; None: the target writes them itself
    endpoint: str | None
    endpoint_states: str | None
    work: Plan  # bytes and FLOPs of one process
    parameters: float  # active parameters of the target per token
    aux_layers: tuple[int, ...]
    sequence_length: int
    max_answer_tokens: int
    draft_vocab_size: int | None
    window: int | None
    learning_rate: float
    thinking: Thinking
    augments: bool  # whether to use other templates and system prompts; the tokenizer must be able to encode them
    num_processes: int  # of the training
    num_answering: int  # processes that write answers
    num_arms: int  # drafters in training
    free_bytes: int  # free memory of each device
    weight_bytes: int  # of the target; with an endpoint, only of its embedding and head

    @classmethod
    def of(
        cls,
        model: str,
        shape: Any,
        tokenizer: Tokenizer,
        device: torch.device,
        hours: float,
        prompts: Path | None = None,
        endpoint: str | None = None,
        endpoint_states: str | None = None,
        *,
        num_processes: int = 1,
        num_answering: int = 1,
        twin: bool = False,
        free_bytes: int | None = None,
    ) -> MakePlan:
        """Makes the plan. Raises a UserError if the target does not fit into memory, before anything is answered.

        `shape`: the target's sizes (see `targets.loading.target_shape`). `free_bytes`: of each device; None: measured.
        """
        if not tokenizer.has_chat_template:
            raise UserError(f"{model}: its tokenizer has no chat template, so it cannot answer chat prompts")
        thinking = thinking_mode(tokenizer)
        # 320 as for the shipped drafter: more prompts in the same time, and fewer loops. Thinking needs more.
        max_answer_tokens = 320 if thinking == "none" else 512
        length = _sequence_length(read_prompts(prompts) if prompts else (), tokenizer, max_answer_tokens, shape.max_positions)
        vocabulary = 32_000 if shape.vocab_size > 100_000 else 16_384
        parameters = _parameters(shape)
        work = Plan(
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            vocab_size=shape.vocab_size,
            active_parameters=parameters,
            attention_width=2 * shape.num_heads * shape.head_dim,
            draft_vocab_size=min(vocabulary, shape.vocab_size),
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.intermediate_size,
            tokens_per_sample=length / 4,
            peak_flops=product_rate(device),
            utilisation=UTILISATION[device.type],
            target_gpus=1,
            trainer_gpus=1,
        )
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        ends = 2 * dtype.itemsize * shape.vocab_size * shape.hidden_size
        known = weight_bytes(shape, dtype) if isinstance(shape, ModelConfig) else int(dtype.itemsize * parameters)
        plan = cls(
            model=model,
            device=str(device),
            hours=hours,
            prompts=None if prompts is None else str(prompts),
            endpoint=endpoint,
            endpoint_states=endpoint_states,
            work=work,
            parameters=parameters,
            aux_layers=_aux_layers(shape.num_layers),
            sequence_length=length,
            max_answer_tokens=min(max_answer_tokens, length // 2),
            draft_vocab_size=vocabulary if vocabulary < shape.vocab_size else None,
            window=None if shape.max_positions <= 1024 else 512 if shape.max_positions <= 8192 else 2048,
            learning_rate=float(f"{min(3e-3, 1e-3 * math.sqrt(576 / shape.hidden_size)):.1g}"),
            thinking=thinking,
            augments=_writes_anything(tokenizer),
            num_processes=num_processes,
            num_answering=num_answering,
            num_arms=2 if twin else 1,
            free_bytes=memory_left(EngineConfig(device=str(device))) if free_bytes is None else free_bytes,
            weight_bytes=known if endpoint is None else ends,
        )
        plan.batch(1, length)  # at least one row must fit
        return plan

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def seconds(self) -> float:
        return 3600 * self.hours

    @property
    def answer_seconds(self) -> float:
        """Seconds from the start of the command to the last answer."""
        return ANSWER_SHARE * self.seconds

    @property
    def answer_tokens_per_s(self) -> float:
        """Estimated answer tokens per second of all answering processes."""
        return self.num_answering * DECODE_SHARE["cuda" if self.on_gpu else "cpu"] * self.work.prefill_tokens_per_s

    @property
    def train_tokens_per_s(self) -> float:
        one_drafter = 1 / self.work.prefill_tokens_per_s + self.num_arms / self.work.training_tokens_per_s
        return self.num_processes / one_drafter

    @property
    def answer_parts(self) -> tuple[AnswerPart, ...]:
        """The kinds of answers. After a file's greedy answers come sampled ones, then answers to self-written prompts."""
        if self.prompts is None:
            greedy = AnswerPart("answers.jsonl", self_written=True, temperature=0.0, seed=0, until=0.5)
            return greedy, AnswerPart("answers-sampled.jsonl", self_written=True, temperature=SAMPLED, seed=1)
        return (
            AnswerPart("answers.jsonl", self_written=False, temperature=0.0, seed=0),
            AnswerPart("answers-sampled.jsonl", self_written=False, temperature=SAMPLED, seed=1),
            AnswerPart("answers-self.jsonl", self_written=True, temperature=0.0, seed=2),
        )

    def train_seconds(self, spent: float) -> float:
        """Returns the training time, from loading to the last evaluation, after `spent` seconds of the total."""
        checks = min(CHECK_SHARE * self.seconds, CHECK_SECONDS)
        return max(MIN_TRAIN_SHARE * self.seconds, self.seconds - checks - spent)

    @staticmethod
    def run_times(train_seconds: float) -> dict[str, Any]:
        """Returns the keys of the recipe's `run` that depend on the training time."""
        evaluate, save = train_seconds / EVALUATIONS, min(120.0, train_seconds / 8)
        return {"max_seconds": train_seconds, "evaluate_seconds": evaluate, "save_seconds": save}

    # --- batch and memory -----------------------------------------------------------------------------------------

    def step_rows(self, num_tokens: float, length: int, train_seconds: float) -> int:
        """Returns the rows of a step, a multiple of the processes, from the amount of data and, on a GPU, the time."""
        step_tokens = STEP_TOKENS["cpu"]
        if self.on_gpu:
            in_time = int(self.train_tokens_per_s * train_seconds / WANTED_STEPS)
            step_tokens = max(MIN_STEP_TOKENS, min(STEP_TOKENS["cuda"], in_time))
        rows = max(1, min(step_tokens // length, int(num_tokens * MAX_EPOCHS / MIN_STEPS / length)))
        return -(-rows // self.num_processes) * self.num_processes

    def batch(self, rows: int, length: int) -> Batch:
        """Returns the largest micro-batch that fits. Activations are recomputed only if not even one row fits otherwise."""
        share = max(1, rows // self.num_processes)
        fixed = self.weight_bytes + 18 * self.work.drafter_parameters * self.num_arms
        for recompute in (False, True):
            for size in (size for size in range(share, 0, -1) if share % size == 0):
                needed = fixed + self._activations(size * length, recompute)
                if needed <= MEMORY_SHARE * self.free_bytes:
                    return Batch(rows, size, recompute, needed)
        elsewhere = (
            "use a GPU with more memory"
            if self.endpoint
            else "run the target on a server (--endpoint URL), or shard it over several GPUs with a recipe (fledge train, "
            "run.shard_target: docs/scaling.md)"
        )
        raise UserError(
            f"{self.model} does not fit {self.device}: the target's weights take {gib(self.weight_bytes)}, the drafter's "
            f"training {gib(fixed - self.weight_bytes)}, one row of {length:,} tokens "
            f"{gib(self._activations(length, True))}, but only {gib(self.free_bytes)} are free; {elsewhere}"
        )

    def _activations(self, tokens: int, recompute: bool) -> int:
        return self.work.activation_bytes(tokens, recompute=recompute, number_bytes=2 if self.on_gpu else 4)

    # --- description and recipe -----------------------------------------------------------------------------------

    def describe(self) -> str:
        answer_tokens = self.answer_tokens_per_s * self.answer_seconds
        train_seconds = self.train_seconds(self.answer_seconds)
        seen = min(self.train_tokens_per_s * train_seconds, MAX_EPOCHS * 1.3 * answer_tokens)
        batch = self.batch(self.step_rows(1.3 * answer_tokens, self.sequence_length, train_seconds), self.sequence_length)
        source = "prompts that the target writes itself"
        if self.prompts:
            source = f"prompts of {self.prompts}; if time is left, again at temperature {SAMPLED}, then self-written prompts"
        where = f"the server at {self.endpoint}" if self.endpoint else self.device
        augmented = "30 % with other templates and system prompts" if self.augments else "only with the model's own template"
        vocabulary = f"{self.draft_vocab_size:,} tokens" if self.draft_vocab_size else "the target's"
        processes = f" by {self.num_processes} processes" if self.num_processes > 1 else ""
        recompute = ", recomputing activations" if batch.recompute else ""
        drafter, layers = _count(self.work.drafter_parameters), ", ".join(map(str, self.aux_layers))
        lines = {
            "target": f"{self.model}, {_count(self.parameters)} parameters, {self.work.num_layers} layers, on {where}",
            "answers": f"{source}; {'greedy' if self.prompts else f'half greedy, half at temperature {SAMPLED}'}, up to "
            f"{self.max_answer_tokens} tokens; {_THINKING[self.thinking]}; about {_count(answer_tokens)} tokens in "
            f"{_minutes(self.answer_seconds)}" + (f" by {self.num_answering} processes" if self.num_answering > 1 else ""),
            "drafter": f"EAGLE 3.1, one layer, {drafter} parameters, draft vocabulary {vocabulary}, target layers {layers}, "
            f"window {self.window or 'none'}",
            "training": f"{_minutes(train_seconds)} on {self.device}{processes}, {augmented}; about "
            f"{self.train_tokens_per_s:,.0f} tokens/s, {_count(seen)} tokens seen; ends early when it no longer improves",
            "batch": f"{batch.rows} rows of {self.sequence_length:,} tokens a step, {batch.micro_batch_size} at a time on each "
            f"device{recompute}; fewer or shorter rows if there are few answers",
            "memory": f"about {gib(batch.peak_bytes)} of {gib(self.free_bytes)} free: the target's weights "
            f"{gib(self.weight_bytes)}, the rest for training",
            "expected": f"acceptance length about {expected_acceptance(seen):.1f} at depth 5 (a rough guide, from training "
            "runs for SmolLM2-135M)",
            "checks": ("" if self.endpoint else "doctor")
            + (f"{'' if self.endpoint else ', '}acceptance with other templates and system prompts" if self.augments else ""),
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items() if text)

    def recipe(
        self, output: Path, train: Path, held_out: Path, num_tokens: float, longest: int, train_seconds: float
    ) -> dict[str, Any]:
        """Returns the recipe of the training run. `num_tokens`: of all conversations, `longest`: of the longest one."""
        length = self.sequence_length
        if not self.on_gpu:  # on a CPU, attention between the documents of a row is wasted work
            length = min(length, max(128, -(-longest // 64) * 64))
        batch = self.batch(self.step_rows(num_tokens, length, train_seconds), length)
        max_new_tokens = 128 if self.on_gpu else 64
        content: dict[str, Any] = {
            "output": str(output),
            "target": {"model": self.model, "endpoint": self.endpoint, "endpoint_states": self.endpoint_states},
            "drafter": {
                "version": "3.1",
                "aux_layers": list(self.aux_layers),
                "draft_vocab_size": self.draft_vocab_size,
                "window": self.window,
            },
            "data": {
                "train": [str(train)],
                "held_out": [str(held_out)],
                "held_out_samples": 64 if self.on_gpu else 16,
                "sequence_length": length,
                "micro_batch_size": batch.micro_batch_size,
                "global_batch_size": batch.rows,
            },
            "objective": {"ttt_steps": self.work.ttt_steps, "loss": "mix", "recompute": batch.recompute},
            "optimizer": {"learning_rate": self.learning_rate},
            "run": {
                **self.run_times(train_seconds),
                "epochs": MAX_EPOCHS,
                "log_every": 20 if self.on_gpu else 5,
                "save_every": 10**9,
                "evaluate_every": 10**9,
                "patience": PATIENCE if self.num_arms == 1 else None,  # arms end together
                "device": self.device,
            },
            "evaluation": {"max_new_tokens": max_new_tokens, "max_prompt_tokens": self.sequence_length - max_new_tokens},
        }
        if self.augments:
            chances = {"template_probability": 0.1, "no_template_probability": 0.05, "system_probability": 0.15}
            content["data"]["augmentation"] = chances
        return content


_THINKING: dict[Thinking, str] = {
    "none": "the template has no thinking mode",
    "optional": "half of them with thinking, half without",
    "always": "with thinking, which the template cannot switch off",
}


def thinking_mode(tokenizer: Tokenizer) -> Thinking:
    """Returns, from the chat template, whether requests can switch thinking on and off, or it is always on, or unsupported."""
    template = tokenizer.chat_template or ""
    if "enable_thinking" in template:
        return "optional"
    return "always" if "think>" in template else "none"


def expected_acceptance(tokens: float) -> float:
    """Interpolates `EXPERIENCE` over the logarithm of the tokens; constant outside its range."""
    seen, lengths = zip(*EXPERIENCE, strict=True)
    return float(np.interp(math.log(max(tokens, 1.0)), np.log(seen), lengths))


def _sequence_length(prompts: Iterable[Prompt], tokenizer: Tokenizer, max_answer_tokens: int, max_positions: int) -> int:
    """Returns the default length, or more if 19 of 20 prompts need it with their answers."""
    needed = sorted(
        len(tokenizer.encode("\n".join([prompt.system, *prompt.turns, json.dumps(prompt.options)])))
        + len(prompt.turns) * (max_answer_tokens + 16)  # 16 tokens for the template's markers around a turn
        for prompt in islice(prompts, SIZED_PROMPTS)
    )
    length = SEQUENCE_LENGTH
    if needed:
        length = max(length, min(LONGEST_SEQUENCE, -(-needed[len(needed) * 19 // 20] // 1024) * 1024))
    return min(length, max_positions)


def _aux_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the default layers to tap. In a target with so few layers that those coincide: a low, a middle, a high one."""
    usual = default_aux_layers(num_layers)
    return tuple(usual) if list(usual) == sorted(set(usual)) else tuple(sorted({1, num_layers // 2, num_layers - 1}))


def _parameters(shape: Any) -> float:
    """Estimates the active parameters per token from the sizes; unknown MoE architectures are counted as plain MLPs."""
    attention = shape.hidden_size * shape.head_dim * 2 * (shape.num_heads + shape.num_kv_heads)
    inner, moe = shape.num_layers * shape.intermediate_size, getattr(shape, "moe", None)
    if moe is not None:
        chosen = moe.experts_per_token * moe.intermediate_size + moe.shared_intermediate_size
        inner += len(moe.layers) * (chosen - shape.intermediate_size)
    return shape.num_layers * attention + 3 * shape.hidden_size * inner + shape.vocab_size * shape.hidden_size


def _writes_anything(tokenizer: Tokenizer) -> bool:
    text = "### Instruction: You are Zoë, a naïve pirate."
    return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)).strip() == text


def _count(number: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {letter}"
    return f"{number:.0f}"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
