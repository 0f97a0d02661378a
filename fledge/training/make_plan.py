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

# Of the time, for answers with all that comes before them: training goes through them about four times in the rest, by the
# speeds measured on an H200 for a 135M target (133,000 answer tokens/s, loading included; 518,000 trained on).
ANSWER_SHARE = 0.35
# And for the checks at the end: loading, robustness, doctor, which take as long after a day as after an hour.
CHECK_SHARE, CHECK_SECONDS = 0.15, 120.0
MIN_TRAIN_SHARE = 0.25  # even where answers took too long
SAMPLED = 0.8  # temperature of the answers that are not greedy
# Of the device's measured product rate, in training and prefill, and what of that is left in decoding. On an H200 training
# reached 0.53 (135M) and 0.8 (1.5B), regenerating 0.1 of the prefill rate (135M: 152,000 tokens/s after loading).
UTILISATION, DECODE_SHARE = {"cuda": 0.6, "cpu": 0.3}, {"cuda": 0.1, "cpu": 0.25}
STEP_TOKENS = {"cuda": 32_768, "cpu": 1024}  # of an optimiser step, where there is data and time for it
WANTED_STEPS, MIN_STEP_TOKENS = 2500, 8192  # on a GPU: with less time, steps are made smaller, which hardly slows it down
MIN_STEPS = 300  # with less data, steps are made smaller until there are so many
MAX_EPOCHS = 20.0
# Evaluations of a run, and how many without a better one end it: until the learning rate falls, a few of them say little.
EVALUATIONS, PATIENCE = 18, 6
MEMORY_SHARE = 0.9  # of the free memory: fragments, libraries and what the estimate does not count take the rest
SEQUENCE_LENGTH, LONGEST_SEQUENCE = 2048, 16_384  # usual; and at most, where a file's prompts are longer
SIZED_PROMPTS = 512  # of a file, whose tokens are counted
# (tokens seen, acceptance length at depth 5) of SmolLM2-135M on held-out prompts: docs/training-notes.md.
EXPERIENCE = ((6.6e6, 1.9), (13e6, 2.2), (39e6, 2.9), (180e6, 3.2), (340e6, 3.5))

Thinking = Literal["none", "optional", "always"]


@dataclass(frozen=True)
class AnswerPart:
    """Answers of one kind, in a file of their own; the next kind follows when prompts or time are over."""

    file: str
    self_written: bool  # the prompts
    temperature: float
    seed: int
    until: float = 1.0  # share of the time that is left for answers when they begin


class Batch(NamedTuple):
    rows: int  # of a step, over all processes
    micro_batch_size: int
    recompute: bool
    peak_bytes: int  # on each device


