"""What the site's build adds to the pages: reference tables, files that lie outside `docs/`, and links to them.

`<!-- reference:NAME -->` is replaced by tables of `references.py`, `<!-- include:PATH -->` … `<!-- /include -->` by a
Markdown file of the repository (the text between the two marks is shown where the page is read without the site).
Links that lead out of `docs/` go to the page that includes the file, or to a copy of the file within the site.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(DOCS))
from references import REFERENCES  # noqa: E402

REFERENCE = re.compile(r"<!-- reference:(\w+) -->")
INCLUDE = re.compile(r"<!-- include:([\w./-]+) -->.*?<!-- /include -->", re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PAGES = {"README.md": "index.md", "benchmarks/README.md": "benchmarks.md", "SECURITY.md": "security.md"}
COPIED = ("benchmarks/results/*", "recipes/**/*.yaml", "recipes/**/*.md", "LICENSE")


def copy_of(path: str) -> str:
    """Where the site has a file of the repository; Markdown stays text there, as nothing in it was written for the site."""
    return f"files/{path}" + (".txt" if path.endswith(".md") or "." not in path else "")


def on_files(files: Any, config: Any) -> Any:
    for pattern in COPIED:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file():
                name = copy_of(str(path.relative_to(ROOT)))
                files.append(File.generated(config, name, content=path.read_bytes()))
    return files


def relinked(text: str, folder: Path, page: str) -> str:
    """Links of a Markdown text in `folder`, as the page at `page` (relative to `docs/`) needs them."""

    def relink(match: re.Match[str]) -> str:
        mark, label, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group(0)
        name, hash_mark, anchor = target.partition("#")
        whole = (folder / name).resolve()
        inner = str(whole.relative_to(ROOT)) if whole.is_relative_to(ROOT) else ""
        if whole.is_relative_to(DOCS):
            place = str(whole.relative_to(DOCS))
        elif inner in PAGES:
            place = PAGES[inner]
        elif whole.is_file() and any(whole in ROOT.glob(pattern) for pattern in COPIED):
            place = copy_of(inner)
        else:
            return label
        return f"{mark}[{label}]({os.path.relpath(place, os.path.dirname(page) or '.')}{hash_mark}{anchor})"

    parts = re.split(r"(^```.*?^```|`[^`\n]*`)", text, flags=re.DOTALL | re.MULTILINE)
    joined, keep = "", []
    for index, part in enumerate(parts):  # code keeps its brackets, but a link's label may be code
        if index % 2 and part.startswith("```"):
            keep.append(part)
            joined += f"\0{len(keep) - 1}\0"
        else:
            joined += part
    return re.sub(r"\0(\d+)\0", lambda match: keep[int(match.group(1))], LINK.sub(relink, joined))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    source = page.file.src_uri
    text = relinked(markdown, (DOCS / source).parent, source)
    text = INCLUDE.sub(lambda match: relinked((ROOT / match[1]).read_text("utf-8"), (ROOT / match[1]).parent, source), text)
    return REFERENCE.sub(lambda match: REFERENCES[match[1]](), text)
