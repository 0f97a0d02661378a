"""`fledge conform`: every check fails on a server with exactly that fault, and passes on a correct server."""

from __future__ import annotations

import asyncio
import http.server
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fledge.bench.conform import (
    AGAIN,
    CHECKS,
    FAIL,
    LOAD,
    LOSSLESS,
    NOT_SUPPORTED,
    PASS,
    STREAM,
    VALID,
    Conformance,
    ConformReport,
    Row,
    find_switch,
)
from fledge.bench.conform_report import html, markdown, print_report
from fledge.bench.conform_values import SCHEMA, lost_call, schema_problem
from fledge.cli import conform
from fledge.errors import UserError
from tests.bench.fake_server import CITY, FakeServer
from tests.serving.model_folder import make_model
from tests.serving.processes import ServerProcess


def rows_of(*faults: str, switch: bool = True) -> dict[tuple[str, str], Row]:
    async def run() -> list[Row]:
        endpoint = FakeServer(*faults).endpoint()
        return await Conformance(endpoint, endpoint.with_extra(speculate=False) if switch else None).run()

    return {(row.scenario, row.check): row for row in asyncio.run(run())}


def test_correct_server_passes_every_check() -> None:
    rows = rows_of()
    assert {row.status for row in rows.values()} == {PASS}, [row for row in rows.values() if row.status != PASS]
    assert len(rows) == 18 * len(CHECKS) + 1
    assert "drafts" in rows["speculation", "at work"].reason


FAULTS = [
    ("lossy", "chat, greedy", LOSSLESS, "another greedy text.*1.8971 apart.*not a tie"),
    ("lossy", "completions, greedy", LOSSLESS, "another greedy text"),
    ("lossy", "long prompt, shared prefix", LOSSLESS, "another greedy text"),
    (
        "lossy-seeded",
        "chat, seeded",
        LOSSLESS,
        "another text for the same seed; a server that guarantees only the distribution",
    ),
    ("lossy-seeded", "n = 3, seeded", LOSSLESS, "same seed"),
    ("stream-changes", "chat, greedy", STREAM, "another greedy text"),
    ("stream-drops", "chat, seeded", STREAM, "same seed"),
    ("stream-drops", "completions, greedy", STREAM, "another greedy text"),
    ("stream-no-usage", "chat, greedy", STREAM, "usage"),
    ("stream-early-usage", "chat, greedy", STREAM, "usage is not on the last chunk"),
    ("stream-no-done", "completions, greedy", STREAM, r"\[DONE\]"),
    ("stream-no-finish", "chat, greedy", STREAM, "differ in"),
    ("stream-goes-on", "choice", STREAM, "text comes after the finish_reason"),
    ("stream-error", "chat, greedy", STREAM, "out of memory"),
    ("miscounts-stream", "chat, greedy", STREAM, "differ in"),
    ("stream-call-cut", "tools, required", STREAM, "differ in"),
    ("stream-call-cut", "tools, auto", STREAM, "differ in"),
    ("stream-call-nameless", "tools, named", STREAM, "no name or no id"),
    ("overruns", "chat, greedy", VALID, "max_tokens"),
    ("bad-json", "JSON schema, greedy", VALID, "not JSON"),
    ("off-schema", "JSON schema, seeded", VALID, "city is 'Berlin'"),
    ("ignores-schema", "JSON schema, greedy", VALID, "not JSON"),
    ("bad-regex", "regex", VALID, "does not obey"),
    ("bad-choice", "choice", VALID, "does not obey"),
    ("no-call", "tools, required", VALID, "no tool call"),
    ("lost-call", "tools, auto", VALID, "left in the text"),
    ("bad-arguments", "tools, auto", VALID, "not JSON"),
    ("off-schema-call", "tools, required", VALID, "out of range"),
    ("unknown-tool", "tools, named", VALID, "launch_rocket"),
    ("tool-finish", "tools, required", VALID, "finish_reason"),
    ("ignores-stop", "stop strings", VALID, "the text ends"),
    ("stop-leaks", "stop strings", VALID, "the text ends"),
    ("stop-reason", "stop strings", VALID, "finish_reason"),
    ("stop-ids-wrong", "stop token ids", VALID, "not a beginning"),
    ("logprob-positive", "logprobs, chat", VALID, "above 0"),
    ("logprob-sum", "logprobs, chat", VALID, "add up to"),
    ("logprob-not-best", "logprobs, completions", VALID, "is better"),
    ("logprob-absent", "logprobs, chat", VALID, "not among the top"),
    ("logprob-count", "logprobs, chat", VALID, "logprobs for"),
    ("logprob-stream", "logprobs, completions", STREAM, "differ in"),
    ("logprobs-change-text", "logprobs, chat", VALID, "changes the text; at character"),
    ("seed-ignored", "chat, seeded", VALID, "four seeds gave one text"),
    ("seed-forgotten", "completions, seeded", AGAIN, "same seed"),
    ("n-short", "n = 2, greedy", VALID, "1 answers instead of 2"),
    ("n-same", "n = 3, seeded", VALID, "the same text"),
    ("n-greedy-differs", "n = 2, greedy", VALID, "differs from the answer with n = 1"),
    ("prefix", "long prompt, shared prefix", AGAIN, "another greedy text"),
    ("load", "chat, greedy", LOAD, "another greedy text"),
    ("error-500", "long prompt, shared prefix", VALID, "status 500"),
]


