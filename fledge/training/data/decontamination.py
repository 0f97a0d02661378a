"""Text that must not be trained on, such as the prompts a drafter is judged by, and what shares too much with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from fledge.training.data.chat_files import read_lines, user_turns

# Thirteen words in a row are hardly ever shared by chance; language models are decontaminated by the same number.
RUN = 13
# Shorter texts are compared whole, from this length on: "Thank you!" may well be said in both.
SHORTEST = 5

_WORD = re.compile(r"\w+")


def words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


class Decontamination:
    def __init__(self, texts: Iterable[str]) -> None:
        self.runs = {run for text in texts for run in _runs(words(text))}

    @classmethod
    def of_files(cls, paths: Sequence[str | Path]) -> Decontamination | None:
        """The users' turns of JSON lines with "turns", "messages" or "prompt"; None: no files."""
        return (
            cls(text for path in paths for where, line in read_lines(path) for text in user_turns(line, where))
            if paths
            else None
        )

    def has(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts shares a run of words with those that are kept out."""
        return any(run in self.runs for text in texts for run in _runs(words(text)))


def _runs(parts: list[str]) -> Iterator[str]:
    if len(parts) < RUN:
        if len(parts) >= SHORTEST:
            yield " ".join(parts)
        return
    for start in range(len(parts) - RUN + 1):
        yield " ".join(parts[start : start + RUN])
