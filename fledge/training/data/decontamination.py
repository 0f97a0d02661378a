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
# Scripts without spaces are compared by characters, about two of which make a word.
CHARACTERS_A_WORD = 2

# Thai, Lao, Tibetan, Burmese, Khmer; kana and Chinese characters, also of the higher planes.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_CHARACTER, _WORD = re.compile(f"[{_UNSPACED}]"), re.compile(f"[^\\W{_UNSPACED}]+")


class Decontamination:
    def __init__(self, texts: Iterable[str]) -> None:
        self.runs = {run for text in texts for run in _runs(text)}

    @classmethod
    def of_files(cls, paths: Sequence[str | Path]) -> Decontamination | None:
        """The users' turns of JSON lines with "turns", "messages" or "prompt"; None: no files."""
        return (
            cls(text for path in paths for where, line in read_lines(path) for text in user_turns(line, where))
            if paths
            else None
        )

    def has(self, texts: Iterable[str]) -> bool:
        """Whether one of the texts shares a run of words, or of characters, with those that are kept out."""
        return any(run in self.runs for text in texts for run in _runs(text))


def _runs(text: str) -> Iterator[str]:
    text = text.casefold()
    for parts, size in ((_WORD.findall(text), 1), (_CHARACTER.findall(text), CHARACTERS_A_WORD)):
        length = RUN * size
        if SHORTEST * size <= len(parts) < length:
            yield " ".join(parts)
        for start in range(len(parts) - length + 1):
            yield " ".join(parts[start : start + length])
