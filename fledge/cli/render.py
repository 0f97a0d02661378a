"""Prints answers and their figures in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fledge.engine.request import Delta
    from fledge.llm import Completion

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
# Control characters that move a terminal's cursor or change its settings; newlines and tabs are kept.
CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_delta(delta: Delta) -> None:
    """Prints the text that a step added. On a terminal, accepted draft tokens are green and control characters are replaced."""
    is_terminal = sys.stdout.isatty()
    for text, drafted in delta.spans:
        if is_terminal:
            text = text.translate(CONTROL)
        sys.stdout.write(f"{GREEN}{text}{PLAIN}" if drafted and is_terminal else text)
    sys.stdout.flush()


def figures(completion: Completion) -> str:
    """Tokens, speed and acceptance of an answer, as one line."""
    stats = completion.stats
    parts = [f"{len(completion.token_ids)} tokens", f"{completion.tokens_per_second:.1f} tokens/s"]
    if stats.steps:
        rates = " ".join(f"{rate:.0%}" for rate in stats.unconditional_rates)
        parts += [f"acceptance length {stats.acceptance_length:.2f}", f"by position {rates}"]
    return "[" + " · ".join(parts) + "]"
