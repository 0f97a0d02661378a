"""Kernels of the deterministic mode: right, and a row's result is the same bits whoever else is there.

Tiles of different shapes take the same sums in the same order on a GPU only: the interpreter leaves a tile's product to numpy.
"""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.attention import invariant_attention as attention_module
from fledge.kernels.attention.invariant_attention import invariant_attention_reference, invariant_attention_triton
from tests.kernels.support import INTERPRETED, device_of_kernels, runs_triton
from tests.kernels.test_decode_attention import scattered_cache

DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.bfloat16]
ATTENTION = ["reference", pytest.param("triton", marks=runs_triton)]


@pytest.mark.parametrize("kernel", ATTENTION)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "size", "page_size", "window"), [((9, 3), 64, 128, None), ((4, 2), 32, 16, 100), ((2, 1), 8, 64, None)]
)
def test_a_tokens_attention_does_not_depend_on_how_it_comes(kernel, dtype, heads, size, page_size, window, monkeypatch):
    """In a chain beside others (one of them empty, one cut short), alone, in a piece of a prompt; shares apart or not."""
    monkeypatch.setattr(attention_module, "SHARE", 128)
    device = "cpu" if kernel == "reference" else device_of_kernels()
    starts, counts, num_new = [0, 70, 600, 330], [5, 0, 2, 5], 5
    keys, values, table = scattered_cache([start + num_new for start in starts], page_size, heads[1], size, device)
    keys, values = keys.to(dtype), values.to(dtype)
    qkv = torch.randn(4 * num_new, (heads[0] + 2 * heads[1]) * size, device=device).to(dtype)
    reach = table.shape[1] * page_size

    def run(qkv, table, starts, counts, page_size=page_size, apart=None, **options):
        places = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (starts, counts)]
        options = {"reach": reach, "window": window} | options
        arguments = (qkv.contiguous(), keys, values, table, *places, page_size)
        if kernel == "reference":
            return invariant_attention_reference(*arguments, **options)
        return invariant_attention_triton(*arguments, **options, apart=apart)

    together = run(qkv, table, starts, counts, longest=num_new, apart=True)
    if dtype == torch.float32:
        expected = torch.zeros_like(together)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            for token in range(count):
                key = torch.arange(max(0, start + token + 1 - (window or 10**6)), start + token + 1, device=device)
                slot = table[b].long()[key // page_size] * page_size + key % page_size
                q = qkv[b * num_new + token, : heads[0] * size].view(heads[1], -1, size)
                weights = (q @ keys[:, slot].transpose(1, 2) * size**-0.5).softmax(-1)
                expected[b * num_new + token] = (weights @ values[:, slot]).flatten()
        torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(run(qkv, table, starts, counts, longest=num_new, apart=False), together)
    for row in (0, 3):
        first = row * num_new
        for token in (0, 3, 4):
            alone = run(qkv[first + token, None], table[row, None], [starts[row] + token], [1], longest=1)
            assert torch.equal(alone[0], together[first + token])
        piece = (qkv[first : first + 4], table[row, None], [starts[row]], [4])
        here = torch.zeros(1, dtype=torch.int32, device=device)
        assert torch.equal(run(*piece, longest=4, first_rows_B=here), together[first : first + 4])
    # As a prompt that names the slots of its rows; a row of nobody lies behind it.
    slots = table[0].long()[torch.arange(5, device=device) // page_size] * page_size + torch.arange(5, device=device)
    prompt = run(qkv[:6], slots, [0], [5], 1, longest=5, reach=5, first_rows_B=torch.zeros(1, dtype=torch.int32, device=device))
    assert torch.equal(prompt[:5], together[:5])
    assert not prompt[5:].any()


@pytest.mark.parametrize("kernel", ATTENTION)
def test_what_lies_before_a_text_sees_nothing(kernel):
    """A block that begins before its text's first token: its rows there are 0."""
    device = "cpu" if kernel == "reference" else device_of_kernels()
    keys, values, table = scattered_cache([6], 16, 1, 16, device)
    qkv = torch.randn(8, 48, device=device)
    run = invariant_attention_reference if kernel == "reference" else invariant_attention_triton
    start, count = torch.tensor([-2], device=device), torch.tensor([8], device=device)
    found = run(qkv, keys, values, table, start, count, 16, longest=8, reach=16)
    assert not found[:2].any()
    whole = run(qkv[2:].contiguous(), keys, values, table, start * 0, count - 2, 16, longest=6, reach=16)
    assert torch.equal(found[2:], whole)
