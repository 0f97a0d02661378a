"""The kernel that rotates, writes the KV cache and attends equals the separate steps."""

from __future__ import annotations

import pytest
import torch

from fledge.config import RopeConfig
from fledge.kernels.attention import launch_config, rope_attention
from fledge.kernels.attention.decode_attention import decode_attention_reference
from fledge.kernels.attention.launch_config import FEW, SOME
from fledge.kernels.attention.rope_attention import rope_attention_reference, rope_attention_triton
from fledge.kernels.attention.rope_cache import rope_cache_reference
from fledge.models.layers import Rotary
from tests.kernels.support import KERNELS, running
from tests.kernels.test_decode_attention import scattered_cache


def test_the_config_for_few_keys_needs_few_programs_and_shared_memory(monkeypatch):
    device = torch.device("cuda", 0)
    for size, wanted in ((232448, FEW), (166912, SOME), (101376, SOME)):
        monkeypatch.setattr(launch_config, "shared_memory", lambda _, size=size: size)
        monkeypatch.setattr(launch_config, "multiprocessors", lambda _: 132)
        assert launch_config.choose_config(48, launch_config.FEW_KEYS, device) is wanted
        assert launch_config.choose_config(49, 100, device) is SOME
        assert launch_config.choose_config(1, launch_config.FEW_KEYS + 1, device) is SOME
    assert launch_config.choose_config(1, 100, torch.device("cpu")) is SOME


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("num_new", "heads", "head_dim", "page_size", "window", "split", "with_norms"),
    [
        (1, (9, 3), 64, 128, None, 512, False),
        (4, (9, 3), 64, 16, None, 128, True),
        (12, (9, 3), 80, 64, None, 128, False),
        (6, (4, 4), 128, 128, None, 64, False),
        (6, (4, 2), 32, 64, 140, 256, True),
        (3, (2, 1), 8, 16, 70, 256, False),
    ],
)
def test_rope_attention(kernel, num_new, heads, head_dim, page_size, window, split, with_norms, monkeypatch):
    """Rows have different numbers of new tokens; one row is empty, one begins its text; keys are divided into splits."""
    run, device = running(kernel, rope_attention_reference, rope_attention_triton)
    starts, counts = [0, 70, 600, 330], [num_new, 0, 1, num_new]
    kv_lens = [start + num_new for start in starts]
    keys, values, table = scattered_cache(kv_lens, page_size, heads[1], head_dim, device)
    rotary = Rotary(head_dim, 1024, RopeConfig())
    rotary.reserve(1024)
    rope_table = rotary.table.to(device)
    qkv = torch.randn(4 * num_new, (heads[0] + 2 * heads[1]) * head_dim, device=device)
    norms = (torch.randn(head_dim, device=device), torch.randn(head_dim, device=device), 1e-6) if with_norms else None

    expected, wanted_keys, wanted_values = [], keys.clone(), values.clone()
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        if not count:
            expected.append(qkv[:0, : heads[0] * head_dim])
            continue
        rotated = qkv[row * num_new : row * num_new + count].clone()
        position = torch.arange(start, start + count, device=device)
        slots = table[row].long()[position // page_size] * page_size + position % page_size
        rope_cache_reference(rotated, rope_table, position, slots, wanted_keys, wanted_values, norms)
        q = rotated.view(1, count, -1, head_dim)[:, :, : heads[0]]
        lens = torch.tensor([start + count], device=device)
        options = {"positions_BT": position[None], "window": window}
        out = decode_attention_reference(q, wanted_keys, wanted_values, table[row : row + 1], lens, page_size, **options)
        expected.append(out[0].flatten(1))

    arguments = (qkv, rope_table, torch.tensor(starts, device=device), torch.tensor(counts, device=device), keys, values)
    monkeypatch.setattr(rope_attention, "SPLIT", split)
    ways = [{}, {}, {"streamed": True}, {"config": FEW}, {"programs": 1}, {"programs": 2}] if kernel == "triton" else [{}]
    for options in ways:  # twice with the default: a call must leave the counters of arrived programs reset
        out = run(*(x.clone() if x is qkv else x for x in arguments), table, page_size, norms=norms, window=window, **options)
        torch.testing.assert_close(keys, wanted_keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(values, wanted_values)
        for row, count in enumerate(counts):
            found = out[row * num_new : (row + 1) * num_new]
            torch.testing.assert_close(found[:count], expected[row], atol=1e-4, rtol=1e-4)
            assert found.isfinite().all()
            assert count or not found.any()
