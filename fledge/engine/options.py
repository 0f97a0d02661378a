"""The speculation options as users give them, before anything is loaded. Imports no torch: HTTP processes import it too."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fledge.drafters import default_drafter, trained_on
from fledge.speculation.depth import TreeShape

if TYPE_CHECKING:
    from fledge.models.drafter import EagleDrafter

FIXED_DEPTH = 5  # for other engines, which draft a fixed number of tokens
DEFAULT_DEPTH = "auto"  # on two CPU cores 8 % more tokens/s than a fixed depth of 5
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Speculation:
    """The drafter, and depth and shape of drafts. `drafter`: auto, none, ngram, a shipped one's name, a folder or a hub id."""

    drafter: str | Path | EagleDrafter | None = "auto"
    depth: int | str = DEFAULT_DEPTH  # a number, or "auto": `DepthPolicy`
    tree: TreeShape | None = None
    adaptive: bool = True  # lowers the depth, down to 0, if the load makes drafting slower than plain decoding
    drift_guard: bool = True  # lowers the depth of a request whose drafts are accepted clearly less often than usual

    def fixed_depth(self) -> Speculation:
        """A copy that always drafts to the configured depth, to measure what that depth is worth."""
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
