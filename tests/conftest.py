"""Fixtures shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The real default model, fetched on first use; tests that take it carry the marker `real`."""
    from fledge import sources

    return sources.resolve("smollm2-135m")
