"""Fixtures of the serving tests: a tiny model on disk, an app in this process, and a real server process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from fledge.serving import flags
from fledge.serving.app import create_app
from fledge.serving.service import Service
from tests.serving.model_folder import make_model
from tests.serving.processes import ServerProcess, wait_until_ready

TINY_FLAGS = [
    "--no-engine-process",  # so that tests can access the engine; tests of the engine process override it
    "--no-adaptive-depth",  # so that the depth does not depend on timing
    "--served-model-name",
    "tiny",
    "--drafter",
    "ngram",
    "--dtype",
    "float32",
    "--threads",
    "1",
    "--max-num-seqs",
    "8",
]
# On a busy machine compiling a grammar takes long.
PATIENT = ["--max-grammar-seconds", "60"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "browser: needs chromium; left out unless asked for with -m browser")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "browser" in (config.option.markexpr or ""):
        return
    left_out = [item for item in items if item.get_closest_marker("browser")]
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def tiny_server(tiny_folder: Path) -> Iterator[ServerProcess]:
    """A real server process, shared by tests that do not change its state."""
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with ServerProcess([str(tiny_folder), *TINY_FLAGS, *tools, *PATIENT]) as server:
        yield server


@pytest.fixture
def in_process(tiny_folder: Path) -> Callable:
    """Starts the app without a socket: `async with in_process("--api-key", "k") as (client, service)`."""

    @asynccontextmanager
    async def start(*extra: str) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
        service = Service(flags.parse([str(tiny_folder), *TINY_FLAGS, *extra]))
        app = create_app(service)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                await wait_until_ready(client)
                yield client, service

    return start
