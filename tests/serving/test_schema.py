"""schemathesis sends requests that the OpenAPI description allows, and others: none causes a server error."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.serving.conftest import TINY_FLAGS
from tests.serving.processes import ServerProcess

EXAMPLES = int(os.environ.get("FLEDGE_SCHEMA_EXAMPLES", "12"))


@pytest.fixture(scope="module")
def described_server(tiny_folder: Path) -> Iterator[ServerProcess]:
    short = ["--max-model-len", "64", "--uvicorn-log-level", "warning"]  # so that answers without max_tokens end soon
    tools = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with ServerProcess([str(tiny_folder), *TINY_FLAGS, *short, *tools]) as server:
        yield server
        assert "Traceback" not in server.output()


@pytest.fixture(scope="module")
def description(described_server: ServerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{described_server.url}/openapi.json")


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_causes_a_server_error(description: schemathesis.BaseSchema, mode: GenerationMode) -> None:
    statuses: Counter[int] = Counter()
    for found in description.get_all_operations():
        operation = found.ok()

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
        )
        def check(case: schemathesis.Case) -> None:
            response = case.call(timeout=60)
            statuses[response.status_code] += 1
            case.validate_response(response, checks=[not_a_server_error])

        if mode is GenerationMode.POSITIVE or operation.method == "post":
            check()
    assert sum(statuses.values()) >= EXAMPLES
    assert statuses[200] or mode is GenerationMode.NEGATIVE
    assert statuses[400]
