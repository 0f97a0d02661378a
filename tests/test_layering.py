"""Arrows point down only: serving -> engine -> speculation -> models -> ops -> kernels; nothing imports serving or cli."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent / "fledge"

# What each package may import, besides itself and the top-level modules below.
ALLOWED = {
    "kernels": set(),
    "ops": {"kernels"},
    "models": {"ops", "kernels"},
    "checkpoints": {"models", "kernels"},
    "speculation": {"models", "ops", "kernels"},
    "drafters": {"checkpoints"},
    "engine": {"speculation", "models", "ops", "kernels", "checkpoints", "drafters"},
    "training": {"drift", "engine", "speculation", "models", "ops", "kernels", "checkpoints", "drafters", "bench"},
    "learning": {"training", "drift", "engine", "speculation", "models", "ops", "kernels", "checkpoints", "drafters", "bench"},
    "drift": {"engine", "speculation", "models", "ops", "kernels", "checkpoints", "drafters", "bench"},
    "bench": {"engine", "speculation", "models", "ops", "kernels", "checkpoints", "drafters"},
    "serving": {"learning", "drift", "engine", "speculation", "models", "ops", "kernels", "checkpoints", "drafters", "bench"},
}
BELOW_ALL = {
    "chat_template",
    "config",
    "config_checks",
    "config_parts",
    "devices",
    "errors",
    "families",
    "files",
    "progress",
    "sampling",
    "tokenizer",
    "sources",
    "__version__",
}
ABOVE_ENGINE = {"llm", "LLM", "Completion", "SamplingParams", "TreeShape"}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "fledge":
            parts = node.module.split(".")
            names |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("fledge.")}
    return names


def test_imports_point_down():
    wrong = []
    for package, below in ALLOWED.items():
        may = below | {package} | BELOW_ALL | (ABOVE_ENGINE if "engine" in below else set())
        for path in sorted((ROOT / package).rglob("*.py")):
            wrong += [f"{path.relative_to(ROOT)} imports {name}" for name in sorted(imported(path) - may)]
    assert not wrong, "\n".join(wrong)


def test_every_package_is_listed():
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("__")}
    assert packages - {"cli"} == set(ALLOWED)
