"""`bench-serve`: the load client against a real server process, its figures and its errors."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fledge.bench.conform_client import Broken, Endpoint, _whole
from fledge.bench.load import Acceptance, LoadReport, LoadSettings, Sample, run_level
from fledge.bench.load_client import ProtocolError, ResponseReader, read_stream
from fledge.bench.load_report import load_table, read_conversations
from fledge.bench.provenance import provenance
from fledge.cli import bench_serve, serve
from fledge.errors import UserError
from tests.serving.processes import ServerProcess


def command_line() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench_serve.bench_serve)
    app.command(context_settings=serve.CONTEXT_SETTINGS, add_help_option=False)(serve.serve)
    return app


@pytest.mark.parametrize(("width", "runs"), [(60, ["server"]), (80, ["speculative", "plain"]), (120, ["server"])])
def test_the_table_fits_the_width_without_cutting_words(width: int, runs: list[str]) -> None:
    sample = Sample(seconds=9.876, first_token_seconds=1.234, gaps=[0.123], prompt_tokens=10, completion_tokens=256)
    reports = [LoadReport(level, 10.0, [sample] * 1000, Acceptance(100, 300, 250)) for level in (1, 256)]
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(load_table("http://localhost:8000", [(name, reports) for name in runs], width))
    shown = console.export_text()
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert {"concurrency", "tok/s", "user", "TTFT", "acceptance", "length"} <= set(shown.split())
    assert set(runs) <= set(shown.split()) or len(runs) == 1
    assert ("ITL" in shown) == (width == 120)


def test_bench_serve_prints_a_table_and_writes_json_and_a_chart(tiny_server: ServerProcess, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"the cat {number}"}) + "\n" for number in range(6)))
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["bench-serve", tiny_server.url + "/v1", "--data", str(data), "--concurrency", "1,3", "--max-tokens", "40"]
    arguments += ["--ignore-eos", "--plain", "--out", str(figures), "--png", str(picture), "--request-rate", "200"]
    result = CliRunner().invoke(command_line(), arguments, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "tok/s per user" in result.output
    runs = json.loads(figures.read_text())["runs"]
    assert set(runs) == {"speculative", "plain"}
    for reports in runs.values():
        assert [report["concurrency"] for report in reports] == [1, 3]
        for report in reports:
            assert report["errors"] == []
            assert report["requests"] == 6
            assert report["output_tokens"] == 240
            assert 0 < report["ttft_ms"]["p50"] <= report["latency_ms"]["p50"]
            assert report["per_user_tokens_per_second"] > 0
    assert runs["plain"][0]["acceptance"]["drafts"] == 0
    assert runs["speculative"][0]["acceptance"]["drafts"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_server_that_is_not_running_is_reported(tmp_path: Path) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("hello\n")
    result = CliRunner().invoke(command_line(), ["bench-serve", "http://127.0.0.1:9", "--data", str(data)])
    assert isinstance(result.exception, UserError)
    assert "not running" in str(result.exception)


def test_prompt_files_of_common_formats(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [
        {"prompt": "a"},
        {"question": "a"},
        {"turns": ["a", "b"]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "x"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "x"}]},
    ]
    file.write_text("\n".join(json.dumps(row) for row in rows))
    assert read_conversations(str(file)) == [[{"role": "user", "content": "a"}]] * 5
    assert len(read_conversations("builtin")) > 1
    file.write_text('{"answer": 3}')
    with pytest.raises(UserError, match="line 1"):
        read_conversations(str(file))


def test_figures_of_a_report() -> None:
    samples = [Sample(seconds=1.1, first_token_seconds=0.1, completion_tokens=11), Sample(error="gone")]
    report = LoadReport(2, 2.0, samples, Acceptance())
    assert report.per_user_tokens_per_second == pytest.approx(10)
    assert report.tokens_per_second == pytest.approx(5.5)
    assert report.milliseconds("tpot")["p50"] == pytest.approx(100)
    assert report.errors == ["gone"]


def test_tokens_that_arrive_at_once_do_not_count_as_decoding_speed() -> None:
    steady = [Sample(seconds=1.1, first_token_seconds=0.1, completion_tokens=101) for _ in range(3)]
    # All tokens in one read; and half of them in the first of two reads that came 10 microseconds apart.
    at_once = Sample(seconds=1.1, first_token_seconds=1.1, completion_tokens=101, first_arrival_share=1.0)
    nearly = Sample(seconds=1.10001, first_token_seconds=1.1, completion_tokens=101, first_arrival_share=0.5)
    report = LoadReport(5, 1.2, [*steady, at_once, nearly], Acceptance())
    assert report.per_user_tokens_per_second == pytest.approx(100)
    assert report.mean_per_user_tokens_per_second == pytest.approx((300 + 50.5) / 3.00001)
    assert at_once.token_seconds is None
    alone = LoadReport(1, 1.2, [at_once], Acceptance())
    assert alone.per_user_tokens_per_second == 0
    assert alone.milliseconds("tpot") == {}
    # Half of 100 tokens at once, the others over the next second: 50 tokens/s, not 99.
    half = Sample(seconds=2.0, first_token_seconds=1.0, completion_tokens=100, first_arrival_share=0.5)
    assert LoadReport(1, 2.0, [half], Acceptance()).per_user_tokens_per_second == pytest.approx(50)


def test_metrics_that_fail_at_the_end_give_no_negative_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([Acceptance(5.0, 10.0, 7.0, (4.0, 3.0)), None])

    async def read(_: Any) -> Acceptance | None:
        return next(answers)

    monkeypatch.setattr("fledge.bench.load.read_acceptance", read)
    report = asyncio.run(run_level(LoadSettings("http://127.0.0.1:9", model="m"), [], 1))
    assert report.acceptance == Acceptance()


def test_events_of_one_read_arrive_together() -> None:
    """The server sends its events in two bursts, 0.2 s apart. All events of one read get the same arrival time."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        ok = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
        if b"POST" not in head:
            writer.write(ok + json.dumps({"data": [{"id": "m"}]}).encode())
        else:
            event = b"data: " + json.dumps({"choices": [{"delta": {"content": "abcd"}}]}).encode() + b"\n\n"
            usage = b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": 100}}).encode() + b"\n\n"
            writer.write(ok)
            for burst in (event * 80, event * 20 + usage + b"data: [DONE]\n\n"):
                writer.write(burst)
                await writer.drain()
                await asyncio.sleep(0.2)
        writer.close()

    async def measure() -> LoadReport:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            return await run_level(LoadSettings(url), [[{"role": "user", "content": "x"}]], 1)

    report = asyncio.run(measure())
    assert report.errors == []
    (sample,) = report.samples
    assert len(sample.gaps) == 1
    assert sample.decode_tokens == pytest.approx(20)
    waited = sample.seconds - sample.first_token_seconds
    assert report.per_user_tokens_per_second == pytest.approx(20 / waited)
    assert waited > 0.19  # no upper bound, for a busy machine


