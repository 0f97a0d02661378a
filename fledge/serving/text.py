"""Finding markers in text that is still coming."""

from __future__ import annotations

from collections.abc import Sequence


def before_marker(text: str, markers: Sequence[str]) -> tuple[str, str, str]:
    """(text before the first marker, the marker, what follows it).

    Without a marker, what may turn out to be the beginning of one is held back as the last part: `a <th` gives
    (`a `, ``, `<th`).
    """
    found = [(at, marker) for marker in markers if (at := text.find(marker)) >= 0]
    if found:
        at, marker = min(found)
        return text[:at], marker, text[at + len(marker) :]
    held = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), held, -1):
            if text.endswith(marker[:size]):
                held = size
                break
    return text[: len(text) - held], "", text[len(text) - held :]
