"""`by_device` calls a kernel or its reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fledge.kernels import triton_support
from fledge.kernels.triton_support import by_device


class State(NamedTuple):
    tokens: torch.Tensor
    count: int = 0


@pytest.mark.parametrize("arguments", [(torch.ones(2), 3), (3, torch.ones(2)), (3, State(torch.ones(2)), torch.zeros(1))])
def test_the_first_tensor_argument_decides(arguments, monkeypatch):
    asked = []
    run = by_device(lambda *_, **options: ("kernel", options), lambda *_, **options: ("reference", options))
    assert run(*arguments, window=2) == ("reference", {"window": 2})
    monkeypatch.setattr(triton_support, "use_triton", lambda x: asked.append(x) or True)
    assert run(*arguments, window=2) == ("kernel", {"window": 2})
    assert [x.tolist() for x in asked] == [[1.0, 1.0]]
