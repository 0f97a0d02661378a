"""Real texts for long contexts: the user's own, or the Python language reference that every Python brings along."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fledge.errors import UserError

# Long chapters of prose, one document each; several are joined where one is too short.
CHAPTERS = (
    "execmodel",
    "objects",
    "naming",
    "formatstrings",
    "types",
    "typesmapping",
    "specialnames",
    "typesseq",
    "string-methods",
)
SHORTEST = 2000  # characters below which a file is no document


class Document(NamedTuple):
    name: str
    text: str


def load_documents(folder: Path | None) -> tuple[list[Document], str]:
    """The documents, and where they come from, in words."""
    if folder is None:
        return (
            _language_reference(),
            "chapters of the Python language reference, as installed with Python (give --documents for your own)",
        )
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder of documents")
    files = sorted(file for kind in ("*.txt", "*.md") for file in folder.rglob(kind))
    documents = [Document(file.name, file.read_text(encoding="utf-8", errors="replace")) for file in files]
    documents = [document for document in documents if len(document.text) >= SHORTEST]
    if not documents:
        raise UserError(f"{folder}: no .txt or .md file of at least {SHORTEST} characters in it")
    return documents, f"{len(documents)} given with --documents"


def _language_reference() -> list[Document]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise UserError("this Python comes without its documentation; give a folder of texts with --documents") from None
    found = [Document(name, topics[name]) for name in CHAPTERS if len(topics.get(name, "")) >= SHORTEST]
    return found or [Document(name, text) for name, text in topics.items() if len(text) >= SHORTEST]


def excerpt(documents: list[Document], number: int, num_characters: int) -> str:
    """At least `num_characters` of text that begins with document `number`; the following ones are joined as needed."""
    parts, size = [], 0
    for offset in range(len(documents) * 64):
        parts.append(documents[(number + offset) % len(documents)].text)
        size += len(parts[-1])
        if size >= num_characters:
            break
    return "\n\n".join(parts)
