"""Accepted tree paths are moved to consecutive places: the reference equals `PagedKV.move`, and the kernel the reference."""

from __future__ import annotations

import random

import pytest
import torch

from fledge.kernels.attention.paged import PagedKV
from fledge.kernels.compact_path import compact_path_reference, compact_path_triton
from tests.kernels.support import device_of_kernels, runs_triton

PAGE = 4


def random_case(device: str, num_places: int = 5, num_nodes: int = 11):
    """A cache with pages in random order, and paths of ascending rows after pending tokens at any place in a page."""
    counts = [num_places - 1, 0, 2, 1, num_places - 1]
    starts = [random.randint(0, 9) for _ in counts]
    pages_each = -(-(9 + num_nodes + 1) // PAGE)
    cache = PagedKV(2, 3, 6, len(counts) * pages_each, PAGE, torch.float32, device)
    cache.keys.normal_()
    cache.values.normal_()
    tables = torch.randperm(len(counts) * pages_each).view(len(counts), pages_each).int()
    tables[1] = tables[0]  # an empty row whose pages now belong to another row
    paths = [[0, *sorted(random.sample(range(1, num_nodes + 1), count))] for count in counts]
    paths = [path + [path[-1]] * (num_places - len(path)) for path in paths]
    tensors = (tables, torch.tensor(starts, dtype=torch.int32), torch.tensor(paths), torch.tensor(counts, dtype=torch.int32))
    return cache, *(tensor.to(device) for tensor in tensors)


def test_the_reference_equals_moving_slots_on_the_host():
    cache, tables, starts, paths, counts = random_case("cpu")
    expected = PagedKV(2, 3, 6, cache.keys.shape[2] // PAGE, PAGE, torch.float32, "cpu")
    expected.keys.copy_(cache.keys)
    expected.values.copy_(cache.values)
    for row, count in enumerate(counts.tolist()):
        start, pages, path = int(starts[row]), tables[row].tolist(), paths[row].tolist()
        slots = [
            [pages[place // PAGE] * PAGE + place % PAGE for place in places]
            for places in ([start + r for r in path[1 : count + 1]], range(start + 1, start + count + 1))
        ]
        if count:
            expected.move(*slots)
    before = cache.keys.clone()
    compact_path_reference(cache.keys, cache.values, tables, PAGE, starts, paths, counts)
    assert not torch.equal(cache.keys, before)
    assert torch.equal(cache.keys, expected.keys)
    assert torch.equal(cache.values, expected.values)


class TestKernel:
    pytestmark = runs_triton

    @pytest.mark.parametrize(("num_places", "num_nodes"), [(5, 11), (8, 8)])
    def test_equals_the_reference(self, num_places, num_nodes):
        cache, tables, starts, paths, counts = random_case(device_of_kernels(), num_places, num_nodes)
        keys, values = cache.keys.clone(), cache.values.clone()
        compact_path_triton(cache.keys, cache.values, tables, PAGE, starts, paths, counts)
        compact_path_reference(keys, values, tables, PAGE, starts, paths, counts)
        assert torch.equal(cache.keys, keys)
        assert torch.equal(cache.values, values)
