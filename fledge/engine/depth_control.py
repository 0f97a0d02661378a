"""How deep each request is drafted for: as was asked, less where the drift guard says so or the load makes it dear."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from fledge.engine.backlog import Backlog
from fledge.engine.load_depth import LoadDepth
from fledge.engine.request import Delta, Request
from fledge.engine.scheduler import Scheduled
from fledge.engine.step_costs import CostTable
from fledge.speculation.depth import TreeShape
from fledge.speculation.drafting import Drafter, Settled
from fledge.speculation.guard import DriftGuard
from fledge.speculation.outside import OutsideShare
from fledge.speculation.verification import Draft

# Steps after which one request is drafted for to the limit although the load speaks against it: else an acceptance that
# was poor once would never be seen to have become better. It costs less than a hundredth of the time.
LOOK_AGAIN = 256
# Steps after which what was not seen meanwhile counts as half as well known.
FADE = 256
# Steps for which the choice of no depth stands while as many run: choosing takes a hundredth of a small step.
KEPT_CHOICE = 8
# When drafts come back the drafter first reads what it lags behind, at this share of what the target took for it. They must
# be expected to gain that within so many steps.
CATCH_UP_SHARE, CATCH_UP_STEPS = 1 / 20, 32
# Speculation must be expected to gain so much, or what is not known well enough, and the drafter's reading of the prompts that
# come meanwhile, loses more than it gains.
LEAST_GAIN = 1.08
# Steps of drafting after which one goes without: what a plain step takes is known from before, perhaps from a bad moment.
PLAIN_AGAIN = 48
# So many rows are tried without much thought.
FEW_ROWS = 8
# What a draft step takes of a pass over as many rows of the target, until it is known.
USUAL_DRAFT_SHARE = 1 / 14


class DepthControl:
    """The eager engine's. By load means: from what passes of all sizes really took, whichever depth says most a second."""

    def __init__(
        self,
        drafter: Drafter | None,
        *,
        guard: bool = False,
        by_load: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limit = drafter.depth.limit if drafter is not None else 0
        self.guard = DriftGuard(self.limit) if guard and self.limit else None
        self.outside: OutsideShare = getattr(drafter, "outside", None) or OutsideShare(None)
        self.is_adaptive, self.clock = by_load, clock
        self.by_load = by_load and self.limit > 0
        self.tree: TreeShape | None = getattr(drafter, "tree", None) or None
        self.load = LoadDepth(self.limit, margin=1 / LEAST_GAIN)
        self.verifying = CostTable()  # all of a step but drafting, by rows of the pass
        self.reading = CostTable(optimism=0)  # the same of steps that read prompts
        self.drafting = {depth: CostTable() for depth in self.load.depths}  # by the number of requests drafted for
        self.backlog = Backlog() if self.by_load and drafter.taps else None
        self.now = self.limit  # the depth that the load allows, for the next step
        self.num_drafted_for = 0
        self.given: dict[Request, int] = {}  # the depth each request's pending draft might have had
        self.explorer: Request | None = None  # drafted for to the limit, whatever the load
        self.num_steps = 0
        self.chosen_for: tuple[int, int] | None = None  # requests that ran and that could be drafted for, at the last choice
        self.shallow_steps = 0  # since some draft might go to the limit
        self.drafting_steps = 0  # since all went without

    # Before drafting

    def plan(self, running: Sequence[Request]) -> None:
        """Chooses the depth of the drafts that the next step will verify."""
        if not self.by_load:
            return
        left = self.backlog.left if self.backlog is not None else {}
        eligible = [request for request in running if request.speculate and request not in left]
        self.num_drafted_for, self.explorer = len(eligible), None
        counts = len(running), len(eligible)
        if self.now or counts != self.chosen_for or self.num_steps % KEPT_CHOICE == 0:
            lag = sum(self._lag(request) for request in eligible)
            self.now = self._choose(*counts, lag, [self._allowed(request) for request in eligible])
            self.chosen_for = counts if self.is_known else None
        self.drafting_steps = self.drafting_steps + 1 if self.now else 0
        if self.drafting_steps > PLAIN_AGAIN and len(eligible) > 1 and not any(map(is_repeatable, eligible)):
            self.now, self.drafting_steps, self.chosen_for = 0, 0, None  # for one step
        self.shallow_steps = 0 if self.now == self.limit else self.shallow_steps + 1
        if self.shallow_steps >= LOOK_AGAIN and eligible:
            self.explorer, self.shallow_steps = min(eligible, key=self._lag), 0

    def _choose(self, num_running: int, num_eligible: int, lag: int, allowed: Sequence[int]) -> int:
        if not self.is_known:
            return 0  # what a plain step takes is learnt first: that costs nothing
        catching_up = (self.reading.seconds(lag) or 0.0) * CATCH_UP_SHARE / CATCH_UP_STEPS

        def seconds(depth: int) -> float:
            return self.seconds(num_running, num_eligible, depth) + (catching_up if depth else 0.0)

        return self.load.choose(num_eligible / max(num_running, 1), seconds, allowed)

    @property
    def is_known(self) -> bool:
        """Whether anything is known of what steps cost."""
        return bool(self.verifying.costs)

    def may_wait(self, request: Request, num_requests: int) -> bool:
        """Whether so many leave no room for speculation, so that the drafter may read the request's prompt later or never."""
        if self.backlog is None or not self.is_known or num_requests == 1 or is_repeatable(request):
            return False
        return not self.load.choose(1.0, lambda depth: self.seconds(num_requests, num_requests, depth))

    def set_apart(self, request: Request) -> None:
        """Others will find its pages before the drafter has taken them in."""
        self.backlog.apart.add(request)

    def is_apart(self, request: Request) -> bool:
        return self.backlog is not None and request in self.backlog.apart

    def seconds(self, num_running: int, num_drafted_for: int, depth: int) -> float | None:
        """What a step is expected to take, drafting included; None before the first."""
        if not depth:
            return self.verifying.seconds(num_running)
        verifying = self.verify_seconds(num_running + num_drafted_for * self.nodes(depth))
        return None if verifying is None else verifying + self.draft_seconds(num_drafted_for, depth)

    def verify_seconds(self, rows: float) -> float | None:
        """More rows than any draft had yet are taken to cost no less a row than prompts do: trying them would be dear."""
        seconds = self.verifying.seconds(rows)
        if seconds is None or rows <= self.verifying.most_rows or rows <= FEW_ROWS or not self.reading.costs:
            return seconds
        return max(seconds, self.reading.seconds(rows))

    def draft_seconds(self, num_drafted_for: int, depth: int) -> float:
        """From the nearest depth that was tried; for more requests than were drafted for yet it grows as the target's does."""
        for known in sorted(self.drafting, key=lambda other: abs(other - depth)):
            table = self.drafting[known]
            if table.costs:
                tried = min(num_drafted_for, table.most_rows)
                growth = self.verify_seconds(num_drafted_for) / self.verify_seconds(tried)
                return table.seconds(tried) * max(growth, 1.0) * depth / known
        return self.verify_seconds(num_drafted_for) * USUAL_DRAFT_SHARE * depth

    def nodes(self, depth: int) -> float:
        if self.tree is None:
            return self.load.nodes(depth)
        return min(self.tree.nodes, self.tree.width + self.tree.width**2 * (depth - 1))

    def depth(self, request: Request) -> int:
        """How deep it is drafted for now."""
        if self.backlog is not None and request in self.backlog.left:
            return 0
        if is_repeatable(request):
            depth = self.limit
        else:
            depth = min(self._allowed(request), self.limit if request is self.explorer else self.now)
        self.given[request] = depth
        return depth

    def due(self, settled: list[Settled], taps: Sequence[Tensor]) -> tuple[list[Settled], Sequence[Tensor]]:
        """What the drafter must take in now."""
        return (settled, taps) if self.backlog is None else self.backlog.due(settled, taps, self._prompt_waits)

    # After the fact

    def saw(self, draft: Draft, accepted: list[int], delta: Delta) -> None:
        """What became of a draft: the nodes that stood, as far as the request took them, and what it gained."""
        self.outside.saw(delta.tokens)
        request, stood = delta.request, sum(delta.drafted)
        offered = self.given.pop(request, 0)
        if self.by_load and offered and not delta.finished:
            self.load.saw(offered, stood, drafted=draft.depth)
        if self.guard is not None and len(draft) and not is_repeatable(request):
            # The target said something else where the draft went on: a miss. A request that ended may not have come so far.
            missed = len(delta.tokens) > stood and bool(draft.children(accepted[-1] if accepted else -1))
            self.guard.saw(request, stood + missed, stood, nameable=self.outside.holds(delta.tokens[-1]))

    def took(self, batch: Sequence[Scheduled], due: Sequence[Settled], verifying: float, drafting: float) -> None:
        """Seconds of a step. Those that read prompts, catch up or explore are told apart from the others."""
        if not self.by_load:
            return
        self.num_steps += 1
        if self.num_steps % FADE == 0:
            for table in (self.verifying, self.reading, *self.drafting.values()):
                table.fade()
        if any(item.num_tokens > 1 for item in batch):
            self.reading.saw(sum(item.num_rows for item in batch), verifying)
            return
        self.verifying.saw(sum(item.num_rows for item in batch), verifying)
        drafted_for = [item for item in due if item.room]
        caught_up = sum(len(item.rows) for item in due) > sum(item.num_rows for item in batch)
        if drafted_for and self.explorer is None and not caught_up and self.now in self.drafting:
            self.drafting[self.now].saw(len(drafted_for), drafting)

    def forget(self, request: Request) -> None:
        self.given.pop(request, None)
        if self.guard is not None:
            self.guard.forget(request)
        if self.backlog is not None:
            self.backlog.forget(request)

    def _allowed(self, request: Request) -> int:
        return self.limit if self.guard is None else self.guard.depth(request)

    def _prompt_waits(self, request: Request) -> bool:
        """Others find a prompt's pages, and rely on the drafter's pairs in them, unless the request was set apart."""
        may_wait = request.page_keys is None or self.is_apart(request)
        return may_wait and not self.now and self.is_known and not is_repeatable(request)

    def _lag(self, request: Request) -> int:
        return self.backlog.lag(request) if self.backlog is not None else 0


def is_repeatable(request: Request) -> bool:
    """A seeded answer must come out the same again, and here the drawing of it depends on how deep each draft was."""
    return request.params.seed is not None and not request.params.greedy
