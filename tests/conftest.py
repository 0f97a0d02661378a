"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

# Tests run on as many processes as there are cores; two threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model, fetched on first use; tests that take it carry the marker `real`."""
    from fledge import sources

    return sources.resolve("smollm2-135m")
