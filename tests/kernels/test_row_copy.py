"""Copying rows with numpy gives the same result as with torch."""

from __future__ import annotations

import pytest
import torch

from fledge.kernels.row_copy import copy, join, put, take


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_row_copies_equal_those_of_torch(dtype):
    x, rows = torch.randn(7, 5).to(dtype), [6, 0, 3, 3]
    assert torch.equal(take(x, rows), x[rows])
    assert torch.equal(join([x[:2], x[4:]]), torch.cat([x[:2], x[4:]]))
    changed, values = x.clone(), torch.randn(2, 5).to(dtype)
    put(changed, [5, 1], values)
    assert torch.equal(changed[[5, 1]], values)
    assert torch.equal(changed[[0, 2, 3, 4, 6]], x[[0, 2, 3, 4, 6]])
    twin = copy(x[:, 1:])
    assert torch.equal(twin, x[:, 1:])
    assert twin.is_contiguous()
    twin.zero_()
    assert x[:, 1:].any(), "a copy must not share memory"
