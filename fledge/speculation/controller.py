"""The speculation controller: how deep each request is drafted for, from acceptance, step costs and the drift guard.

choose(running)    before a step: the depth with the highest expected tokens/s at the current load
observe(outputs)   after it: what was drafted, accepted and emitted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, runtime_checkable

from fledge.speculation.acceptance import AcceptanceModel
from fledge.speculation.costs import RowCosts, StepCosts
from fledge.speculation.coverage import VocabularyCoverage
from fledge.speculation.guard import DriftGuard
from fledge.speculation.stats import AcceptanceStats
from fledge.speculation.verification import VerifiedPass

# With learnt costs, speculation must be expected to gain this much: less is lost to what is not known well enough and to the
# drafter's share of the prefills that come meanwhile.
LEAST_GAIN = 1.08
# Learnt costs are this uncertain. Too deep costs less than too shallow: a drafter that is not sure stops by itself.
LEARNT_ERROR = 0.06
# Steps after which one request is drafted for to the limit although the load speaks against it: an acceptance that was poor
# once would otherwise never be seen to improve. Costs less than 1 % of the time.
EXPLORE_EVERY = 256
# Steps of drafting after which one goes without: the cost of a plain step may have been measured in a bad moment. Where
# drafting gains less than CLOSE, that is likely to matter, and a plain step costs less than 2 % of the time: more often.
PLAIN_EVERY, PLAIN_EVERY_IF_CLOSE, CLOSE = 48, 12, 1.25
# Steps after which costs that were not measured meanwhile count as half as well known.
DECAY_EVERY = 256
# Steps for which a choice is kept while the same number of requests runs: choosing takes 8 % of a small step.
KEEP_CHOICE = 16
# When drafting resumes the drafter first processes its pending hidden states, at this share of the target's prefill cost. It
# must be expected to gain that back within so many steps.
SYNC_SHARE, SYNC_STEPS = 1 / 20, 32
# Rows that the guard judges a step, at most: beyond that it takes the host longer than it saves.
GUARDED_ROWS = 16


@runtime_checkable
class Drafted(Hashable, Protocol):
    """What the controller knows of a request."""

    speculate: bool
    drafter_stale: bool
    stats: AcceptanceStats


class Observed(Protocol):
    """What a step emitted for one request, stops applied."""

    @property
    def request(self) -> Drafted: ...

    @property
    def tokens(self) -> list[int]: ...

    @property
    def drafted(self) -> list[bool]:
        """Per token: the drafter proposed it."""
        ...

    @property
    def passes(self) -> list[VerifiedPass]:
        """The target passes they came from, in order."""
        ...


class SpeculationController:
    def __init__(
        self,
        limit: int,
        *,
        adaptive: bool = False,
        guard: bool = False,
        coverage: VocabularyCoverage | None = None,
    ) -> None:
        """`limit`: the deepest that was asked for; 0: speculation is off. `adaptive`: depth follows the load."""
        self.limit, self.adaptive = limit, adaptive
        self.acceptance = AcceptanceModel(limit)
        self.guard = DriftGuard(limit) if guard and limit else None
        self.coverage = coverage or VocabularyCoverage(None)
        self.stats = AcceptanceStats()
        self.pending_tokens: Callable[[Any], int] = lambda request: 0  # tokens of a request that the drafter has yet to process
        self.costs: StepCosts | None = None
        self.depth = limit  # chosen for the current step
        self.explorer: Drafted | None = None  # drafted for to the limit, whatever the load
        self.num_steps = 0
        self._kept: tuple[int, int] | None = None  # numbers of running and eligible requests that the choice was made for
        self._shallow_steps = self._drafting_steps = self._observations = 0

    def use_costs(self, costs: StepCosts) -> None:
        """The executor's cost model. Learnt costs ask for a larger gain than recorded ones."""
        self.costs = costs
        if isinstance(costs, RowCosts):
            self.acceptance.margin = 1 / LEAST_GAIN
            self.acceptance.tolerance = LEARNT_ERROR

    def stop(self) -> None:
        """Nothing is drafted any more."""
        self.limit = self.depth = 0
        self.guard, self.explorer, self.pending_tokens = None, None, lambda request: 0

    # Before a step

    def choose(self, running: Sequence[Drafted]) -> int:
        """Chooses the depth of the next step for these requests; see `depth_for`."""
        eligible = [request for request in running if request.speculate and not request.drafter_stale]
        self.explorer = None
        if not (self.limit and eligible):
            self.depth, self._kept = 0 if running else self.depth, None
        elif not self.adaptive or self.costs is None:
            self.depth = self.acceptance.choose(1.0, lambda depth: None, self.allowed(eligible))
        elif isinstance(self.costs, RowCosts):
            self._choose_and_explore(running, eligible, self.costs)
        else:
            self.depth = self._best(len(running), eligible)
        if running and not self.depth:
            self.acceptance.decay()
        return self.depth

    def depth_for(self, request: Drafted) -> int:
        """How deep a request is drafted for in this step."""
        if not request.speculate or request.drafter_stale:
            return 0
        allowed = self.limit if self.guard is None else self.guard.depth(request)
        return min(allowed, self.limit if request is self.explorer else self.depth)

    def pays_with(self, num_requests: int) -> bool:
        """Whether speculation is expected to pay with so many requests, all of them drafted for."""
        costs = self.costs
        if not self.adaptive or costs is None:
            return self.limit > 0
        return bool(self.acceptance.choose(1.0, lambda depth: costs.seconds(num_requests, num_requests, depth)))

    def _choose_and_explore(self, running: Sequence[Drafted], eligible: list[Drafted], costs: RowCosts) -> None:
        self.num_steps += 1
        if self.num_steps % DECAY_EVERY == 0:
            costs.decay()
        counts = len(running), len(eligible)
        if counts != self._kept or self.num_steps % KEEP_CHOICE == 0:
            # What a plain step costs is learnt first: that takes nothing from anyone.
            self.depth = self._best(len(running), eligible) if costs.is_known else 0
            self._kept = counts if costs.is_known else None
        self._drafting_steps = self._drafting_steps + 1 if self.depth else 0
        if len(eligible) > 1 and self._drafting_steps > (PLAIN_EVERY if self.acceptance.gain > CLOSE else PLAIN_EVERY_IF_CLOSE):
            self.depth, self._drafting_steps, self._kept = 0, 0, None  # for one step
        self._shallow_steps = 0 if self.depth == self.limit else self._shallow_steps + 1
        if self._shallow_steps >= EXPLORE_EVERY:
            self.explorer, self._shallow_steps = min(eligible, key=self.pending_tokens), 0

    def _best(self, num_running: int, eligible: Sequence[Drafted]) -> int:
        costs, sync = self.costs, 0.0
        assert costs is not None
        if isinstance(costs, RowCosts):
            pending = sum(self.pending_tokens(request) for request in eligible)
            sync = costs.prefill_seconds(pending) * SYNC_SHARE / SYNC_STEPS if pending else 0.0

        def seconds(depth: int) -> float | None:
            cost = costs.seconds(num_running, len(eligible), depth)
            return cost if cost is None or not depth else cost + sync

        return self.acceptance.choose(len(eligible) / num_running, seconds, self.allowed(eligible))

    def allowed(self, requests: Sequence[Drafted]) -> list[int]:
        """How deep the guard lets each be drafted for; empty: as deep as was asked."""
        guard = self.guard
        return [guard.depth(request) for request in requests] if guard is not None and guard.counts.shortened else []

    # After a step

    def observe(self, outputs: Sequence[Observed]) -> None:
        """Records what was accepted. Counts are added up first: one update per request takes too long at 256 rows."""
        self._observations += 1
        is_guarded = self.guard is not None and self._observations % (1 + len(outputs) // GUARDED_ROWS) == 0
        seen: Counter[tuple[int, int, int, int, int]] = Counter()
        for output in outputs:
            if is_guarded or self.guard is None:
                self.coverage.record(output.tokens)
            end = 0
            for verified in output.passes:
                start, end = end, end + verified.num_tokens
                flags = output.drafted[start:end]
                if not (verified.depth and flags):
                    continue
                accepted, emitted = sum(flags), len(flags)
                seen[verified.offered, verified.nodes, verified.depth, accepted, emitted] += 1
                output.request.stats.add_step(verified.nodes, verified.depth, accepted, emitted)
                if is_guarded and self.guard is not None and output.request.speculate:
                    # The target chose another token where the draft went on. A request that ended may not have come so far.
                    missed = accepted < min(verified.depth, emitted)
                    nameable = self.coverage.holds(output.tokens[start + emitted - 1])
                    trials, sure = accepted + missed, verified.confidences
                    self.guard.record(output.request, trials, accepted, nameable=nameable, confidences=sure)
        for (offered, nodes, depth, accepted, emitted), times in seen.items():
            self.acceptance.record(offered, accepted, times, depth if isinstance(self.costs, RowCosts) else None)
            self.stats.add_step(nodes, depth, accepted, emitted, times)

    def forget(self, request: Drafted) -> None:
        if self.guard is not None:
            self.guard.forget(request)
