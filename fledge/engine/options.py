"""What to speculate with: as users give it, before anything is loaded. No torch: the server's HTTP processes read it too."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.drafters import default_drafter, trained_on
from fledge.speculation.depth import TreeShape

if TYPE_CHECKING:
    from fledge.models.drafter import EagleDrafter

FIXED_DEPTH = 5  # of other engines, which draft a fixed number of tokens
DEFAULT_DEPTH = "auto"  # on two CPU cores 8 % more tokens/s than always 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speculation:
    """What to draft with and how far. `drafter`: auto, none, ngram, a shipped drafter's name, a folder or a hub id."""

    drafter: str | Path | EagleDrafter | None = "auto"
    depth: int | str = DEFAULT_DEPTH  # a number, or "auto": `DepthPolicy`
    tree: TreeShape | None = None
    adaptive: bool = True  # less deep, down to not at all, where the load makes drafting slower than plain decoding
    drift_guard: bool = True  # less deep for a request whose drafts fare clearly worse than usual

    def fixed_depth(self) -> Speculation:
        """Always to the depth that was asked for, to measure what it is worth."""
        return replace(self, adaptive=False, drift_guard=False)

    def resolve_drafter(self, model: str) -> str | Path | EagleDrafter | None:
        """The drafter's folder or network, `ngram`, or None for plain decoding."""
        name = self.drafter
        if name is None or name == "none":
            return None
        if name == "auto":
            if (shipped := default_drafter(model)) is None:
                return "ngram"
            text = "drafter %s: ships with Fledge for this model or one that it was fine-tuned from; %s"
            log.info(text, shipped.name, trained_on(shipped))
            return shipped
        if name == "ngram" or not isinstance(name, str):
            return name
        from fledge.checkpoints.drafter_files import find_drafter

        return find_drafter(name)
