"""Tests against real vLLM run only with `-m vllm`. FLEDGE_VLLM_PYTHON must be a Python that has vLLM installed."""

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
    """A trained target, shared by all tests because training takes seconds."""
    torch.set_num_threads(1)
    return trained_target()
