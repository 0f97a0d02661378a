"""What training a drafter takes: bytes, bandwidth, FLOPs and GPU hours, each by a formula; and the plan of `fledge make`.

python -m fledge.training.planning                                   Kimi-K2-class, the defaults
python -m fledge.training.planning hidden_size=5120 num_layers=64 …  your own numbers (all keys: --help)
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from fledge.config import default_aux_layers
from fledge.devices import product_rate
from fledge.errors import UserError
from fledge.tokenizer import Tokenizer


@dataclass(frozen=True)
class Plan:
    """Inputs are fields, results properties. FLOPs count a multiplication and its addition as two."""

    # The target
    hidden_size: int = 7168
    num_layers: int = 61
    vocab_size: int = 163_840
    active_parameters: float = 32e9  # that one token passes through
    attention_width: int = 64 * (192 + 128)  # heads × (size of a query + size of a value)
    # The drafter
    num_taps: int = 3
    draft_vocab_size: int = 32_000
    num_heads: int = 64
    num_kv_heads: int = 64
    head_dim: int = 112
    intermediate_size: int = 18_432
    ttt_steps: int = 5
    # The data
    samples: float = 500_000
    tokens_per_sample: float = 2_000
    answer_share: float = 0.75  # of a sample's tokens: written by the target, and scored
    epochs: float = 2
    state_bytes: int = 2  # of one number: bf16
    # The machines; these are assumptions, replace them by what you measure
    peak_flops: float = 989e12  # of one GPU, dense bf16: H100, H200
    utilisation: float = 0.3  # share of the peak that is reached
    decode_tokens_per_s: float = 1_500  # that one GPU of the target's server writes
    target_gpus: int = 8
    trainer_gpus: int = 8

    @property
    def tokens(self) -> float:
        return self.samples * self.tokens_per_sample

    # --- bytes ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> float:
        """The taps and the last layer."""
        return (self.num_taps + 1) * self.hidden_size * self.state_bytes

    @property
    def storage_bytes(self) -> float:
        return self.tokens * self.bytes_per_token

    @property
    def bytes_per_s(self) -> float:
        """Through disk or network, when states stream as fast as the slower of server and trainer allows."""
        return self.bytes_per_token * min(self.prefill_tokens_per_s, self.training_tokens_per_s)

    # --- the target -----------------------------------------------------------------------------------------------

    @property
    def prefill_flops(self) -> float:
        """A token's: every active weight once, and attention to half the sample on average."""
        attention = 2 * self.num_layers * self.attention_width * self.tokens_per_sample / 2
        return 2 * self.active_parameters + attention

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.target_gpus * self.peak_flops * self.utilisation / self.prefill_flops

    @property
    def prefill_gpu_hours(self) -> float:
        """Of one pass over the data. States on disk need one, streamed ones as many as epochs."""
        return self.tokens * self.prefill_flops / (self.peak_flops * self.utilisation) / 3600

    @property
    def answer_gpu_hours(self) -> float:
        """The target's own answers to all prompts, once."""
        return self.tokens * self.answer_share / self.decode_tokens_per_s / 3600

    # --- the drafter ----------------------------------------------------------------------------------------------

    @property
    def layer_parameters(self) -> int:
        attention = 2 * self.hidden_size * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        output = self.num_heads * self.head_dim * self.hidden_size
        return attention + output + 3 * self.hidden_size * self.intermediate_size

    @property
    def fc_parameters(self) -> int:
        return self.num_taps * self.hidden_size**2

    @property
    def head_parameters(self) -> int:
        return self.draft_vocab_size * self.hidden_size

    @property
    def drafter_parameters(self) -> int:
        return self.layer_parameters + self.fc_parameters + self.head_parameters

    @property
    def training_flops(self) -> float:
        """A token's: layer and attention once a draft step, fc once, forward and backward (three times the forward). The head
        at scored positions alone: three products a draft step, and one for the target's distribution."""
        attention = 2 * self.num_heads * self.head_dim * self.tokens_per_sample / 2  # queries·keys and shares·values, causal
        layers = 3 * (self.ttt_steps * (2 * self.layer_parameters + 2 * attention) + 2 * self.fc_parameters)
        return layers + self.answer_share * 2 * self.head_parameters * (3 * self.ttt_steps + 1)

    @property
    def training_tokens_per_s(self) -> float:
        return self.trainer_gpus * self.peak_flops * self.utilisation / self.training_flops

    @property
    def training_gpu_hours(self) -> float:
        return self.epochs * self.tokens * self.training_flops / (self.peak_flops * self.utilisation) / 3600

    @property
    def trainer_bytes(self) -> float:
        """On each GPU, besides activations: weights, gradients and two Adam moments in fp32, weights cast to bf16; the target's
        embedding and head."""
        return 18 * self.drafter_parameters + 2 * 2 * self.vocab_size * self.hidden_size

    def table(self) -> str:
        rows = (
            ("tokens", f"{self.tokens / 1e9:,.2f} G"),
            ("hidden states, per token", f"{self.bytes_per_token:,.0f} B"),
            ("hidden states, all on disk", f"{self.storage_bytes / 1e12:,.1f} TB"),
            ("target: FLOPs per token", f"{self.prefill_flops / 1e9:,.1f} G"),
            (f"target: prefill on {self.target_gpus} GPUs", f"{self.prefill_tokens_per_s:,.0f} tokens/s"),
            ("target: one pass over the data", f"{self.prefill_gpu_hours:,.0f} GPU hours"),
            ("target: writing the answers", f"{self.answer_gpu_hours:,.0f} GPU hours"),
            ("drafter: parameters", f"{self.drafter_parameters / 1e6:,.0f} M"),
            ("drafter: FLOPs per token", f"{self.training_flops / 1e9:,.1f} G"),
            (f"drafter: training on {self.trainer_gpus} GPUs", f"{self.training_tokens_per_s:,.0f} tokens/s"),
            (f"drafter: {self.epochs:g} epochs", f"{self.training_gpu_hours:,.0f} GPU hours"),
            ("drafter: memory without activations", f"{self.trainer_bytes / 1e9:,.1f} GB a GPU"),
            ("streaming: server to trainer", f"{self.bytes_per_s / 1e9:,.2f} GB/s = {self.bytes_per_s * 8 / 1e9:,.1f} Gbit/s"),
        )
        return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def parse(words: list[str]) -> Plan:
    kinds = {f.name: float if f.type == "float" else int for f in fields(Plan)}
    given: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if key not in kinds:
            raise UserError(f"{word!r}: write key=value; keys: {', '.join(kinds)}")
        try:
            given[key] = kinds[key](float(text))
        except ValueError:
            raise UserError(f"{word!r}: {text!r} is no number") from None
        if given[key] <= 0:
            raise UserError(f"{word!r}: must be more than nothing")
    return Plan(**given)


