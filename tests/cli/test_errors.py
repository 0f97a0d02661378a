"""A user error prints one line on standard error and no traceback, and the exit code is not 0."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from fledge.checkpoints.eagle3 import save_drafter
from fledge.cli.main import main
from tests.interop.tiny_models import save_tokenizer
from tests.tiny import tiny_decoder, tiny_drafter, tiny_drafter_config, tiny_model_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    from fledge.checkpoints.hf import save_decoder

    folder = tmp_path / "model"
    save_decoder(tiny_decoder(), folder)
    save_tokenizer(folder, 128)
    return folder


def fledge(monkeypatch, capsys, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["fledge", *map(str, arguments)])
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def refused(monkeypatch, capsys, *arguments: object) -> str:
    code, out, err = fledge(monkeypatch, capsys, *arguments)
    assert code != 0
    assert not out
    assert "Traceback" not in err
    lines = err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_a_valid_command_succeeds(monkeypatch, capsys, model):
    code, out, err = fledge(monkeypatch, capsys, "generate", "hello", "--model", model, "--max-tokens", 5, "--json", "--raw")
    assert (code, err) == (0, "")
    answer = json.loads(out)
    assert (answer["drafter"], answer["depth"]) == ("n-gram look-up, depth auto (up to 7)", 7)
    assert answer["weights"] == answer["dtype"] != "auto"
    code, _, err = fledge(monkeypatch, capsys, "generate", "hello", "--model", model, "--max-tokens", 5, "--raw")
    assert "no drafter ships for" in err
    assert len(answer["token_ids"]) == answer["completion_tokens"] <= 5
    assert {"text", "finish_reason", "tokens_per_second", "acceptance_length", "acceptance_by_position"} <= answer.keys()


def test_wrong_path(monkeypatch, capsys):
    assert "no/such/folder" in refused(monkeypatch, capsys, "generate", "hello", "--model", "no/such/folder")


def test_unknown_name_suggests_a_known_one(monkeypatch, capsys):
    assert "smollm2-135m" in refused(monkeypatch, capsys, "generate", "hello", "--model", "smolm2-135m")


def test_unknown_architecture(monkeypatch, capsys, model):
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["MambaForCausalLM"]}))
    line = refused(monkeypatch, capsys, "generate", "hello", "--model", model)
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


def test_truncated_safetensors(monkeypatch, capsys, model):
    weights = next(model.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    assert weights.name in refused(monkeypatch, capsys, "generate", "hello", "--model", model)


def test_corrupt_gguf(monkeypatch, capsys, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF\3\0\0\0" + bytes(range(256)))
    assert "model.gguf" in refused(monkeypatch, capsys, "generate", "hello", "--model", file)


def test_drafter_of_another_target(monkeypatch, capsys, model, tmp_path):
    other = tiny_drafter_config(tiny_model_config(hidden_size=48, vocab_size=64, head_dim=12))
    save_drafter(tiny_drafter(other), tmp_path / "drafter")
    line = refused(monkeypatch, capsys, "generate", "hello", "--model", model, "--drafter", tmp_path / "drafter")
    assert "48" in line
    assert "32" in line


def test_missing_drafter(monkeypatch, capsys, model):
    assert "nowhere" in refused(monkeypatch, capsys, "generate", "hello", "--model", model, "--drafter", "nowhere")


@pytest.mark.parametrize("prompt", ["", "   "])
def test_empty_prompt(monkeypatch, capsys, model, prompt):
    assert "empty" in refused(monkeypatch, capsys, "generate", prompt, "--model", model)


def test_prompt_longer_than_the_context(monkeypatch, capsys, model):
    line = refused(monkeypatch, capsys, "generate", "hello " * 800, "--model", model, "--raw")
    assert "512" in line
    assert "shorten" in line


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--depth", "0", "depth"),
        ("--top-p", "1.5", "top_p"),
        ("--temperature", "-1", "temperature"),
        ("--dtype", "int3", "dtype"),
    ],
)
def test_invalid_option_values(monkeypatch, capsys, model, option, value, named):
    assert named in refused(monkeypatch, capsys, "generate", "hello", "--model", model, option, value)


def test_a_tree_needs_an_eagle_drafter(monkeypatch, capsys, model):
    assert "chains" in refused(monkeypatch, capsys, "generate", "hello", "--model", model, "--drafter", "ngram", "--tree")


EVIL = "[bold]x[/bold] [/nothing] \x1b[2J\x07 [link=http://evil]y[/link] end\\"


def check_shown(out: str, times: int) -> None:
    """Names from files and servers may contain Rich markup and terminal escapes. Checks that neither takes effect."""
    assert "\x1b" not in out
    assert "\x07" not in out
    assert "".join(out.split()).count("[bold]x[/bold][/nothing]") == times, out


def test_inspect_prints_names_as_they_are(capsys):
    from fledge.checkpoints.inspect import DrafterReport
    from fledge.cli.inspect import _print

    _print(DrafterReport("folder", "raw", None, 0, 0, (), (EVIL,), (EVIL,), (EVIL,)))
    check_shown(capsys.readouterr().out, 3)


def test_doctor_prints_names_as_they_are(capsys):
    from fledge.bench.doctor import Diagnosis, Trial
    from fledge.cli.doctor import _print

    trial = Trial(EVIL, "", 1.0, 0.5)
    _print(Diagnosis("fault", EVIL, EVIL, None, trial, [trial], [EVIL]))
    check_shown(capsys.readouterr().out, 3)


def test_bench_serve_prints_text_from_a_server_as_it_is(monkeypatch, capsys):
    from fledge.bench import load_report
    from fledge.bench.load import Acceptance, LoadReport, Sample

    report = LoadReport(1, 1.0, [Sample(error=EVIL)], Acceptance())
    monkeypatch.setattr(load_report, "run_levels", lambda *_: [("server", [report])])
    code, out, _ = fledge(monkeypatch, capsys, "bench-serve", "http://x/", "--data", "builtin")
    assert code == 3
    check_shown(out, 1)
    code, _, err = fledge(monkeypatch, capsys, "bench-serve", f"http://x/{EVIL}", "--data", "builtin")
    assert code == 1
    check_shown(err, 1)


def test_bench_prints_names_as_they_are(capsys):
    from rich.console import Console

    from fledge.bench.report import table

    plain = {"tokens_per_second_per_user": 1.0, "tokens_per_second": 1.0, "bandwidth_use": 0.5}
    results = [{"concurrency": 1, "plain": plain, "speculative": []}]
    figures = {"model": EVIL, "device": "cpu", "weights": "float32", "turns": 1, "max_tokens": 1, "results": results}
    figures["baselines"] = [{"baseline": EVIL, "version": "1", "skipped": "x"}]
    Console(width=300).print(table(figures))
    check_shown(capsys.readouterr().out, 2)


def test_drift_prints_names_as_they_are(capsys):
    from rich.console import Console

    from fledge.cli.drift import _print

    sink = {"column": 0, "share": 0.5}
    probes = {"acceptance_length": {5: 2.0}, "looping_texts": 0, "texts": 4, "drift_step": 5, "rms_ratio": 1.0}
    condition = {"name": EVIL, "drafters": {EVIL: {"acceptance_length": {5: 1.5}, "retention": {5: 0.5}, "texts": 4}}}
    best = {"name": "own", "drafters": {EVIL: condition["drafters"][EVIL] | {"acceptance_length": {5: 1.8}}}}
    suite = {"name": "templates", "baseline": None, "depths": [5], "conditions": [condition, best]}
    figures = {"model": EVIL, "sink": sink, "drafters": [{"name": EVIL}], "probes": {EVIL: probes}, "suites": [suite]}
    _print(Console(width=300), figures)
    check_shown(capsys.readouterr().out, 4)


def test_conform_prints_text_from_a_server_as_it_is(capsys):
    from rich.console import Console

    from fledge.bench.conform import FAIL, VALID, ConformReport, Row
    from fledge.bench.conform_report import print_report

    report = ConformReport("http://x", EVIL, EVIL, EVIL, {}, [Row("chat, greedy", VALID, FAIL, EVIL)])
    print_report(report, Console(width=300))
    check_shown(capsys.readouterr().out, 4)


def test_text_from_a_server_is_escaped_in_a_report():
    from fledge.bench.conform import FAIL, VALID, ConformReport, Row
    from fledge.bench.conform_report import html, markdown

    evil = "`<script>alert(1)</script>`\n# heading"
    report = ConformReport("http://x", evil, evil, evil, {}, [Row("chat, greedy", VALID, FAIL, evil)])
    written = markdown(report)
    assert "\n# heading" not in written
    assert written.count("`'<script>alert(1)</script>' # heading`") == 4
    assert "<script>" not in html(report)


def test_demo_prints_the_models_name_as_it_is(monkeypatch, capsys, model):
    folder = model.rename(model.with_name("[bold]x[")).parent / "[bold]x["
    chat = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | chat))
    _, out, _ = fledge(monkeypatch, capsys, "demo", "--model", folder, "--max-tokens", 1)
    assert "[bold]x[" in "".join(out.split())


def test_control_characters_of_an_answer_are_replaced(monkeypatch, capsys):
    from types import SimpleNamespace

    from fledge.cli.render import print_delta

    delta = SimpleNamespace(spans=[("a\x1b[2J\x9bb\n", False), ("c\u3000👩\u200d👧\t", True)])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_delta(delta)
    assert capsys.readouterr().out == "a\ufffd[2J\ufffdb\n\x1b[32mc\u3000👩\u200d👧\t\x1b[0m"


def test_an_error_is_one_printable_line():
    from fledge.errors import printable

    assert printable("a\x1b[31mb\nc\u202e") == "a\ufffd[31mb c\ufffd"
    assert len(printable("x" * 10_000, 100)) == 101
