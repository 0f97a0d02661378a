"""Stacking experts for the GPU's kernels does not change the logits."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.quantization import QuantizedLinear, QuantizedWeight, quantize, quantize_linears, quantized_linear
from fledge.models.decoder import Decoder, causal_attend
from fledge.models.moe import stack_experts
from tests.tiny import tiny_decoder

TOKENS = torch.arange(20)


def logits(decoder: Decoder) -> torch.Tensor:
    return decoder.logits(decoder(TOKENS, TOKENS, causal_attend()).hidden_ND)


@torch.no_grad()
@pytest.mark.parametrize("format", ["none", "int8", "int4", "fp8"])
def test_stacked_experts_give_the_same_logits(format: str) -> None:
    decoder = tiny_decoder(1, "Qwen3MoeForCausalLM")
    if format != "none":
        quantize_linears(decoder, format)
    before = logits(decoder)
    stack_experts(decoder, torch.float32)
    gate_up, _ = decoder.layers[0].mlp.stacked
    assert isinstance(gate_up, QuantizedWeight) == (format != "none")
    codes = gate_up.codes if isinstance(gate_up, QuantizedWeight) else gate_up
    expert = decoder.layers[0].mlp.experts[3].gate_up_proj
    own = expert.codes if isinstance(expert, QuantizedLinear) else expert.weight
    assert own.data_ptr() == codes[3].data_ptr()  # one copy in memory
    assert torch.equal(logits(decoder), before)


@torch.no_grad()
def test_experts_of_mixed_formats_are_dequantised() -> None:
    """Experts of different formats, and experts whose inputs are reordered, cannot be stacked as quantised values."""
    decoder = tiny_decoder(1, "Qwen3MoeForCausalLM")
    experts = decoder.layers[0].mlp.experts
    experts[0].down_proj = quantized_linear("down_proj", experts[0].down_proj, "int8")
    order = torch.randperm(32)
    weight = quantize(experts[1].gate_up_proj.weight[:, order], 8)
    for expert in experts:
        expert.gate_up_proj = QuantizedLinear(weight, order_I=order)
    before = logits(decoder)
    stack_experts(decoder, torch.float32)
    assert all(isinstance(part, torch.Tensor) for part in decoder.layers[0].mlp.stacked)
    torch.testing.assert_close(logits(decoder), before, rtol=1e-4, atol=1e-4)


def test_experts_with_and_without_offsets_are_stacked() -> None:
    """Without an offset a 4-bit value means itself minus 8, which an offset can express exactly."""
    decoder = tiny_decoder(1, "Qwen3MoeForCausalLM")
    for layer in (0, 2, 3):
        for index, expert in enumerate(decoder.layers[layer].mlp.experts):
            for name in ("gate_up_proj", "down_proj"):
                setattr(expert, name, QuantizedLinear(quantize(getattr(expert, name).weight, 4, offsets=index % 2 == 0)))
    before = logits(decoder)
    stack_experts(decoder, torch.float32)
    stacked = decoder.layers[0].mlp.stacked[0]
    assert isinstance(stacked, QuantizedWeight)
    assert stacked.offsets is not None
    assert torch.equal(logits(decoder), before)