# --- fledge make --------------------------------------------------------------------------------------------------------

# Of the time, for answers with all that comes before them. Training goes through them three to five times in the rest, by the
# speeds on an H200 (135M: 130,000 answer tokens/s against 520,000 trained on; 1.5B: about 30,000 against 95,000).
ANSWER_SHARE = 0.35
# And for the checks at the end: loading, robustness, doctor, which take as long after a day as after an hour.
CHECK_SHARE, CHECK_SECONDS = 0.15, 120.0
MIN_TRAIN_SHARE = 0.25  # even where answers took too long
SAMPLED = 0.8  # temperature of the answers that are not greedy
# Of the device's measured product rate, in training and prefill, and what of that is left in decoding. On an H200 training
# reached 0.53 (135M) and 0.8 (1.5B), regenerating 0.12 of the prefill rate (135M).
UTILISATION, DECODE_SHARE = {"cuda": 0.6, "cpu": 0.3}, {"cuda": 0.12, "cpu": 0.25}
STEP_TOKENS = {"cuda": 32_768, "cpu": 1024}  # of an optimiser step, where there is data and time for it
WANTED_STEPS, MIN_STEP_TOKENS = 2500, 8192  # on a GPU: with less time, steps are made smaller, which hardly slows it down
MIN_STEPS = 300  # with less data, steps are made smaller until there are so many
MAX_EPOCHS = 20.0
# (tokens seen, acceptance length at depth 5) of SmolLM2-135M on held-out prompts: docs/training-notes.md.
EXPERIENCE = ((6.6e6, 1.9), (13e6, 2.2), (39e6, 2.9), (180e6, 3.2), (340e6, 3.5))


