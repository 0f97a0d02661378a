"""The scheduler: decides which requests take part in the next step, and with how many tokens.

    waiting  --admit: pages, a free row, the step's token budget-->  running: prefilling, then decoding  --> finished
       ^                                                                 |
       +------- preempted (the cache is full) or recomputed -------------+

Running requests come first. Waiting ones join in order of arrival while rows, pages and tokens are left. A prompt longer than a
chunk is prefilled in chunks. When the cache is full the youngest request is preempted: its pages are freed, its text is kept,
and it is prefilled again before any new request, except for the prefix that is still cached.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from fledge.engine.admission import AdmissionPolicy
from fledge.engine.config import EngineConfig
from fledge.engine.executors.base import Chunk, Executor, Plan
from fledge.engine.kv_pool import PagePool
from fledge.engine.recompute import RecomputePolicy
from fledge.engine.request import Request
from fledge.errors import RequestError
from fledge.speculation.controller import SpeculationController


class Scheduler:
    def __init__(
        self,
        config: EngineConfig,
        pool: PagePool,
        executor: Executor,
        controller: SpeculationController,
        admission: AdmissionPolicy,
    ) -> None:
        self.config, self.pool, self.executor, self.controller, self.admission = config, pool, executor, controller, admission
        self.recompute = RecomputePolicy(controller.acceptance)
        self.waiting: deque[Request] = deque()
        self.running: dict[Request, None] = {}  # in order of admission
        self.num_preemptions = self.num_recomputed = 0

    def check(self, length: int, max_tokens: int) -> None:
        """Raises if a prompt of `length` tokens could never be served."""
        longest = self.config.max_model_len
        if not length:
            raise RequestError("the prompt is empty; give at least one token")
        if length >= longest:
            raise RequestError(
                f"the prompt has {length} tokens and the context holds {longest}, answer included; shorten the prompt"
            )
        lookahead = self.executor.lookahead
        needed = min(length + max_tokens, longest) + lookahead
        capacity = self.pool.num_pages * self.pool.page_size
        if self.pool.pages_for(needed) > self.pool.num_pages:
            raise RequestError(
                f"the request may need {needed} tokens of cache (prompt {length}, answer up to {max_tokens}, "
                f"draft {lookahead}) and the cache holds {capacity}; lower max_tokens or enlarge the cache"
            )

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def longest(self, request: Request) -> int:
        """The most tokens that prompt and answer may have together."""
        return min(len(request.prompt) + request.params.max_tokens, self.config.max_model_len)

    def schedule(self) -> Plan:
        """Plans the next step; allocates pages, and preempts and admits requests."""
        interrupted = self._recompute_stale()
        decoding = [request for request in self.running if request.is_prefilled]
        prefilling = [request for request in self.running if not request.is_prefilled]
        plan = Plan(expects_requests=bool(prefilling or self.num_admissible))
        self.executor.prepare(decoding, expects_requests=plan.expects_requests)
        depth = self.controller.choose(decoding)
        if decoding:
            plan.cycles = self.executor.cycles_ahead(expects_requests=plan.expects_requests)
            depths = dict.fromkeys(decoding, depth)
            if self.executor.is_ragged:
                most = max(self._decode_budget(plan) // len(decoding) - 1, 0)
                depths = {request: min(self.controller.depth_for(request), most) for request in decoding}
            interrupted |= self._grow(plan, depths)
            plan.decodes = {request: depth for request, depth in depths.items() if request in self.running}
        budget = self.executor.prefill_budget(sum(depth + 1 for depth in plan.decodes.values()))
        for request in prefilling:
            if request in self.running:
                budget -= self._prefill(plan, request, budget)
        # An interrupted request is not admitted in the same step: output of submitted steps must be collected first.
        if not interrupted:
            self._admit(plan, budget)
        return plan

    def _decode_budget(self, plan: Plan) -> int:
        """The number of rows for pending tokens and drafts. While a prompt waits, a quarter of the step is left for it:
        otherwise 32 requests at a depth of 7 would take all 256 rows, and a new one would have to wait until they finish."""
        budget = self.config.max_batched_tokens
        return budget - budget // 4 if plan.expects_requests else budget

    # Decoding: KV pages for the next tokens

    def _grow(self, plan: Plan, depths: dict[Request, int]) -> bool:
        """Allocates pages for what submitted steps and this one may emit, preempting the youngest requests if necessary.

        Returns whether a request was preempted.
        """
        unread, preempted = self.executor.max_unread_tokens, False
        page_size, lookahead = self.pool.page_size, self.executor.lookahead
        for request, depth in depths.items():
            needed = len(request.tokens) + unread + plan.cycles * (depth + 1) + lookahead
            if needed <= len(request.pages) * page_size or request not in self.running:  # preempted for an older one
                continue
            needed, before = min(needed, self.longest(request) + lookahead), len(request.pages)
            while not self.pool.grow(request.pages, needed):
                victim = max(self.running, key=lambda other: other.arrival)
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            else:
                plan.grown.append((request, before))
        return preempted

    def _preempt(self, request: Request) -> None:
        self._interrupt([request])
        request.num_preemptions += 1
        self.num_preemptions += 1

    def _interrupt(self, requests: Sequence[Request]) -> None:
        """Takes requests out of the batch; they are prefilled again from their text, before any new request."""
        self._release(requests)
        for request in sorted(requests, key=lambda request: -request.arrival):
            request.num_computed = request.prefill_end = 0
            self.waiting.appendleft(request)

    def _recompute_stale(self) -> bool:
        """Interrupts requests that plain cycles made stale, so that they are prefilled again, if the load is low enough for
        speculation again. Returns whether it did."""
        policy, executor = self.recompute, self.executor
        if not self.controller.adaptive or not any(request.drafter_stale for request in self.running):
            return False
        running = [request for request in self.running if request.is_prefilled]
        stale = [request for request in running if request.drafter_stale and request not in policy.done]
        if not stale or self.waiting or len(running) < len(self.running):
            policy.num_agreeing = 0
            return False
        # Each needs as many pages as it has now, and at its admission one page per running request must be free.
        if self.pool.num_free < len(running) + len(stale):
            return False
        drafted = [request for request in running if request.speculate and not request.drafter_stale] + stale
        # It is unknown where an answer ends: assume that it is half done.
        remaining = [
            min(request.num_answer, self.longest(request) - len(request.prompt) - request.num_answer) for request in stale
        ]
        num_tokens = sum(len(request.tokens) for request in stale)
        pays = policy.pays(
            lambda depth: executor.costs.seconds(len(running), len(drafted), depth),
            len(drafted) / len(running),
            self.controller.allowed(drafted),
            remaining,
            executor.recompute_seconds(num_tokens),
        )
        if not policy.is_due(pays):
            return False
        policy.done.update(stale)
        self.num_recomputed += len(stale)
        self._interrupt(stale)
        return True

    # Prefill and admission

    def _prefill(self, plan: Plan, request: Request, budget: int) -> int:
        remaining = request.prefill_end - request.num_computed
        num_tokens = self.executor.chunk_tokens(remaining, budget, plan.prefills)
        if num_tokens > 0:
            plan.prefills.append(Chunk(request, request.num_computed, num_tokens))
            request.num_computed += num_tokens
        return max(num_tokens, 0)

    @property
    def num_admissible(self) -> int:
        """The number of waiting requests for which there is a free row."""
        return min(len(self.waiting), self.config.max_num_seqs - len(self.running))

    def _admit(self, plan: Plan, budget: int) -> None:
        if self._holds_back():
            return
        num_waiting, size = len(self.waiting), self.pool.page_size
        while self.waiting and len(self.running) < self.config.max_num_seqs:
            request = self.waiting[0]
            length = len(request.tokens)
            found = self.pool.find(request.page_keys)
            if len(found) * size < self.executor.least_reuse(length):
                found = []
            if not self.executor.admits(length - len(found) * size, budget, plan.prefills):
                break
            request.num_computed = self.pool.take(request.pages, found, request.page_keys)
            # One page per running request stays free: otherwise its next growth would preempt the new request again.
            if not self.pool.grow(request.pages, length + self.executor.lookahead + 1, len(self.running) * size):
                self.pool.release(request.pages)
                request.num_computed = 0
                break
            self.waiting.popleft()
            self.running[request] = None
            request.prefill_end, request.drafter_stale = length, False
            self._count_reuse(request)
            budget -= self._prefill(plan, request, budget)
        if len(self.waiting) < num_waiting:
            self.admission.admitted(self.num_admissible, time.perf_counter())

    def _holds_back(self) -> bool:
        """Whether admission should wait for more requests. Never if the first one is a preempted request."""
        if not self.waiting or self.waiting[0].num_answer:
            return False
        return self.admission.holds_back(
            waiting=self.num_admissible,
            are_last=self.num_admissible == len(self.waiting),
            running=len(self.running),
            prefill_seconds=self.executor.prefill_seconds,
            now=time.perf_counter(),
        )

    def _count_reuse(self, request: Request) -> None:
        """Counts reused tokens for the hit rate, except when a preempted request finds its own pages."""
        if request.page_keys is not None and request.num_cached is None:
            request.num_cached = request.num_computed
            self.pool.num_queried += len(request.tokens)
            self.pool.num_found += request.num_cached

    # Leaving

    def remove(self, requests: Sequence[Request]) -> None:
        """Removes finished or cancelled requests; their pages are free at once."""
        self._release([request for request in requests if request in self.running])
        for request in requests:
            if request in self.waiting:
                self.waiting.remove(request)
            self.recompute.done.discard(request)
            self.controller.forget(request)

    def _release(self, requests: Sequence[Request]) -> None:
        self.executor.release(requests)
        for request in requests:
            del self.running[request]
            self.pool.release(request.pages)

    def check_integrity(self) -> None:
        self.pool.check_integrity([request.pages for request in [*self.running, *self.waiting]])
        self.executor.check_integrity(list(self.running))
