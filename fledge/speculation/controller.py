"""The speculation controller: chooses each request's speculation depth from acceptance, step costs and the drift guard.

choose(running)    before a step: chooses the depth with the highest expected tokens/s at the current load
observe(outputs)   after it: records what was drafted, accepted and emitted
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

# The least expected speed-up of speculation with learnt costs: a smaller one may be an estimation error, or be cancelled by the
# drafter's share of prefills.
LEAST_GAIN = 1.08
# The relative error of learnt costs. Too deep costs less than too shallow, as the drafter stops early if it is not confident.
LEARNT_ERROR = 0.06
# After this many steps below the limit, one request is drafted for to the limit whatever the load: otherwise an acceptance that
# was poor once would never be seen to improve. Costs less than 1 % of the time.
EXPLORE_EVERY = 256
# After this many drafting steps one step is plain, because the cost of plain steps may have been measured at a bad moment. If
# drafting gains less than CLOSE, that matters more, and a plain step costs less than 2 % of the time: so more often.
PLAIN_EVERY, PLAIN_EVERY_IF_CLOSE, CLOSE = 48, 12, 1.25
# After this many steps the confidence in costs that were not measured again is halved.
DECAY_EVERY = 256
# Steps for which a choice is kept while the same number of requests runs: choosing takes 8 % of a small step.
KEEP_CHOICE = 16
# When drafting resumes, the drafter first processes its pending hidden states, at this share of the target's prefill cost. That
# must be expected to pay within this many steps.
SYNC_SHARE, SYNC_STEPS = 1 / 20, 32
# Most rows that the guard judges per step: more would take the host longer than it saves.
GUARDED_ROWS = 16


@runtime_checkable
class Drafted(Hashable, Protocol):
    """The properties of a request that the controller reads."""

    speculate: bool
    drafter_stale: bool
    stats: AcceptanceStats


class Observed(Protocol):
    """What a step emitted for one request, cut at its stop condition."""

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
        """The target passes that emitted the tokens, in order."""
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
        """`limit`: the configured depth; 0: speculation is off. `adaptive`: the depth follows the load."""
        self.limit, self.adaptive = limit, adaptive
        self.acceptance = AcceptanceModel(limit)
        self.guard = DriftGuard(limit) if guard and limit else None
        self.coverage = coverage or VocabularyCoverage(None)
        self.stats = AcceptanceStats()
        self.pending_tokens: Callable[[Any], int] = lambda request: 0  # tokens of a request that the drafter has not processed
        self.costs: StepCosts | None = None
        self.depth = limit  # chosen for the current step
        self.explorer: Drafted | None = None  # a request that is drafted for to the limit, whatever the load
        self.num_steps = 0
        self._kept: tuple[int, int] | None = None  # numbers of running and eligible requests for which the depth was chosen
        self._shallow_steps = self._drafting_steps = self._observations = 0

    def use_costs(self, costs: StepCosts) -> None:
        """Sets the executor's cost model. Learnt costs require a larger gain than recorded ones."""
        self.costs = costs
        if isinstance(costs, RowCosts):
            self.acceptance.margin = 1 / LEAST_GAIN
            self.acceptance.tolerance = LEARNT_ERROR

    def stop(self) -> None:
        """Turns speculation off for good."""
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
        """The speculation depth of a request in this step."""
        if not request.speculate or request.drafter_stale:
            return 0
        allowed = self.limit if self.guard is None else self.guard.depth(request)
        return min(allowed, self.limit if request is self.explorer else self.depth)

    def pays_with(self, num_requests: int) -> bool:
        """Whether speculation is expected to pay with `num_requests` requests, all of them drafted for."""
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
            # The cost of a plain step is learnt first, because that delays no request.
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
        """The depth limit that the guard sets for each request; empty: no request is limited."""
        guard = self.guard
        return [guard.depth(request) for request in requests] if guard is not None and guard.counts.shortened else []

    # After a step

    def observe(self, outputs: Sequence[Observed]) -> None:
        """Records what was accepted. Equal steps are counted first: one update per request would take too long at 256 rows."""
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
                    # Whether the target rejected a drafted token. Not so if the answer ended before the draft did.
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