DONE = b"data: [DONE]\n\n"
USAGE = b'data: {"usage": {"completion_tokens": 1}}\n\n'
INVALID_STREAMS = {
    b"data: 5\n\n": "does not follow the API",
    b"data: []\n\n": "does not follow the API",
    b"data: {\n\n": "does not follow the API",
    b'data: {"choices": 5}\n\n': "does not follow the API",
    b'data: {"choices": [5]}\n\n': "does not follow the API",
    b'data: {"choices": [{"delta": 5}]}\n\n': "does not follow the API",
    b'data: {"choices": [{"delta": {"content": 5}}]}\n\n': "does not follow the API",
    b'data: {"choices": [{"delta": {"tool_calls": [5]}}]}\n\n': "does not follow the API",
    b'data: {"usage": 5}\n\n': "does not follow the API",
    b'data: {"usage": {"completion_tokens": "x"}}\n\n': "does not follow the API",
    b'data: {"error": {"message": "no"}}\n\n': "no",
    b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n' + DONE: "no usage",
    USAGE: "[DONE]",
}


@pytest.mark.parametrize("stream", INVALID_STREAMS)
def test_an_invalid_stream_is_an_error_of_its_sample(stream: bytes) -> None:
    assert INVALID_STREAMS[stream] in (read_stream(0.0, [(1.0, stream)]).error or "")


def test_a_null_error_field_is_no_error() -> None:
    text = b'data: {"error": null, "choices": [{"delta": {"content": "hi"}}]}\n\n'
    for end in (DONE, DONE.strip()):
        sample = read_stream(0.0, [(1.0, text), (2.0, USAGE + end)])
        assert (sample.error, sample.completion_tokens, sample.first_token_seconds) == (None, 1, 1.0)


def test_a_stream_may_have_no_space_after_the_colon() -> None:
    text = b'data: {"choices": [{"delta": {"content": "hi"}}]}\n\n' + USAGE
    for end in (DONE, DONE.strip()):
        sample = read_stream(0.0, [(1.0, (text + end).replace(b"data: ", b"data:"))])
        assert (sample.error, sample.completion_tokens) == (None, 1)


def test_a_client_process_sends_nothing_unless_it_is_told_to_go() -> None:
    task = pickle.dumps((LoadSettings("http://127.0.0.1:9"), [[{"role": "user", "content": "x"}]], 1))
    command = [sys.executable, "-m", "fledge.bench.load_client"]
    done = subprocess.run(command, input=task, capture_output=True, timeout=60)  # its input ends without "go"
    assert (done.returncode, done.stdout) == (1, b"ready\n")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e308, "x", None])
def test_invalid_log_probabilities_are_refused(value: Any) -> None:
    entry = {"token": "x", "logprob": value, "top_logprobs": []}
    with pytest.raises(Broken, match="does not follow the API"):
        _whole({"choices": [{"message": {"content": "x"}, "logprobs": {"content": [entry]}}]})


