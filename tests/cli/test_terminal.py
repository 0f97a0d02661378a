"""The command line: short guide, exit codes, shell completion, JSON on standard output, and the demo table's width."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console
from rich.table import Table

from fledge.cli import main as cli
from fledge.cli.demo import table
from fledge.errors import literal
from tests.cli.test_errors import fledge, model  # noqa: F401 - a fixture

# Every command except `chat` and `serve`.
WITH_JSON = {
    "demo", "generate", "models", "inspect", "doctor", "export", "import", "make", "regenerate", "train", "bench",
    "bench-serve", "conform", "drift", "learn-report",
}  # fmt: skip


@pytest.fixture(scope="module")
def commands() -> dict[str, Any]:
    if not cli.app.registered_commands:
        cli._register()
    return typer.main.get_command(cli.app).commands


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "fledge", *arguments], capture_output=True, text=True, env={**os.environ, **environment}
    )


def test_without_arguments_a_short_guide_is_printed(monkeypatch, capsys, commands):
    code, out, err = fledge(monkeypatch, capsys)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = [line.split() for line in out.splitlines() if line.strip().startswith("fledge ")]
    assert {line[1] for line in lines} == {"demo", "serve", "chat", "make", "doctor", "drift"}
    for _, name, *words in lines:
        known = {flag for option in commands[name].params for flag in option.opts} | {"--port"}
        assert {word for word in words if word.startswith("--")} <= known


def test_help_and_version_import_nothing_slow():
    code = "import sys; sys.argv = ['fledge', '{}']\nfrom fledge.cli.main import main\ntry: main()\nexcept SystemExit: pass\n"
    code += "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    for flag in ("--help", "--version"):
        done = subprocess.run([sys.executable, "-c", code.replace("{}", flag)], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "[]"
    from fledge import __version__

    assert run("--version").stdout == f"{__version__}\n"


def test_help_lists_the_exit_codes(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = fledge(monkeypatch, capsys, "--help")
    assert code == 0
    for number, meaning in cli.EXIT_CODES.items():
        assert f"{number}: {meaning}." in out


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["models"], 0),
        (["inspect", "no/such/drafter"], 1),
        (["serve", "no/such/model"], 1),
        (["nonsense"], 2),
        (["models", "--nonsense"], 2),
        (["make"], 2),
        (["serve", "--nonsense"], 2),
        (["bench", "--repeats", "0"], 2),
        (["bench", "--limit", "-1"], 2),
        (["bench-serve", "http://x", "--data", "builtin", "--num-prompts", "-1"], 2),
    ],
)
def test_exit_codes(monkeypatch, capsys, arguments, wanted):
    assert wanted in cli.EXIT_CODES
    code, _, err = fledge(monkeypatch, capsys, *arguments)
    assert code == wanted
    assert "Traceback" not in err


def test_exit_code_of_a_failed_check(monkeypatch, capsys, tmp_path):
    from fledge.checkpoints.eagle3 import save_drafter
    from tests.tiny import tiny_drafter

    folder = save_drafter(tiny_drafter(), tmp_path / "drafter")
    assert fledge(monkeypatch, capsys, "inspect", folder)[0] == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": config["hidden_size"] * 2}))
    assert fledge(monkeypatch, capsys, "inspect", folder)[0] == 3


def test_exit_codes_of_an_interrupt_and_a_closed_pipe(monkeypatch, capsys):
    from fledge import sources

    for error, wanted in ((KeyboardInterrupt(), 130), (BrokenPipeError(), 141)):
        monkeypatch.setattr(sources, "list_models", lambda error=error: (_ for _ in ()).throw(error))
        assert fledge(monkeypatch, capsys, "models")[0] == wanted


@pytest.mark.parametrize("identical", [True, False])
def test_the_demo_fails_if_the_outputs_differ(monkeypatch, capsys, model, identical):  # noqa: F811
    """The demo runs in the default data type, which is not float32."""
    from fledge.bench import comparison

    config = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": "{{ messages[0].content }}"}))
    monkeypatch.setattr(comparison.Comparison, "identical", identical)
    code, out, err = fledge(monkeypatch, capsys, "demo", "--model", model, "--drafter", "ngram", "--max-tokens", 4, "--json")
    assert code == (0 if identical else 3), err
    figures = json.loads(out)
    assert figures["summary"]["identical"] is identical
    assert (figures["depth"], figures["drafter"]) == (7, "n-gram look-up, depth auto (up to 7)")


def test_help_shows_no_type_for_boolean_switches(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("generate", "chat", "bench", "doctor"):
        assert "bool" not in fledge(monkeypatch, capsys, command, "--help")[1]


# --- completion -------------------------------------------------------------------------------------------------------


def test_completion_for_bash(tmp_path):
    script = run(_FLEDGE_COMPLETE="source_bash").stdout
    assert "complete -o default -F _fledge_completion fledge" in script
    (tmp_path / "fledge").write_text(f'#!/bin/sh\nexec {sys.executable} -m fledge "$@"\n')
    (tmp_path / "fledge").chmod(0o755)
    script += "\nCOMP_WORDS=(fledge be); COMP_CWORD=1; _fledge_completion fledge; printf '%s\\n' \"${COMPREPLY[@]}\"\n"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, env=env)
    assert done.stdout.split() == ["bench", "bench-serve"]


def test_completion_for_zsh():
    assert "compdef _fledge_completion fledge" in run(_FLEDGE_COMPLETE="source_zsh").stdout
    offered = run(_FLEDGE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS="fledge demo --d").stdout
    assert re.findall(r'"(--\w+)"', offered) == ["--drafter", "--depth", "--dtype", "--device"]


def test_completion_can_be_installed():
    out = run("--help", COLUMNS="200").stdout
    assert "--install-completion" in out
    assert "--show-completion" in out


# --- JSON -------------------------------------------------------------------------------------------------------------


def test_which_commands_print_json(commands):
    found = {name for name, command in commands.items() if any("--json" in option.opts for option in command.params)}
    assert found == WITH_JSON
    assert set(commands) - found == {"chat", "serve"}


def test_with_json_nothing_else_is_on_standard_output(monkeypatch, capsys, model, tmp_path):  # noqa: F811
    from fledge.checkpoints.eagle3 import save_drafter
    from tests.tiny import tiny_drafter

    drafter = save_drafter(tiny_drafter(), tmp_path / "drafter")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "1", "category": "chat", "turns": ["hello"]}\n')
    config = json.loads((model / "tokenizer_config.json").read_text())
    chat = {"chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}"}
    (model / "tokenizer_config.json").write_text(json.dumps(config | chat))

    def figures(*arguments: object) -> dict:
        code, out, err = fledge(monkeypatch, capsys, *arguments, "--json")
        assert code in (0, 3), err
        return json.loads(out)

    settings = ["--max-tokens", 4, "--dtype", "float32"]
    assert "smollm2-135m" in [entry["name"] for entry in figures("models")["models"]]
    assert figures("inspect", drafter)["problems"] == []
    assert len(figures("demo", "--model", model, "--drafter", drafter, *settings)["prompts"]) == 8
    assert figures("bench", model, "--drafter", drafter, "--data", prompts, *settings)["turns"] == 1
    assert figures("doctor", drafter, "--model", model, *settings)["fault"]
    exported = figures("export", drafter, tmp_path / "exported", "--target-name", "T")
    assert exported["folder"] == str(tmp_path / "exported")
    assert exported["command"].startswith("vllm serve T --speculative-config")
    (drafter / "provenance.json").write_text('{"target": "org/model"}')
    assert figures("export", drafter, tmp_path / "again")["command"].startswith("vllm serve org/model ")
    assert figures("import", drafter, tmp_path / "imported")["folder"] == str(tmp_path / "imported")
    (tmp_path / "history.jsonl").write_text('{"event": "point", "requests": 32, "steps": 0, "acceptance_length": 1.5}\n')
    assert figures("learn-report", tmp_path)["acceptance_length"] == {"first": 1.5, "last": 1.5}


def test_nan_and_infinity_are_printed_as_null(capsys):
    from fledge.cli.options import print_json

    print_json({"a": [float("nan"), 1.5], "b": (float("inf"),), "c": Path("x"), "d": "\ud800"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None], "c": "x", "d": "\ud800"}


# --- the demo's table -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 60, 120])
def test_the_demo_table_fits_the_width(width):
    from rich.console import Console

    from fledge.bench.prompts import DEMO

    def completion(speed: float) -> SimpleNamespace:
        stats = SimpleNamespace(acceptance_length=2.5, unconditional_rates=[0.5], steps=100, accepted=150, emitted=250)
        return SimpleNamespace(token_ids=[1] * 128, tokens_per_second=speed, stats=stats)

    results = [
        SimpleNamespace(prompt=p, plain=completion(1234.5), speculative=completion(2345.6), speed_up=1.9, identical=True)
        for p in DEMO
    ]
    whole = SimpleNamespace(
        plain_tokens_per_second=1234.5,
        speculative_tokens_per_second=2345.6,
        speed_up=1.9,
        acceptance_length=2.5,
        identical=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fledge.bench.comparison.summarise", lambda _: whole)
        console = Console(width=width, record=True, file=io.StringIO())
        console.print(table(results, 128, width))
    shown = console.export_text()
    assert "…" not in shown
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    words = {prompt.category for prompt in DEMO} | {"prompt", "speculative", "speed-up", "acceptance", "length", "1,024"}
    words -= {"1,024"} if width == 60 else set()
    assert words <= set(shown.split())
    assert ("identical" in shown) == (width >= 78)


@pytest.mark.parametrize("name", ["plain", "C:\\drafters\\", "two\\\\", "[bold]x\\", "\\[red]y", "[/]\\\\\\"])
def test_names_are_shown_as_they_are_written(name):
    """Covers names with no tag after them: `fledge drift` once doubled a trailing backslash in its header."""
    console = Console(file=io.StringIO(), width=60)
    shown = Table(literal(name), box=None, pad_edge=False)
    shown.add_row(literal(name))
    console.print(shown)
    for text in (literal(name), f"[bold]{literal(name)}[/]", f"[red]{literal(name)}{literal(name)}"):
        console.print(text, highlight=False)
    assert [line.rstrip() for line in console.file.getvalue().splitlines()] == [name] * 4 + [name * 2]
