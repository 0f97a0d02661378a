"""The load client against a real server process, and what it makes of figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from fledge.bench.load import Acceptance, LoadReport, Sample
from fledge.bench.load_report import read_conversations
from fledge.cli import bench_serve, serve
from fledge.errors import UserError
from tests.serving.processes import ServerProcess


def command_line() -> typer.Typer:
    app = typer.Typer()
    app.command()(bench_serve.bench_serve)
    app.command(**serve.COMMAND)(serve.serve)
    return app


def test_levels_table_json_and_picture(tiny_server: ServerProcess, tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"the cat {number}"}) + "\n" for number in range(6)))
    figures, picture = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["bench-serve", tiny_server.url + "/v1", "--data", str(data), "--concurrency", "1,3", "--max-tokens", "40"]
    arguments += ["--ignore-eos", "--plain", "--json", str(figures), "--png", str(picture), "--request-rate", "200"]
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


def test_a_server_that_is_not_there_is_told_in_a_line(tmp_path: Path) -> None:
    data = tmp_path / "prompts.txt"
    data.write_text("hello\n")
    result = CliRunner().invoke(command_line(), ["bench-serve", "http://127.0.0.1:9", "--data", str(data)])
    assert isinstance(result.exception, UserError)
    assert "not running" in str(result.exception)


def test_prompts_in_the_usual_shapes(tmp_path: Path) -> None:
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


def test_figures_are_what_their_names_say() -> None:
    samples = [Sample(seconds=1.1, first_token_seconds=0.1, completion_tokens=11), Sample(error="gone")]
    report = LoadReport(2, 2.0, samples, Acceptance())
    assert report.per_user_tokens_per_second == pytest.approx(10)
    assert report.tokens_per_second == pytest.approx(5.5)
    assert report.milliseconds("tpot")["p50"] == pytest.approx(100)
    assert report.errors == ["gone"]


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


def test_serve_passes_everything_on() -> None:
    runner = CliRunner()
    assert "--speculative-config" in runner.invoke(command_line(), ["serve", "--help"]).output
    refused = runner.invoke(command_line(), ["serve", "some/model", "--tensor-parallel-size", "4"])
    assert isinstance(refused.exception, UserError)
    assert "--engine vllm" in str(refused.exception)
