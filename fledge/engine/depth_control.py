"""How deep each request is drafted for: as was asked, less where the drift guard says so or the load makes it dear."""

from __future__ import annotations

from fledge.engine.request import Delta, Request
from fledge.speculation.drafting import Drafter
from fledge.speculation.guard import DriftGuard
from fledge.speculation.outside import OutsideShare
from fledge.speculation.verification import Draft


class DepthControl:
    def __init__(self, drafter: Drafter | None, *, guard: bool = False) -> None:
        self.limit = drafter.depth.limit if drafter is not None else 0
        self.guard = DriftGuard(self.limit) if guard and self.limit else None
        self.outside: OutsideShare = getattr(drafter, "outside", None) or OutsideShare(None)

    def depth(self, request: Request) -> int:
        if self.guard is None or is_repeatable(request):
            return self.limit
        return self.guard.depth(request)

    def saw(self, draft: Draft, accepted: list[int], delta: Delta) -> None:
        """What became of a draft: the nodes that stood, as far as the request took them, and what it gained."""
        self.outside.saw(delta.tokens)
        if not len(draft):
            return
        stood = sum(delta.drafted)
        # The target said something else where the draft went on: a miss. A request that has ended may not have come so far.
        missed = len(delta.tokens) > stood and bool(draft.children(accepted[-1] if accepted else -1))
        if self.guard is not None and not is_repeatable(delta.request):
            self.guard.saw(delta.request, stood + missed, stood, nameable=self.outside.holds(delta.tokens[-1]))

    def forget(self, request: Request) -> None:
        if self.guard is not None:
            self.guard.forget(request)


def is_repeatable(request: Request) -> bool:
    """A seeded answer must come out the same again, and here the drawing of it depends on how deep each draft was."""
    return request.params.seed is not None and not request.params.greedy
