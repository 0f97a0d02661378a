"""The elementwise kernels and their references equal plain maths."""

from __future__ import annotations

import pytest
import torch

from fledge.config import RopeConfig
from fledge.kernels.attention.rope_cache import rope_cache_reference, rope_cache_triton
from fledge.kernels.gate import apply_gate_reference, apply_gate_triton
from fledge.kernels.rms_norm import rms_norm_reference, rms_norm_triton
from fledge.models.layers import Rotary
from tests.kernels.support import KERNELS, running


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [32, 72])
def test_rms_norm(kernel, size):
    run, device = running(kernel, rms_norm_reference, rms_norm_triton)
    x, weight = torch.randn(5, size, device=device), torch.randn(size, device=device)
    normed = run(x, weight, 1e-5)
    torch.testing.assert_close(normed, x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [48, 1536])
def test_swiglu(kernel, size):
    run, device = running(kernel, apply_gate_reference, apply_gate_triton)
    gate_up = torch.randn(4, 2 * size, device=device)
    gate, up = gate_up[:, :size], gate_up[:, size:]
    torch.testing.assert_close(run(gate_up), gate / (1 + (-gate).exp()) * up)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 2, 80), (2, 2, 8)])
def test_rope_cache(kernel, with_norms, num_heads, num_kv_heads, head_dim):
    run, device = running(kernel, rope_cache_reference, rope_cache_triton)
    num_tokens, num_slots = 6, 40
    rotary = Rotary(head_dim, 128, RopeConfig())
    rotary.reserve(128)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    positions = torch.tensor([0, 1, 77, 5, 127, 64], device=device)
    slots = torch.tensor([3, 39, 0, -1, 17, 18], device=device)
    keys, values = (torch.randn(num_kv_heads, num_slots, head_dim, device=device) for _ in range(2))
    norms = (torch.randn(head_dim, device=device), torch.randn(head_dim, device=device), 1e-6) if with_norms else None

    q, k, v = qkv.clone().view(num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], 1)
    if norms is not None:
        q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norms[0]
        k = k / (k.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norms[1]
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, device=device) / head_dim)
    turn = torch.polar(torch.ones(()).to(device), positions[:, None, None] * frequencies)

    def rotated(x):
        pairs = torch.complex(*x.contiguous().chunk(2, -1)) * turn
        return torch.cat([pairs.real, pairs.imag], -1)

    expected_keys, expected_values = keys.clone(), values.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_keys[:, slot], expected_values[:, slot] = rotated(k)[token], v[token]

    run(qkv, rotary.table.to(device), positions, slots, keys, values, norms)
    torch.testing.assert_close(
        qkv.view(num_tokens, -1, head_dim), torch.cat([rotated(q), rotated(k), v], 1), atol=1e-4, rtol=1e-4
    )
    torch.testing.assert_close(keys, expected_keys, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(values, expected_values)
