"""The CI workflow, pre-commit configuration, issue templates, citation and changelog agree with the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import fledge

ROOT = Path(__file__).parent.parent
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: str) -> dict:
    return yaml.safe_load((ROOT / path).read_text())


def pinned(package: str) -> str:
    return re.search(rf"^{package}==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def test_the_workflow_runs_the_makefiles_commands():
    job = read(".github/workflows/ci.yml")["jobs"]["test"]
    assert job["strategy"]["matrix"]["python"] == ["3.11", "3.13"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == ["make test", "make docs", "make dist"]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    expected = {command.split()[1] for command in commands}
    if not (ROOT / "mkdocs.yml").exists():
        expected.remove("docs")
    assert expected <= targets


def test_pre_commit_checks_what_make_lint_checks():
    ruff, local = read(".pre-commit-config.yaml")["repos"]
    assert ruff["rev"] == f"v{pinned('ruff')}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
    assert [hook["entry"] for hook in local["hooks"]] == [".venv/bin/mypy"]


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_issue_templates(path):
    content = yaml.safe_load(path.read_text())
    if path.name == "config.yml":
        assert set(content) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= content.keys()
    fields = [part for part in content["body"] if part["type"] != "markdown"]
    assert len({part["id"] for part in fields}) == len(fields)
    assert all(part["attributes"]["label"] for part in fields)


def test_the_commands_that_templates_ask_for_exist():
    import typer

    from fledge.cli import main

    if not main.app.registered_commands:
        main._register()
    commands = typer.main.get_command(main.app).commands
    asked = re.findall(r"fledge ([a-z][\w-]*)((?: [\w-]+)*)", "".join(path.read_text() for path in TEMPLATES))
    assert len(asked) >= 3
    for name, words in asked:
        flags = {flag for option in commands[name].params for flag in option.opts}
        assert {word for word in words.split() if word.startswith("--")} <= flags


def test_the_citation():
    content = read("CITATION.cff")
    assert content["version"] == fledge.__version__
    assert content["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= content.keys()


def test_the_changelog_states_the_versioning():
    text = (ROOT / "docs" / "changelog.md").read_text()
    section = text.partition("\n## ")[0]
    assert "semantic versioning" in section
    assert "Before 1.0" in section
