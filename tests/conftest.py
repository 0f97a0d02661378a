"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.kernels import native, native_build

# One test process runs per core, so more than one thread in each would only compete for the cores.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Seeds all generators before each test. FLEDGE_TEST_SEED=N sets another seed, to find tests that pass by luck."""
    start = int(os.environ.get("FLEDGE_TEST_SEED", "0"))
    torch.manual_seed(start)
    random.seed(start)
    np.random.seed(start)


@pytest.fixture(scope="session", autouse=True)
def guarded_weights() -> None:
    """Under `make test-sanitize`, allocates each packed weight on the heap: the sanitizer detects overruns only there."""
    if "sanitize" in os.environ.get(native_build.FLAGS_VARIABLE, ""):
        native._arena.take = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model, downloaded on first use. Tests that use it have the marker `real`."""
    from fledge import sources

    return sources.resolve("smollm2-135m")
