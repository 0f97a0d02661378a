"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from fledge.kernels import native, native_build

# Tests run on as many processes as there are cores; two threads each would only wait for one another.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in every run, whatever ran before; FLEDGE_TEST_SEED=N draws others, to find tests that pass by luck."""
    start = int(os.environ.get("FLEDGE_TEST_SEED", "0"))
    torch.manual_seed(start)
    random.seed(start)
    np.random.seed(start)


@pytest.fixture(scope="session", autouse=True)
def guarded_weights() -> None:
    """Under `make test-sanitize` packed weights come from the heap, one block each: only there is an overrun seen."""
    if "sanitize" in os.environ.get(native_build.FLAGS_VARIABLE, ""):
        native._arena.take = lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model, fetched on first use; tests that take it carry the marker `real`."""
    from fledge import sources

    return sources.resolve("smollm2-135m")