@pytest.mark.parametrize(("fault", "scenario", "check", "reason"), FAULTS)
def test_every_fault_is_found(fault: str, scenario: str, check: str, reason: str) -> None:
    row = rows_of(fault)[scenario, check]
    assert row.status == FAIL, row
    assert re.search(reason, row.reason), row


def test_difference_has_place_and_near_tie() -> None:
    row = rows_of("lossy", "tie")["chat, greedy", LOSSLESS]
    assert row.status == FAIL
    assert "0.0048 apart in log-probability: a near tie" in row.reason
    assert row.difference is not None
    assert row.difference.where.startswith("text, character ")
    assert row.difference.here.startswith("'zzz ")  # with speculation
    assert not row.difference.there.startswith("'zzz ")


@pytest.mark.parametrize(
    ("fault", "scenario", "check", "reason"),
    [
        ("refuses-tools", "tools, auto", VALID, "status 400: tools are not for me"),
        ("ignores-regex", "regex", VALID, "ignored: structured_outputs, guided_regex, regex"),
        ("ignores-stop-ids", "stop token ids", VALID, "stop_token_ids is ignored"),
        ("no-tokenize", "stop token ids", VALID, "Not Found"),
        ("no-metrics", "speculation", "at work", "do not count drafts"),
    ],
)
def test_unsupported_features_are_no_failures(fault: str, scenario: str, check: str, reason: str) -> None:
    rows = rows_of(fault)
    assert rows[scenario, check].status == NOT_SUPPORTED
    assert reason in rows[scenario, check].reason
    assert FAIL not in {row.status for row in rows.values()}


def test_long_prompt_is_halved_until_accepted() -> None:
    assert rows_of("short-context")["long prompt, shared prefix", VALID].status == PASS


def test_white_space_in_arguments_is_no_difference() -> None:
    assert rows_of("stream-call-spaced")["tools, required", STREAM].status == PASS


def test_without_a_reference_there_are_self_consistency_rows_only() -> None:
    rows = rows_of("lossy", switch=False)
    assert {check for _, check in rows} == {*CHECKS, "at work"} - {LOSSLESS}
    assert FAIL not in {row.status for row in rows.values()}


@pytest.mark.parametrize(("faults", "status"), [((), PASS), (("reference-drafts",), FAIL)])
def test_a_second_server_must_not_speculate(faults: tuple[str, ...], status: str) -> None:
    async def run() -> list[Row]:
        return await Conformance(FakeServer().endpoint(), FakeServer(*faults).endpoint(speculate=False), quick=True).run()

    rows = {(row.scenario, row.check): row for row in asyncio.run(run())}
    assert rows["chat, greedy", LOSSLESS].status == PASS
    assert rows["speculation", "at work"].status == status


def test_speculation_switch_is_found_only_if_it_works() -> None:
    found = asyncio.run(find_switch(FakeServer().endpoint()))
    assert found is not None
    assert found.extra == {"speculate": False}

    class IgnoresSwitch(FakeServer):
        def answer(self, body, chat):
            return super().answer({k: v for k, v in body.items() if k != "speculate"}, chat)

    assert asyncio.run(find_switch(IgnoresSwitch().endpoint())) is None


