"""`fledge serve --engine vllm` with real vLLM and the shipped drafter."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from fledge.bench.conform import AGAIN, FAIL, LOAD, NOT_SUPPORTED, PASS, STREAM, VALID
from fledge.bench.conform_scenarios import scenarios
from fledge.bench.load import Acceptance
from fledge.cli.options import CHECK_FAILED
from tests.interop.runs import vllm_python
from tests.serving.processes import ServerProcess

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
FLAGS = ["--engine", "vllm", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "4"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    assert vllm_python()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}.items():
            patch.setenv(name, value)
        started = ServerProcess(["smollm2-135m", *FLAGS, "--tensor-parallel-size", "1", "--depth", "3"], timeout=900)
    with started:
        yield started


def test_streamed_chat_uses_the_drafter(server: ServerProcess) -> None:
    assert httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"] == "smollm2-135m"
    before = Acceptance.parse(httpx.get(f"{server.url}/metrics").text)
    body = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Write the numbers from one to ten."}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    text, usage = "", None
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=300) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert len(text) > 40
    assert usage["completion_tokens"] > 10
    seen = Acceptance.parse(httpx.get(f"{server.url}/metrics").text).since(before)
    assert seen.drafts > 5
    assert len(seen.accepted_at) == 3
    assert seen.length > 1.3  # the shipped drafter has 2 or more, a wrong one 1.0


def test_conform_reports_on_it(server: ServerProcess, tmp_path: Path) -> None:
    """The results depend on vLLM; the report must have one for every scenario."""
    out = tmp_path / "report.json"
    command = [sys.executable, "-m", "fledge", "conform", server.url, "--quick", "--users", "4", "--timeout", "600"]
    done = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True, timeout=1700)
    assert done.returncode in (0, CHECK_FAILED), done.stderr[-2000:]
    report = json.loads(out.read_text())
    assert report["model"] == "smollm2-135m"
    assert {scenario.name for scenario in scenarios()} <= {row["scenario"] for row in report["rows"]}
    assert {VALID, STREAM, AGAIN, LOAD} <= {row["check"] for row in report["rows"]}
    assert {row["status"] for row in report["rows"]} <= {PASS, FAIL, NOT_SUPPORTED}
    assert report["counts"][PASS] > 0


def test_sigterm_ends_it(server: ServerProcess) -> None:
    """Must be the last test in this file, because it ends the server."""
    assert server.terminate(timeout=120) == 0
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{server.url}/health", timeout=5)
