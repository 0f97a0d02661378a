"""The native steps against plain torch, and the lean pass against the network it stands for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fledge.engine.build import Speculation, fit
from fledge.engine.lean_decoder import LeanDecoder
from fledge.kernels import native
from fledge.kernels.packed_linear import packing_supported
from fledge.kernels.paged_attention import PagedAttend, PagedKV, SequenceLayout, attention_reference, build_mask
from fledge.models.layers import rotate
from fledge.sampling import SamplingParams
from tests.oracle import CPU, OracleSpeculator, engine_with, run
from tests.tiny import tiny_decoder

pytestmark = pytest.mark.skipif(
    native.library() is None or not packing_supported(), reason="needs a C compiler and a CPU with packed linears"
)


@pytest.mark.parametrize("with_delta", [False, True])
def test_add_rms_norm(with_delta):
    x, delta, weight = torch.randn(5, 37), torch.randn(5, 37), torch.rand(37)
    expected = x + delta if with_delta else x.clone()
    out = native.add_rms_norm(x, delta if with_delta else None, weight, 1e-5)
    torch.testing.assert_close(x, expected)
    torch.testing.assert_close(out, F.rms_norm(expected, (37,), weight, 1e-5))


def test_swiglu():
    gate_up = 3 * torch.randn(4, 2 * 51)
    gate, up = gate_up.chunk(2, -1)
    torch.testing.assert_close(native.swiglu(gate_up), F.silu(gate) * up, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("T", "kv_len"), [(1, 1), (1, 90), (6, 6), (6, 77), (13, 130)])
@pytest.mark.parametrize("window", [None, 5, 64])
@pytest.mark.parametrize("E", [64, 8, 80])
def test_attend(T, kv_len, window, E):
    H, K, first = 6, 2, 16
    qkv = torch.randn(T, (H + 2 * K) * E)
    cos, sin = torch.randn(T, 1, E), torch.randn(T, 1, E)
    keys, values = torch.randn(K, 200, E), torch.randn(K, 200, E)
    expected_keys, expected_values = keys.clone(), values.clone()
    heads = qkv.view(T, -1, E)
    new = slice(first + kv_len - T, first + kv_len)
    expected_keys[:, new] = rotate(heads[:, H : H + K], cos, sin).transpose(0, 1)
    expected_values[:, new] = heads[:, H + K :].transpose(0, 1)
    mask = build_mask(SequenceLayout([], T, kv_len), window, torch.device("cpu"))
    seen = slice(first, first + kv_len)
    expected = attention_reference(rotate(heads[:, :H], cos, sin), expected_keys[:, seen], expected_values[:, seen], mask)
    out = torch.empty(T, H * E)
    native.attend(qkv, cos.view(T, E), sin.view(T, E), keys, values, first, kv_len, H, window, out)
    torch.testing.assert_close(keys, expected_keys)
    torch.testing.assert_close(values, expected_values)
    torch.testing.assert_close(out, expected.flatten(-2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"])
def test_lean_pass_equals_the_network(family):
    decoder = fit(tiny_decoder(3, family, windows=(7, None, 7, None)), replace(CPU, dtype="float16"))
    assert LeanDecoder.serves(decoder)
    caches = [PagedKV(4, 2, 8, 32, 8, torch.float32, "cpu") for _ in range(2)]
    layouts = [SequenceLayout(list(range(4)), 9, 9), SequenceLayout(list(range(10, 16)), 14, 14)]
    tokens, positions = torch.randint(0, 128, (23,)), torch.cat([torch.arange(9), torch.arange(14)])
    taps = (0, 2, 4)
    plain = decoder(tokens, positions, PagedAttend(caches[0], layouts), taps, 14)
    lean = LeanDecoder(decoder)
    attend = PagedAttend(caches[1], layouts)
    assert lean.fits(attend)
    quick = lean(tokens, positions, attend, taps, 14)
    torch.testing.assert_close(quick.hidden_ND, plain.hidden_ND, rtol=1e-3, atol=1e-4)
    for mine, theirs in zip(quick.taps, plain.taps, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_packed_decoding_is_lossless_too(tree):
    """Chains go the lean way, trees the general one; both must give what plain packed decoding gives."""
    config = replace(CPU, dtype="float16")
    prompts = [[3, 7, 100], [55], list(range(40))]
    params = SamplingParams(max_tokens=60, temperature=0)
    engine = engine_with(tiny_decoder(), Speculation("none"), config)
    assert engine.runner.lean is not None
    plain = run(engine, prompts, params)
    answers = {tuple(prompt): answer for prompt, answer in zip(prompts, plain, strict=True)}
    packed = engine.runner.decoder
    oracle = OracleSpeculator(answers, 5, tree=tree, reach=lambda length: length % 6)
    assert run(engine_with(packed, oracle, config), prompts, params) == plain