@dataclass(frozen=True)
class AnswerPart:
    """Answers of one kind, in a file of their own; the next kind follows when prompts or time are over."""

    file: str
    self_written: bool  # the prompts
    temperature: float
    seed: int
    until: float = 1.0  # share of the time that is left for answers when they begin


@dataclass(frozen=True)
class MakePlan:
    """A drafter for one target in a given time."""

    model: str
    device: str
    hours: float
    prompts: str | None  # a file; None: the target writes them itself
    endpoint: str | None
    endpoint_states: str | None
    parameters: float  # of the target
    num_layers: int
    aux_layers: tuple[int, ...]
    sequence_length: int
    max_answer_tokens: int
    draft_vocab_size: int | None
    drafter_parameters: int
    window: int | None
    learning_rate: float
    has_thinking: bool
    augments: bool  # other templates and system prompts: the tokenizer must be able to write them
    answer_tokens_per_s: float  # estimates
    train_tokens_per_s: float

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
    ) -> MakePlan:
        """`shape`: the target's sizes (see `targets.loading.target_shape`)."""
        if not tokenizer.has_chat_template:
            raise UserError(f"{model}: its tokenizer has no chat template, so it cannot be asked anything")
        size, length = shape.hidden_size, min(2048, shape.max_positions)
        vocabulary = 32_000 if shape.vocab_size > 100_000 else 16_384
        parameters = _parameters(shape)
        thinks = "enable_thinking" in (tokenizer.chat_template or "")
        work = Plan(
            hidden_size=size,
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
        return cls(
            model=model,
            device=str(device),
            hours=hours,
            prompts=None if prompts is None else str(prompts),
            endpoint=endpoint,
            endpoint_states=endpoint_states,
            parameters=parameters,
            num_layers=shape.num_layers,
            aux_layers=_aux_layers(shape.num_layers),
            sequence_length=length,
            # 320, as the shipped drafter's: more prompts in the same time, and fewer loops. Thoughts are longer.
            max_answer_tokens=min(512 if thinks else 320, length // 2),
            draft_vocab_size=vocabulary if vocabulary < shape.vocab_size else None,
            drafter_parameters=work.drafter_parameters,
            window=None if shape.max_positions <= 1024 else 512 if shape.max_positions <= 8192 else 2048,
            learning_rate=float(f"{min(3e-3, 1e-3 * math.sqrt(576 / size)):.1g}"),
            has_thinking=thinks,
            augments=_writes_anything(tokenizer),
            answer_tokens_per_s=DECODE_SHARE[device.type] * work.prefill_tokens_per_s,
            train_tokens_per_s=1 / (1 / work.prefill_tokens_per_s + 1 / work.training_tokens_per_s),
        )

    @property
    def seconds(self) -> float:
        return 3600 * self.hours

    @property
    def answer_seconds(self) -> float:
        """From the start of the command to the last answer."""
        return ANSWER_SHARE * self.seconds

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
        interval = train_seconds / 8
        return {"max_seconds": train_seconds, "evaluate_seconds": interval, "save_seconds": min(120.0, interval)}

    def describe(self) -> str:
        answer_tokens = self.answer_tokens_per_s * self.answer_seconds
        train_seconds = self.train_seconds(self.answer_seconds)
        seen = min(self.train_tokens_per_s * train_seconds, MAX_EPOCHS * 1.3 * answer_tokens)
        source = "prompts that the target writes itself"
        if self.prompts:
            source = f"prompts of {self.prompts}, once more at temperature {SAMPLED} and then own ones if there is time"
        thinking = "with and without thinking, half of them each" if self.has_thinking else "the template has no thinking mode"
        where = f"the server at {self.endpoint}" if self.endpoint else self.device
        augmented = "30 % under other templates and system prompts" if self.augments else "under the model's template alone"
        vocabulary = f"{self.draft_vocab_size:,} tokens" if self.draft_vocab_size else "the target's"
        lines = {
            "target": f"{self.model}, {_count(self.parameters)} parameters, {self.num_layers} layers, on {where}",
            "answers": f"{source}; {'greedy' if self.prompts else f'half greedy, half at temperature {SAMPLED}'}, up to "
            f"{self.max_answer_tokens} tokens; {thinking}; about {_count(answer_tokens)} tokens in "
            f"{_minutes(self.answer_seconds)}",
            "drafter": f"EAGLE 3.1, one layer, {_count(self.drafter_parameters)} parameters, draft vocabulary {vocabulary}, "
            f"target layers {', '.join(map(str, self.aux_layers))}, window {self.window or 'none'}",
            "training": f"{_minutes(train_seconds)} on {self.device}, rows of {self.sequence_length} tokens, {augmented}; "
            f"about {self.train_tokens_per_s:,.0f} tokens/s, {_count(seen)} tokens seen; ends early when it no longer improves",
            "expected": f"acceptance length about {expected_acceptance(seen):.1f} at depth 5 (a rough guide, from trainings "
            "for SmolLM2-135M)",
            "checks": "doctor" + (", acceptance under other templates and system prompts" if self.augments else ""),
        }
        return "\n".join(f"  {name:9} {text}" for name, text in lines.items())

    def recipe(
        self, output: Path, train: Path, held_out: Path, num_tokens: float, longest: int, train_seconds: float
    ) -> dict[str, Any]:
        """The training run, once it is known how many tokens the conversations have, and the longest of them."""
        on_gpu = self.device.startswith("cuda")
        length = self.sequence_length
        if not on_gpu:  # attention between the documents of a row is wasted there
            length = min(length, max(128, -(-longest // 64) * 64))
        rows = num_tokens * MAX_EPOCHS / MIN_STEPS / length
        step_tokens = STEP_TOKENS["cpu"]
        if on_gpu:
            in_time = int(self.train_tokens_per_s * train_seconds / WANTED_STEPS)
            step_tokens = max(MIN_STEP_TOKENS, min(STEP_TOKENS["cuda"], in_time))
        batch = max(1, min(step_tokens // length, int(rows)))
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
                "held_out_samples": 64 if on_gpu else 16,
                "sequence_length": length,
                "micro_batch_size": batch,
                "global_batch_size": batch,
            },
            "objective": {"ttt_steps": 5, "loss": "mix"},
            "optimizer": {"learning_rate": self.learning_rate},
            "run": {
                **self.run_times(train_seconds),
                "epochs": MAX_EPOCHS,
                "log_every": 20 if on_gpu else 5,
                "save_every": 10**9,
                "evaluate_every": 10**9,
                # Three quarters of the run: until the learning rate falls, a few evaluations say little.
                "patience": 6,
                "device": self.device,
            },
            "evaluation": {"max_new_tokens": 128 if on_gpu else 64},
        }
        if self.augments:
            chances = {"template_probability": 0.1, "no_template_probability": 0.05, "system_probability": 0.15}
            content["data"]["augmentation"] = chances
        return content


def expected_acceptance(tokens: float) -> float:
    """Between what was seen, by the logarithm of the tokens; the ends are kept beyond it."""
    (first, low), (last, high) = EXPERIENCE[0], EXPERIENCE[-1]
    if tokens <= first or tokens >= last:
        return low if tokens <= first else high
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(EXPERIENCE) if tokens <= pair[1][0])
    return y0 + (y1 - y0) * math.log(tokens / x0) / math.log(x1 / x0)


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


if __name__ == "__main__":
    try:
        print(parse(sys.argv[1:]).table())
    except UserError as error:
        sys.exit(f"planning: {error}")
