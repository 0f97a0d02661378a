"""Tests against real vLLM run only when asked for by `-m vllm`, with FLEDGE_VLLM_PYTHON naming a Python that has it."""

from __future__ import annotations

import pytest
import torch

from tests.interop.trained import trained_target


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "vllm: runs real vLLM, from its own virtual environment")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "vllm" in (config.option.markexpr or ""):
        return
    dropped = [item for item in items if item.get_closest_marker("vllm")]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]


@pytest.fixture(scope="session")
def target():
    """Shared by all tests that need a target worth predicting: training it takes seconds."""
    torch.set_num_threads(1)
    return trained_target()
