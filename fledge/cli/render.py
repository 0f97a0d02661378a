"""How answers and figures look in a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fledge.engine.request import Delta
    from fledge.llm import Completion

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"


def print_delta(delta: Delta) -> None:
    """Writes what a step added; tokens that the drafter had proposed come in green on a terminal."""
    colour = sys.stdout.isatty()
    for text, drafted in delta.spans:
        sys.stdout.write(f"{GREEN}{text}{PLAIN}" if drafted and colour else text)
    sys.stdout.flush()


def figures(completion: Completion) -> str:
    stats = completion.stats
    parts = [f"{len(completion.token_ids)} tokens", f"{completion.tokens_per_second:.1f} tokens/s"]
    if stats.steps:
        rates = " ".join(f"{rate:.0%}" for rate in stats.unconditional_rates)
        parts += [f"acceptance length {stats.acceptance_length:.2f}", f"by position {rates}"]
    return "[" + " · ".join(parts) + "]"