@pytest.mark.parametrize("models", [b"[]", b"5", b'{"data": null}', b'{"data": [5]}', b'{"data": {}}', b'{"data": []}'])
def test_a_server_with_an_invalid_model_list_is_reported(models: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + models)
        writer.close()

    async def measure() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(UserError, match="not an OpenAI-compatible server"):
                await run_level(LoadSettings(url), [[{"role": "user", "content": "x"}]], 1)
            endpoint = Endpoint.open(url)
            with pytest.raises(UserError, match=r"not an OpenAI-compatible server|serves no model"):
                await endpoint.connect()

    asyncio.run(measure())


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://127.0.0.1:99999", "http://", "http://a\nb"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(UserError, match="not a URL"):
        LoadSettings(url)
    with pytest.raises(UserError, match="not a URL"):
        Endpoint.open(url)


def test_invalid_keys_are_refused_and_keys_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("schlüssel", "a\nb"):
        with pytest.raises(UserError, match="API key"):
            LoadSettings("http://127.0.0.1:1", api_key=key)
        with pytest.raises(UserError, match="API key"):
            Endpoint.open("http://127.0.0.1:1", api_key=key)
    with pytest.raises(UserError, match="--api-key"):
        LoadSettings("http://me:secret@127.0.0.1:1")
    assert Endpoint.open("http://me:secret@127.0.0.1:1/v1").url == "http://127.0.0.1:1"
    words = [
        "conform",
        "http://me:secret@h:1/v1",
        "--api-key",
        "secret",
        "--against-api-key=secret",
        "--api_key",
        "secret",
        "--quick",
    ]
    monkeypatch.setattr(sys, "argv", ["/usr/bin/fledge", *words])
    shown = provenance()["command"]
    assert shown == "fledge conform http://***@h:1/v1 --api-key *** --against-api-key=*** --api_key *** --quick"


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n1a;x=y\r\n" + b"d" * 26 + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_responses_are_parsed_in_pieces_of_any_size(size: int) -> None:
    reader, body = ResponseReader(), b""
    for at in range(0, len(CHUNKED), size):
        assert not reader.is_complete or at > len(CHUNKED) - 4
        body += reader.feed(CHUNKED[at : at + size])
    assert (reader.status, body, reader.is_complete, reader.keeps_open) == (200, b"abc" + b"d" * 26, True, True)
    reader = ResponseReader()
    head = b"HTTP/1.1 404 No\r\nContent-Length: 4\r\nConnection: close\r\n\r\n"
    assert b"".join(reader.feed(head[at : at + size]) for at in range(0, len(head), size)) == b""
    with pytest.raises(ProtocolError):
        reader.end()
    assert reader.feed(b"gone") == b"gone"
    assert (reader.status, reader.is_complete, reader.keeps_open) == (404, True, False)


def test_several_processes_send_every_request_once(tiny_server: ServerProcess) -> None:
    prompts = [[{"role": "user", "content": f"the cat {number}"}] for number in range(7)]
    settings = LoadSettings(tiny_server.url, max_tokens=20, ignore_eos=True, processes=3)
    report = asyncio.run(run_level(settings, prompts, 5))
    assert report.errors == []
    assert len(report.samples) == 7
    assert report.output_tokens == 140
    assert 0 < max(sample.seconds for sample in report.samples) <= report.seconds


def test_acceptance_is_read_from_prometheus_text() -> None:
    def text(drafts: int, accepted: int) -> str:
        at = [
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{p}"}} {accepted // 2}.0' for p in (0, 1)
        ]
        lines = [f'vllm:spec_decode_num_drafts_total{{engine="0"}} {drafts}.0', "# HELP x y"]
        lines.append(f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0')
        return "\n".join(lines + at)

    found = Acceptance.parse(text(30, 40)).since(Acceptance.parse(text(10, 10)))
    assert found.length == pytest.approx(1 + 30 / 20)
    assert found.by_position == pytest.approx([0.75, 0.75])
    assert Acceptance.parse("").length is None


def test_the_recorded_commit_is_not_that_of_an_enclosing_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    (tmp_path / "site-packages").mkdir()
    monkeypatch.setattr("fledge.bench.provenance.ROOT", tmp_path / "site-packages")
    assert provenance()["commit"] is None
    monkeypatch.setattr("fledge.bench.provenance.ROOT", tmp_path)
    assert provenance()["commit"]


def test_serve_passes_all_arguments_to_the_servers_parser() -> None:
    runner = CliRunner()
    assert "--speculative-config" in runner.invoke(command_line(), ["serve", "--help"]).output
    refused = runner.invoke(command_line(), ["serve", "some/model", "--tensor-parallel-size", "4"])
    assert isinstance(refused.exception, UserError)
    assert "--engine vllm" in str(refused.exception)


def test_a_client_process_sends_large_results_when_unbuffered():
    """With PYTHONUNBUFFERED a single write to a pipe stops after 64 KiB, so the process must write the rest, too."""
    code = """
from fledge.bench import load_client
def measured(work):
    work.close()
    return load_client.Outcome([bytes(400_000)], 0.0, 1.0)
load_client.run = measured
load_client.main()
"""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        pickle.dump((LoadSettings("http://127.0.0.1:1"), [], 1), process.stdin)
        process.stdin.close()
        outcome = pickle.loads(process.stdout.read())
    assert [len(sample) for sample in outcome.samples] == [400_000]
