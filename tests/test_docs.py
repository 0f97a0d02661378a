"""The documents: links resolve, code and commands are valid, all flags and recipe keys are listed, the site builds strictly."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import references  # noqa: E402

PAGES = [
    ROOT / "README.md",
    ROOT / "SECURITY.md",
    ROOT / "benchmarks/README.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
    *sorted(ROOT.glob("examples/*.md")),
]
TEXTS = {str(page.relative_to(ROOT)): page.read_text(encoding="utf-8") for page in PAGES}
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
MAKEFILE = (ROOT / "Makefile").read_text()
COMMANDS = references.commands()


def blocks(*kinds: str) -> Iterator[tuple[str, str]]:
    """Yields (page, code) for all fenced blocks of these kinds."""
    for page, text in TEXTS.items():
        for indent, kind, code in FENCE.findall(text):
            if kind in kinds:
                yield page, re.sub(f"^{indent}", "", code, flags=re.MULTILINE)


def prose(text: str) -> str:
    return FENCE.sub("", text)


def anchors(page: Path) -> set[str]:
    """The heading anchors of a Markdown file and the files it includes, as GitHub and mkdocs generate them."""
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"<!-- include:([\w./-]+) -->", text):
        text += (ROOT / path).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in headings}


@pytest.mark.parametrize("page", TEXTS)
def test_links_resolve(page: str):
    for target in LINK.findall(prose(TEXTS[page])):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}, which is not there"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page} links to {target}: no such heading"


def command_lines() -> Iterator[tuple[str, str]]:
    """Yields (page, command) from shell blocks, terminal output (lines that start with `$ `) and inline code."""
    for page, code in blocks("bash", "sh", ""):
        for line in code.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield page, line
    for page, code in blocks("text", "console"):
        yield from ((page, line[2:]) for line in code.splitlines() if line.startswith("$ "))
    for page, text in TEXTS.items():
        yield from ((page, " ".join(code.split())) for code in re.findall(r"`((?:fledge|make) [^`]+)`", prose(text)))


def words_of(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quoted value over several lines
        return line.split()


def fledge_calls() -> Iterator[tuple[str, list[str]]]:
    for page, line in command_lines():
        words = words_of(line)
        for index, word in enumerate(words):
            before = words[index - 1] if index else ""
            if word.split("/")[-1] == "fledge" and (index == 0 or before in ("-m", "&&") or "=" in before):
                yield page, words[index + 1 :]
                break


def known_flags(command: str) -> set[str]:
    if command == "serve":
        return {name for group in references.serve_flags() for action in group._group_actions for name in action.option_strings}
    parameters = COMMANDS[command].params
    return {name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")}


def test_fledge_commands_and_flags_exist():
    calls = [(page, words) for page, words in fledge_calls() if words]
    assert len(calls) > 60
    for page, (command, *rest) in calls:
        if command in ("COMMAND", "…", "--version", "--help", "--install-completion", "--show-completion"):
            continue
        assert command in COMMANDS, f"{page}: `fledge {command}` does not exist"
        if "vllm" in rest and "--engine" in rest:
            continue  # vLLM's own flags follow
        refused = "--tensor-parallel-size" in rest  # the page shows the error message for this flag
        for word in rest:
            flag = word.split("=")[0].split(".")[0]
            if re.fullmatch(r"--?[a-z][\w-]*", flag) and not refused:
                assert flag in known_flags(command), f"{page}: `fledge {command}` has no {flag}"


def test_recipe_keys_on_command_lines_exist():
    keys = set(recipe_keys())
    found = [
        word.split("=")[0]
        for _, words in fledge_calls()
        if words[:1] == ["train"]
        for word in words
        if re.match(r"[a-z_]+\.[\w.]+=", word)
    ]
    assert found
    assert [key for key in found if key not in keys] == []


def test_make_targets_and_scripts_exist():
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    for page, line in command_lines():
        words = words_of(line)
        if words[:1] == ["make"]:
            assert words[1] in targets or words[1].startswith("."), f"{page}: make {words[1]}"
        for script in re.findall(r"\b(?:benchmarks|recipes|tests)/[\w./-]+\.(?:py|yaml)", line):
            assert (ROOT / script).exists(), f"{page}: {script}"
        for module in re.findall(r"python -m ((?:fledge|benchmarks)[\w.]*)", line):
            assert importlib.util.find_spec(module) is not None, f"{page}: python -m {module}"


@pytest.mark.parametrize(("page", "code"), list(blocks("python")))
def test_python_blocks_resolve(page: str, code: str):
    """Every import exists, and the imported callables accept the keywords they are given."""
    tree = ast.parse(code.replace("...\n", "pass\n"))
    names: dict[str, object] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and (called := names.get(node.func.id)) is not None:
            parameters = inspect.signature(called).parameters
            given = [keyword.arg for keyword in node.keywords]
            free = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
            assert free or [name for name in given if name not in parameters] == [], f"{page}: {node.func.id}"


@pytest.mark.parametrize(("page", "code"), list(blocks("json")))
def test_json_blocks_are_json(page: str, code: str):
    try:
        json.loads(code)
    except json.JSONDecodeError:
        for line in code.splitlines():
            json.loads(line)


@pytest.mark.parametrize(("page", "code"), list(blocks("yaml")))
def test_yaml_blocks_have_keys_of_recipes(page: str, code: str):
    def walk(value: object, place: str) -> Iterator[str]:
        if isinstance(value, dict):
            for name, inner in value.items():
                yield f"{place}{name}"
                yield from walk(inner, f"{place}{name}.")

    assert [key for key in walk(yaml.safe_load(code), "") if key not in set(recipe_keys())] == []


def recipe_keys() -> Iterator[str]:
    """Yields all recipe keys from the recipe classes, not from the generated reference, which is what is tested."""
    from fledge.training.recipe import Recipe

    def walk(section: type, place: str) -> Iterator[str]:
        for name, field in section.__pydantic_fields__.items():
            yield f"{place}{name}"
            if hasattr(field.annotation, "__pydantic_fields__"):
                yield from walk(field.annotation, f"{place}{name}.")

    yield from walk(Recipe, "")


def test_every_recipe_key_is_documented():
    text, keys = references.recipe(), list(recipe_keys())
    sections = {key for key in keys if any(other.startswith(f"{key}.") for other in keys)}
    rows = {line.split("`")[1]: line.split(" | ")[-1].strip(" |") for line in text.splitlines() if line.startswith("| `")}
    assert len(keys) > 80
    assert [key for key in keys if key not in sections and not rows.get(key)] == []
    assert [key for key in sections if "." not in key and f"## {key}" not in text] == []


def test_every_flag_is_documented():
    text = references.cli()
    for command in COMMANDS:
        section = text.split(f"## fledge {command}\n")[1].split("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("| `")]
        documented = {name: row for row in rows for name in re.findall(r"`(--?[\w-]+)`", row.split(" | ")[0])}
        missing = known_flags(command) - set(documented) - {"--help", "-h"}
        assert not missing, f"fledge {command}: {missing}"
        silent = {name for name, row in documented.items() if not row.rstrip(" |").split(" | ")[2:]}
        assert not silent, f"fledge {command}: no description of {silent}"


def test_every_limit_is_in_one_table():
    """Checks the page in the repository. Limits are flags named `--max-…` or `--…-timeout`, and the fields of `Limits`."""
    from fledge.serving.limits import Limits

    section = TEXTS["docs/serving.md"].split("## Limits")[1].split("\n## ")[0]
    documented = dict(re.findall(r"^\| `(--[\w-]+)` \| (.*?) \|", section, re.MULTILINE))
    named = {flag for flag in known_flags("serve") if re.match(r"--max-|--.*-timeout$", flag)}
    assert {"--max-queue", "--max-num-seqs", "--max-model-len", "--shutdown-timeout"} <= named
    assert set(documented) == named | {f"--{name.replace('_', '-')}" for name in Limits.__dataclass_fields__}
    assert all(re.fullmatch(r"`[\d.]+`", default) for default in documented.values())


def test_every_page_is_in_the_sites_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if f": {page.name}" not in menu] == []


def test_the_site_builds_strictly(tmp_path: Path):
    """Broken links, unknown anchors, pages outside the menu and names that mkdocstrings cannot find are errors."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    pages = {path.parent.name for path in (tmp_path / "site").rglob("index.html")}
    assert {"quickstart", "serving", "make-a-drafter", "low-acceptance", "learn", "moving", "cli", "recipe", "api"} <= pages
    assert "speculative_config" in (tmp_path / "site/cli/index.html").read_text().replace("-", "_")
    assert "SamplingParams" in (tmp_path / "site/api/index.html").read_text()
    assert (tmp_path / "site/files/benchmarks/results/exact-h200.json").exists()
