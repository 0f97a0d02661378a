"""Writes every measured figure that README and docs show, from `benchmarks/results/*.json`.

    python -m benchmarks.figures            # rewrites the blocks and the pictures (`make figures`)
    python -m benchmarks.figures --check    # changes nothing; exit code 1 if something would change

A block of a page is `<!-- figures:NAME -->` … `<!-- /figures -->`; NAME is registered in `figure_tables*.py`. A block on one
line is text within a sentence. Pictures are functions of `figure_pictures.py`. No measured figure is written by hand, so two
pages cannot give different figures for one run; `tests/test_figures.py` finds figures that were written by hand.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks import figure_blocks, figure_pictures, figure_tables, figure_tables_gpu  # noqa: F401 (they list themselves)

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- figures:([\w.-]+) -->)(.*?)(<!-- /figures -->)", re.DOTALL)


def pages() -> list[Path]:
    """All pages that may have figures: the README, the docs, and `benchmarks/README.md`."""
    return [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str) -> str:
    """The page's text with every block rewritten."""

    def fill(match: re.Match[str]) -> str:
        start, name, old, end = match.groups()
        new = figure_blocks.block(name).strip()
        return f"{start}\n\n{new}\n\n{end}" if "\n" in old else f"{start}{new}{end}"

    return BLOCK.sub(fill, text)


def outputs() -> Iterator[tuple[Path, str]]:
    """Yields each file and the content it should have."""
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            yield page, filled(text)
    for name, draw in figure_pictures.PICTURES.items():
        yield ROOT / "docs" / "images" / name, draw()


def stale() -> list[Path]:
    """Files that `make figures` would change."""
    return [path for path, text in outputs() if not path.exists() or path.read_text(encoding="utf-8") != text]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    args = parser.parse_args()
    changed = stale()
    for path in changed:
        print(f"{'stale' if args.check else 'wrote'} {path.relative_to(ROOT)}")
    if args.check:
        sys.exit(1 if changed else 0)
    for path, text in outputs():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
