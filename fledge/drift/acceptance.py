"""What a speculative run over a known greedy text accepts, from how far the drafts of each of its rows match."""

from __future__ import annotations

from collections.abc import Sequence

from fledge.speculation.stats import AcceptanceStats


def walk(matched: Sequence[int], depth: int) -> AcceptanceStats:
    """`matched[i]`: how many drafts from row i are the target's next tokens.

    A step accepts up to `depth` of them and adds the target's own next token; the answer ends where the rows end.
    """
    stats, at = AcceptanceStats(), 0
    while at < len(matched):
        accepted = min(matched[at], depth)
        left = len(matched) - at  # tokens the answer still has
        stats.add_step(depth, depth, accepted, min(accepted + 1, left))
        at += accepted + 1
    return stats
