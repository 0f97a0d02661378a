"""Estimates the cost of training a drafter by formulas: bytes, bandwidth, memory, FLOPs and GPU hours.

python -m fledge.training.planning                                   Kimi-K2-class, the defaults
python -m fledge.training.planning hidden_size=5120 num_layers=64 …  your own numbers (all keys: --help)
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from typing import Any

from fledge.errors import UserError
from fledge.training.objective import auto_chunk_rows


@dataclass(frozen=True)
class Plan:
    """The inputs (fields) and results (properties) of an estimate. A multiplication with its addition counts as two FLOPs."""

    # The target
    hidden_size: int = 7168
    num_layers: int = 61
    vocab_size: int = 163_840
    active_parameters: float = 32e9  # used per token
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
    answer_share: float = 0.75  # share of a sample's tokens that the target wrote; these are scored
    epochs: float = 2
    state_bytes: int = 2  # per number: bf16
    # The machines. These are assumptions: replace them by your measurements.
    peak_flops: float = 989e12  # of one GPU, dense bf16: H100, H200
    utilisation: float = 0.3  # share of the peak that is reached
    decode_tokens_per_s: float = 1_500  # per GPU of the target's server
    target_gpus: int = 8
    trainer_gpus: int = 8

    @property
    def tokens(self) -> float:
        return self.samples * self.tokens_per_sample

    # --- bytes ----------------------------------------------------------------------------------------------------

    @property
    def bytes_per_token(self) -> float:
        """Bytes of a token's hidden states: the taps and the last layer."""
        return (self.num_taps + 1) * self.hidden_size * self.state_bytes

    @property
    def storage_bytes(self) -> float:
        return self.tokens * self.bytes_per_token

    @property
    def bytes_per_s(self) -> float:
        """Bandwidth of disk or network if states stream as fast as the slower of server and trainer."""
        return self.bytes_per_token * min(self.prefill_tokens_per_s, self.training_tokens_per_s)

    # --- the target -----------------------------------------------------------------------------------------------

    @property
    def prefill_flops(self) -> float:
        """FLOPs per token: every active weight once, and attention to half the sample on average."""
        attention = 2 * self.num_layers * self.attention_width * self.tokens_per_sample / 2
        return 2 * self.active_parameters + attention

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.target_gpus * self.peak_flops * self.utilisation / self.prefill_flops

    @property
    def prefill_gpu_hours(self) -> float:
        """GPU hours of one pass over the data. States on disk need one pass, streamed states one per epoch."""
        return self.tokens * self.prefill_flops / (self.peak_flops * self.utilisation) / 3600

    @property
    def answer_gpu_hours(self) -> float:
        """GPU hours for the target to answer all prompts once."""
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
        """FLOPs per token: layer and attention once per draft step and fc once, times three for forward and backward. The head
        only at scored positions: three products per draft step, and one for the target's distribution."""
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
        """Memory of each GPU without activations: weights, gradients and two Adam moments in fp32, weights cast to bf16, and
        the target's embedding and head."""
        return 18 * self.drafter_parameters + 2 * 2 * self.vocab_size * self.hidden_size

    def activation_bytes(self, tokens: int, *, recompute: bool = False, number_bytes: int = 2) -> int:
        """Returns the memory of activations for a micro-batch of `tokens`. `recompute`: only those of one draft step are kept.

        For 32,768 tokens of a 135M target (H200) it gives 5.7 GiB including weights; measured: 5.6 compiled, 6.3 uncompiled.
        """
        size, inner, heads = self.hidden_size, self.intermediate_size, self.num_heads * self.head_dim
        keys = 2 * self.num_kv_heads * self.head_dim  # and values
        step = 6 * size + 2 * heads + keys + 3 * inner  # norms and their inputs, queries, attention, MLP
        steps = step + self.ttt_steps * (size + keys) if recompute else self.ttt_steps * step
        states = 3 * (self.num_taps + 1) * size  # captured, normed, concatenated
        target_layer = 4 * (size + inner)  # the target's pass keeps the activations of one layer at a time
        rows = min(auto_chunk_rows(self.ttt_steps, self.draft_vocab_size), tokens)
        logits = 8 * self.ttt_steps * rows * self.draft_vocab_size  # of one chunk, and their gradients
        return number_bytes * tokens * (steps + states + target_layer) + logits

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
            raise UserError(f"{word!r}: {text!r} is not a number") from None
        if given[key] <= 0:
            raise UserError(f"{word!r}: must be greater than 0")
    return Plan(**given)


if __name__ == "__main__":
    try:
        print(parse(sys.argv[1:]).table())
    except UserError as error:
        sys.exit(f"planning: {error}")