def test_reports_escape_the_servers_text() -> None:
    rows = [Row("chat, greedy", VALID, FAIL, "<b>[red]\x1b[31mno"), Row("chat, greedy", STREAM, PASS)]
    report = ConformReport("http://x", "<m>", "1", "nothing", {"users": 16}, rows)
    page = html(report)
    assert "&lt;b&gt;" in page
    assert "<m>" not in page
    console = Console(record=True, width=200, file=io.StringIO())
    print_report(report, console)
    shown = console.export_text()
    assert "<b>[red]\ufffd[31mno" in shown
    assert "failed: 1 pass, 1 fail, 0 not supported" in shown
    assert "| chat, greedy | ✗ | ✓ |" in markdown(report)


def test_small_schema_checker() -> None:
    assert schema_problem(CITY, SCHEMA) == ""
    for name, value in {"days": True, "note": "x" * 25, "seasons": [], "coastal": 1, "city": "Bonn"}.items():
        assert name in schema_problem(CITY | {name: value}, SCHEMA)
    assert "lacks 'city'" in schema_problem({k: v for k, v in CITY.items() if k != "city"}, SCHEMA)
    assert "does not name" in schema_problem(CITY | {"more": 1}, SCHEMA)
    assert lost_call('so: {"name": "f", "arguments": {}}', {"f"})
    assert not lost_call('{"name": "Anna", "arguments": {}} {f', {"f"})


# The command


def command_line() -> typer.Typer:
    app = typer.Typer()
    app.command()(conform.conform)
    return app


@pytest.fixture
def not_a_model_server() -> Iterator[str]:
    """A plain file server, as a user may find on a wrong port."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_unusable_server_is_reported_in_one_line(not_a_model_server: str) -> None:
    for url, words in {
        "http://127.0.0.1:9": "no server answers there",
        not_a_model_server: "is not an OpenAI-compatible server: /v1/models answers 501",
        "localhost:8000": "is not a URL",
    }.items():
        result = CliRunner().invoke(command_line(), [url])
        assert isinstance(result.exception, UserError), result.output
        assert words in str(result.exception)
    result = CliRunner().invoke(command_line(), ["http://127.0.0.1:9", "--out", "report.pdf"])
    assert "report.pdf: the file must end in" in str(result.exception)


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A Fledge server with a tiny model and n-gram drafts."""
    folder = make_model(tmp_path_factory.mktemp("conform-model"), max_positions=2048)
    flags = ["--drafter", "ngram", "--no-adaptive-depth", "--dtype", "float32", "--threads", "1", "--max-num-seqs", "16"]
    flags += ["--served-model-name", "tiny", "--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--api-key", "k"]
    with ServerProcess([str(folder), *flags]) as server:
        yield server


def test_our_own_server(real_server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / f"report.{suffix}" for suffix in ("json", "html", "md")]
    arguments = [
        real_server.url + "/v1",
        "--quick",
        "--api-key",
        "k",
        *(word for file in files for word in ("--out", str(file))),
    ]
    monkeypatch.setattr(sys, "argv", ["fledge", "conform"])
    result = CliRunner().invoke(command_line(), arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    report = json.loads(files[0].read_text())
    failed = [row for row in report["rows"] if row["status"] == FAIL]
    assert not failed
    assert not [row for row in report["rows"] if row["status"] == NOT_SUPPORTED]
    assert result.exit_code == (1 if failed else 0)
    assert "speculate" in report["reference"]
    speculation = next(row for row in report["rows"] if row["scenario"] == "speculation")
    assert speculation["status"] == PASS
    assert "under load = alone" in result.output
    assert "<table>" in files[1].read_text()
    assert "| chat, greedy |" in files[2].read_text()


def test_wrong_key_is_reported(real_server: ServerProcess) -> None:
    result = CliRunner().invoke(command_line(), [real_server.url, "--api-key", "wrong"])
    assert "give its key with --api-key" in str(result.exception)


def test_an_unknown_model_ends_the_run(real_server: ServerProcess) -> None:
    result = CliRunner().invoke(command_line(), [real_server.url, "--api-key", "k", "--model", "other"])
    assert isinstance(result.exception, UserError)
    assert "no request was answered" in str(result.exception)


def test_conform_does_not_import_torch() -> None:
    """The client works with any server, so it must not import torch, which takes seconds."""
    code = "import sys, fledge.bench.conform, fledge.bench.conform_report; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
