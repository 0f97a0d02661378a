"""Attention of a few new tokens over the paged KV cache."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.attention.decode_attention import choose_splits, decode_attention_reference, decode_attention_triton
from tests.kernels.support import KERNELS, device_of_kernels


def scattered_cache(kv_lens, page_size, num_kv_heads, head_dim, device):
    """Returns random keys and values and a page table with each sequence's pages in random order."""
    most = max(-(-length // page_size) for length in kv_lens)
    num_pages = most * len(kv_lens) + 1
    keys, values = (torch.randn(num_kv_heads, num_pages * page_size, head_dim, device=device) for _ in range(2))
    table = torch.randperm(num_pages)[: most * len(kv_lens)].view(len(kv_lens), most)
    return keys, values, table.to(device=device, dtype=torch.int32)


def plain_attention(q, keys, values, table, kv_len, page_size, seen):
    """Attention of one sequence by the formula. `seen`: the mask [T, kv_len]."""
    slots = [int(table[i // page_size]) * page_size + i % page_size for i in range(kv_len)]
    group = q.shape[1] // keys.shape[0]
    k, v = (x[:, slots].repeat_interleave(group, 0) for x in (keys, values))
    scores = torch.einsum("the,hse->hts", q, k) / q.shape[-1] ** 0.5
    weights = scores.masked_fill(~seen.to(q.device), -torch.inf).softmax(-1)
    return torch.einsum("hts,hse->the", weights, v)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("num_new", "heads", "head_dim", "page_size", "window", "splits"),
    [
        (1, (9, 3), 64, 128, None, 1),
        (1, (9, 3), 64, 16, None, 4),
        (6, (4, 4), 80, 16, None, 1),
        (6, (4, 2), 32, 64, 40, 2),
        (64, (6, 2), 16, 16, None, 2),
        (1, (2, 1), 8, 128, 30, 1),
    ],
)
def test_causal(kernel, num_new, heads, head_dim, page_size, window, splits):
    device = "cpu" if kernel == "reference" else device_of_kernels()
    kv_lens = [num_new, 0, 70 + num_new, 130 + num_new]
    keys, values, table = scattered_cache(kv_lens, page_size, heads[1], head_dim, device)
    q = torch.randn(len(kv_lens), num_new, heads[0], head_dim, device=device)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    positions = (lengths[:, None] - num_new + torch.arange(num_new, device=device)).clamp(min=0)
    options = {"positions_BT": positions, "window": window}
    if kernel == "reference":
        out = decode_attention_reference(q, keys, values, table, lengths, page_size, **options)
    else:
        out = decode_attention_triton(q, keys, values, table, lengths, page_size, **options, splits=splits)
    for row, kv_len in enumerate(kv_lens):
        if not kv_len:
            assert not out[row].any()
            continue
        key, query = torch.arange(kv_len)[None, :], torch.arange(kv_len - num_new, kv_len)[:, None]
        seen = (key <= query) & (key > query - (window or kv_len + 1))
        expected = plain_attention(q[row], keys, values, table[row], kv_len, page_size, seen)
        torch.testing.assert_close(out[row], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("page_size", "splits", "window"), [(128, 8, None), (16, 1, None), (128, 1, 20)])
def test_fewer_keys_than_new_tokens(kernel, page_size, splits, window):
    """With fewer keys than new tokens only the last new tokens belong to the sequence; the others must not affect them."""
    device, num_new = "cpu" if kernel == "reference" else device_of_kernels(), 64
    kv_lens = [5, 0, 63, 64, 150]
    keys, values, table = scattered_cache(kv_lens, page_size, 1, 16, device)
    q = torch.randn(len(kv_lens), num_new, 2, 16, device=device)
    lengths = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    positions = (lengths[:, None] - num_new + torch.arange(num_new, device=device)).clamp(min=0)
    arguments = (q, keys, values, table, lengths, page_size)
    if kernel == "reference":
        out = decode_attention_reference(*arguments, positions_BT=positions, window=window)
    else:
        out = decode_attention_triton(*arguments, positions_BT=positions, window=window, splits=splits)
        assert out.isfinite().all()
    for row, kv_len in enumerate(kv_lens):
        count = min(kv_len, num_new)
        key, query = torch.arange(kv_len)[None, :], torch.arange(kv_len - count, kv_len)[:, None]
        seen = (key <= query) & (key > query - (window or kv_len + 1))
        expected = plain_attention(q[row, num_new - count :], keys, values, table[row], kv_len, page_size, seen)
        torch.testing.assert_close(out[row, num_new - count :], expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("num_new", "tail", "splits", "window"), [(12, 12, 1, None), (4, 13, 2, None), (64, 64, 2, 50)])
def test_tree(kernel, num_new, tail, splits, window):
    """Each new token attends to the accepted text and to its own ancestors among the last `tail` keys."""
    device = "cpu" if kernel == "reference" else device_of_kernels()
    accepted, page_size, head_dim = [0, 3, 100], 16, 32
    kv_lens = [length + tail for length in accepted]
    keys, values, table = scattered_cache(kv_lens, page_size, 2, head_dim, device)
    q = torch.randn(len(kv_lens), num_new, 6, head_dim, device=device)
    visible = torch.rand(len(kv_lens), num_new, tail) < 0.4
    visible[:, :, 0] = True
    depth = torch.randint(0, tail, (len(kv_lens), num_new))
    bits = torch.zeros(len(kv_lens), num_new, dtype=torch.int64)
    for place in range(tail):
        bits |= visible[:, :, place].long() << place
    positions = torch.tensor(accepted)[:, None] + depth
    arguments = (q, keys, values, table, torch.tensor(kv_lens, dtype=torch.int32, device=device), page_size)
    options = {"tail_bits_BT": bits.to(device), "tail": tail, "positions_BT": positions.to(device), "window": window}
    if kernel == "reference":
        out = decode_attention_reference(*arguments, **options)
    else:
        out = decode_attention_triton(*arguments, **options, splits=splits)
    for row, (length, kv_len) in enumerate(zip(accepted, kv_lens, strict=True)):
        seen = torch.ones(num_new, kv_len, dtype=torch.bool)
        seen[:, length:] = visible[row]
        if window is not None:
            seen &= torch.arange(kv_len)[None, :] > positions[row][:, None] - window
            # Rows without any visible key are not compared; in practice a token always attends to itself.
        some = seen.any(1)
        expected = plain_attention(q[row], keys, values, table[row], kv_len, page_size, seen)
        torch.testing.assert_close(out[row][some], expected[some], atol=1e-4, rtol=1e-4)


def test_the_number_of_splits_fills_the_device():
    assert choose_splits(2048 * 3, 8192, 264) == 1
    assert choose_splits(3, 8192, 264) == 64
    assert choose_splits(3, 100, 264) == 2
    assert choose_splits(3 * 16, 8192, 264) == 4