@dataclass(frozen=True)
class MakePlan:
    """A drafter for one target in a given time."""

    model: str
    device: str
    hours: float
    prompts: str | None  # a file; None: the target writes them itself
    endpoint: str | None
    endpoint_states: str | None
    work: Plan  # bytes and FLOPs of one process
    parameters: float  # of the target, that a token passes
    aux_layers: tuple[int, ...]
    sequence_length: int
    max_answer_tokens: int
    draft_vocab_size: int | None
    window: int | None
    learning_rate: float
    thinking: Thinking
    augments: bool  # other templates and system prompts: the tokenizer must be able to write them
    num_processes: int  # of the training
    num_answering: int  # of these, how many write answers
    num_arms: int  # drafters in training
    free_bytes: int  # of each device's memory
    weight_bytes: int  # of the target; behind an endpoint of its embedding and head

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
        """`shape`: the target's sizes (see `targets.loading.target_shape`). `free_bytes`: of each device; None: looked up.

        Refuses a target that does not fit: before anything is answered.
        """
        if not tokenizer.has_chat_template:
            raise UserError(f"{model}: its tokenizer has no chat template, so it cannot be asked anything")
        thinking = thinking_mode(tokenizer)
        # 320, as the shipped drafter's: more prompts in the same time, and fewer loops. Thoughts are longer.
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
        plan.batch(1, length)  # one row at least must fit
        return plan

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def seconds(self) -> float:
        return 3600 * self.hours

    @property
    def answer_seconds(self) -> float:
        """From the start of the command to the last answer."""
        return ANSWER_SHARE * self.seconds

    @property
    def answer_tokens_per_s(self) -> float:
        """An estimate, as the next."""
        return self.num_answering * DECODE_SHARE["cuda" if self.on_gpu else "cpu"] * self.work.prefill_tokens_per_s

    @property
    def train_tokens_per_s(self) -> float:
        one_drafter = 1 / self.work.prefill_tokens_per_s + self.num_arms / self.work.training_tokens_per_s
        return self.num_processes / one_drafter

    @property
    def answer_parts(self) -> tuple[AnswerPart, ...]:
        """Greedy answers first. Where a file's prompts are not enough, they are answered again, then the target writes more."""
        if self.prompts is None:
            greedy = AnswerPart("answers.jsonl", self_written=True, temperature=0.0, seed=0, until=0.5)
            return greedy, AnswerPart("answers-sampled.jsonl", self_written=True, temperature=SAMPLED, seed=1)
        return (
            AnswerPart("answers.jsonl", self_written=False, temperature=0.0, seed=0),
            AnswerPart("answers-sampled.jsonl", self_written=False, temperature=SAMPLED, seed=1),
            AnswerPart("answers-self.jsonl", self_written=True, temperature=0.0, seed=2),
        )

    def train_seconds(self, spent: float) -> float:
        """What is left after so many seconds: from the start of the training's loading to its last evaluation."""
        checks = min(CHECK_SHARE * self.seconds, CHECK_SECONDS)
        return max(MIN_TRAIN_SHARE * self.seconds, self.seconds - checks - spent)

    @staticmethod
    def run_times(train_seconds: float) -> dict[str, Any]:
        """Keys of the recipe's `run` that follow from the time for training."""
        evaluate, save = train_seconds / EVALUATIONS, min(120.0, train_seconds / 8)
        return {"max_seconds": train_seconds, "evaluate_seconds": evaluate, "save_seconds": save}

    # --- batch and memory -----------------------------------------------------------------------------------------

    def step_rows(self, num_tokens: float, length: int, train_seconds: float) -> int:
        """Rows of a step, a multiple of the processes: by the data, and on a GPU by the time."""
        step_tokens = STEP_TOKENS["cpu"]
        if self.on_gpu:
            in_time = int(self.train_tokens_per_s * train_seconds / WANTED_STEPS)
            step_tokens = max(MIN_STEP_TOKENS, min(STEP_TOKENS["cuda"], in_time))
        rows = max(1, min(step_tokens // length, int(num_tokens * MAX_EPOCHS / MIN_STEPS / length)))
        return -(-rows // self.num_processes) * self.num_processes

    def batch(self, rows: int, length: int) -> Batch:
        """The largest micro-batch that fits. Activations are recomputed only where not even one row fits without."""
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
            else "run the target on a server (--endpoint URL), or spread it over several GPUs by a recipe (fledge train, "
            "run.shard_target: docs/scaling.md)"
        )
        raise UserError(
            f"{self.model} does not fit {self.device}: the target's weights {gib(self.weight_bytes)}, the drafter's training "
            f"{gib(fixed - self.weight_bytes)}, one row of {length:,} tokens {gib(self._activations(length, True))}, and "
            f"{gib(self.free_bytes)} are free; {elsewhere}"
        )

    def _activations(self, tokens: int, recompute: bool) -> int:
        return self.work.activation_bytes(tokens, recompute=recompute, number_bytes=2 if self.on_gpu else 4)

    # --- in words, and as a recipe --------------------------------------------------------------------------------

    def describe(self) -> str:
        answer_tokens = self.answer_tokens_per_s * self.answer_seconds
        train_seconds = self.train_seconds(self.answer_seconds)
        seen = min(self.train_tokens_per_s * train_seconds, MAX_EPOCHS * 1.3 * answer_tokens)
        batch = self.batch(self.step_rows(1.3 * answer_tokens, self.sequence_length, train_seconds), self.sequence_length)
        source = "prompts that the target writes itself"
        if self.prompts:
            source = f"prompts of {self.prompts}, once more at temperature {SAMPLED} and then own ones if there is time"
        where = f"the server at {self.endpoint}" if self.endpoint else self.device
        augmented = "30 % under other templates and system prompts" if self.augments else "under the model's template alone"
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
            f"device{recompute}; fewer or shorter ones where there are few answers",
            "memory": f"about {gib(batch.peak_bytes)} of {gib(self.free_bytes)} free: the target's weights "
            f"{gib(self.weight_bytes)}, the rest for training",
            "expected": f"acceptance length about {expected_acceptance(seen):.1f} at depth 5 (a rough guide, from trainings "
            "for SmolLM2-135M)",
            "checks": ("" if self.endpoint else "doctor")
            + (f"{'' if self.endpoint else ', '}acceptance under other templates and system prompts" if self.augments else ""),
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items() if text)

    def recipe(
        self, output: Path, train: Path, held_out: Path, num_tokens: float, longest: int, train_seconds: float
    ) -> dict[str, Any]:
        """The training run, once it is known how many tokens the conversations have, and the longest of them."""
        length = self.sequence_length
        if not self.on_gpu:  # attention between the documents of a row is wasted there
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
    "optional": "with and without thinking, half of them each",
    "always": "with their thoughts, which the template does not switch off",
}


def thinking_mode(tokenizer: Tokenizer) -> Thinking:
    """By the chat template: a thinking mode that requests can switch, thoughts it always expects, or none."""
    template = tokenizer.chat_template or ""
    if "enable_thinking" in template:
        return "optional"
    return "always" if "think>" in template else "none"


def expected_acceptance(tokens: float) -> float:
    """Between what was seen, by the logarithm of the tokens; the ends are kept beyond it."""
    seen, lengths = zip(*EXPERIENCE, strict=True)
    return float(np.interp(math.log(max(tokens, 1.0)), np.log(seen), lengths))


def _sequence_length(prompts: Iterable[Prompt], tokenizer: Tokenizer, max_answer_tokens: int, max_positions: int) -> int:
    """The usual one, or as much as 19 of 20 of the prompts need with their answers."""
    needed = sorted(
        len(tokenizer.encode("\n".join([prompt.system, *prompt.turns, json.dumps(prompt.options)])))
        + len(prompt.turns) * (max_answer_tokens + 16)  # what a template puts around a turn
        for prompt in islice(prompts, SIZED_PROMPTS)
    )
    length = SEQUENCE_LENGTH
    if needed:
        length = max(length, min(LONGEST_SEQUENCE, -(-needed[len(needed) * 19 // 20] // 1024) * 1024))
    return min(length, max_positions)


def _aux_layers(num_layers: int) -> tuple[int, ...]:
    """The usual ones; in a target of few layers, where those coincide, spread over it."""
    usual = default_aux_layers(num_layers)
    return tuple(usual) if list(usual) == sorted(set(usual)) else tuple(sorted({1, num_layers // 2, num_layers - 1}))


def _parameters(shape: Any) -> float:
    """Those that a token passes, by the sizes; experts of architectures that we do not know are taken for a plain MLP."""
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
