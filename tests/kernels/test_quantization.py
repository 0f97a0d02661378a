"""Weight-only quantisation: the layout, the rounding, and that weights of GGUF files are recovered bit for bit."""

from __future__ import annotations

import gguf
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fledge.engine.config import EngineConfig, check_quantization
from fledge.errors import UserError
from fledge.kernels.formats.fp8 import quantize_fp8
from fledge.kernels.quantization import (
    QuantizedLinear,
    QuantizedWeight,
    dequantize,
    is_exact,
    kept_fp8,
    quantize,
    quantize_linears,
    smallest_exact_format,
)
from tests.kernels.support import fp8_weight
from tests.tiny import tiny_decoder


def test_layout():
    """The layout that kernels read, by hand: two rows of two groups of two inputs."""
    scales = torch.tensor([[1.0, 0.5], [-2.0, 0.25]]).half()
    eight = QuantizedWeight(torch.tensor([[1, -2, 3, 4], [5, 6, -7, 127]], dtype=torch.int8), scales, None, 8, 2)
    assert dequantize(eight).tolist() == [[1, -2, 1.5, 2], [-10, -12, -1.75, 31.75]]
    codes = torch.tensor([[0x90, 0xF8], [0x21, 0x43]], dtype=torch.uint8)  # the low nibble comes first
    four = QuantizedWeight(codes, scales, None, 4, 2)
    assert dequantize(four).tolist() == [[-8, 1, 0, 3.5], [14, 12, -1.25, -1]]
    offsets = torch.tensor([[10.0, 20.0], [30.0, 40.0]]).half()
    shifted = QuantizedWeight(codes, scales, offsets, 4, 2)
    assert dequantize(shifted).tolist() == [[10, 19, 24, 27.5], [28, 26, 40.75, 41]]


@pytest.mark.parametrize(("bits", "offsets", "steps"), [(8, False, 254), (4, True, 15), (4, False, 16)])
@pytest.mark.parametrize("group_size", [16, 32])
def test_rounding_is_at_most_half_a_step(bits, offsets, steps, group_size):
    weight = torch.randn(50, 96) * torch.logspace(-3, 3, 50)[:, None]
    quantised = quantize(weight, bits, group_size, offsets=offsets)
    assert quantised.codes.shape == (50, 96 * bits // 8)
    assert quantised.scales.shape == (50, 96 // group_size)
    groups = weight.unflatten(1, (-1, group_size))
    span = groups.amax(-1) - groups.amin(-1) if offsets else 2 * groups.abs().amax(-1)
    error = (dequantize(quantised) - weight).unflatten(1, (-1, group_size)).abs().amax(-1)
    # A whole step without offsets: the extreme with the other sign has no code of its own.
    most = 1.0 if bits == 4 and not offsets else 0.5
    # The scale and the offset are rounded to fp16.
    assert (error <= span * (most / steps + 2**-9)).all()


@pytest.mark.parametrize(("kind", "bits", "offsets"), [("Q8_0", 8, False), ("Q4_0", 4, False), ("Q4_1", 4, True)])
def test_gguf_weights_are_recovered(kind, bits, offsets):
    theirs = gguf.GGMLQuantizationType[kind]
    weight = torch.from_numpy(gguf.dequantize(gguf.quantize(torch.randn(64, 96).numpy(), theirs), theirs))
    kept = smallest_exact_format(weight)
    assert (kept.bits, kept.offsets is not None) == (bits, offsets)
    assert torch.equal(dequantize(kept), weight)
    # Files of more than a billion weights are unpacked to fp16.
    rounded = weight.half().float()
    kept = smallest_exact_format(rounded)
    assert (kept.bits, kept.offsets is not None) == (bits, offsets)
    torch.testing.assert_close(dequantize(kept), weight, rtol=0, atol=weight.abs().max().item() * 2**-9)


def test_weights_that_no_format_holds_take_8_bits():
    weight = torch.randn(64, 96)
    assert smallest_exact_format(weight).bits == 8
    weight = dequantize(quantize(weight, 4))
    weight[40, 5] += 0.1 * weight[40].abs().max()  # one number in one row
    assert smallest_exact_format(weight).bits == 8
    assert not is_exact(quantize(weight, 4), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_linear(bits):
    linear, x = nn.Linear(64, 40).requires_grad_(False), torch.randn(3, 64)
    quantised = QuantizedLinear(quantize(linear.weight, bits), linear.bias)
    assert (quantised.in_features, quantised.out_features, quantised.bits) == (64, 40, bits)
    expected = F.linear(x, dequantize(quantize(linear.weight, bits)), linear.bias)
    assert torch.equal(quantised(x), expected)
    codes, scales = quantised.codes.clone(), quantised.scales.clone()
    quantised.to(torch.bfloat16)
    assert torch.equal(quantised.codes, codes)
    assert quantised.scales.dtype == torch.float16
    assert torch.equal(quantised.scales, scales)
    assert quantised(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("block", [None, (128, 128)])
def test_fp8(block):
    made = fp8_weight(torch.randn(200, 256), block)
    weight = kept_fp8(made)
    assert (weight.format, weight.group_size) == ("fp8", 128 if block else 256)
    assert torch.equal(dequantize(weight, torch.bfloat16), made.dequantize(torch.bfloat16))
    linear, x = QuantizedLinear(weight), torch.randn(3, 256)
    torch.testing.assert_close(linear(x), x @ made.dequantize().t())
    linear.to(torch.bfloat16)
    assert (linear.codes.dtype, linear.scales.dtype) == (torch.float8_e4m3fn, torch.float32), "the types are kept"
    assert kept_fp8(fp8_weight(torch.randn(200, 300), (128, 128))) is None, "the last block is partial"


def test_fp8_needs_a_gpu():
    with pytest.raises(UserError, match="fp8 needs a GPU"):
        EngineConfig(device="cpu", quantization="fp8").resolve(tiny_decoder().config)


def test_a_network_in_fp8():
    decoder = tiny_decoder(tie_embeddings=True)
    weight = decoder.layers[1].mlp.down_proj.weight.clone()
    quantize_linears(decoder, "fp8")
    assert {m.quantized.format for m in decoder.modules() if isinstance(m, QuantizedLinear)} == {"fp8"}
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert torch.equal(dequantize(decoder.layers[1].mlp.down_proj.quantized), quantize_fp8(weight).dequantize())


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4)])
def test_a_network(name, bits):
    decoder = tiny_decoder(tie_embeddings=True)
    embedding, weight = decoder.embed_tokens.weight.clone(), decoder.layers[1].mlp.down_proj.weight.clone()
    quantize_linears(decoder, name)
    assert {m.bits for layer in decoder.layers for m in layer.modules() if isinstance(m, QuantizedLinear)} == {bits}
    assert not any(isinstance(module, nn.Linear) for module in decoder.modules())
    assert decoder.lm_head.bits == 8
    assert torch.equal(decoder.embed_tokens.weight, embedding)
    assert torch.equal(dequantize(decoder.layers[1].mlp.down_proj.quantized), dequantize(quantize(weight, bits)))


def test_refused():
    with pytest.raises(UserError, match=r"multiple of 32; layers\.0\..* has 40"):
        quantize_linears(tiny_decoder(hidden_size=40), "int8")
    with pytest.raises(UserError, match=r"awq.*int8 or int4"):
        check_quantization("awq")
