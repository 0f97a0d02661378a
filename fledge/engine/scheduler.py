"""Which requests take part in the next step, and with how many tokens.

Running requests come first, in order of arrival; then waiting ones join while there is room. A prompt longer than the
step's token budget is read in chunks. When the cache is full the youngest request is preempted: its pages are freed, its text
kept, and it starts over from there, before any newcomer. A text whose beginning the cache still holds is computed from there.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from fledge.engine.kv_cache import PagePool
from fledge.engine.request import Request
from fledge.errors import RequestError
from fledge.speculation.verification import Draft


@dataclass
class Scheduled:
    """One request's part of a step: `num_tokens` of its text from `start`, then its draft."""

    request: Request
    start: int
    num_tokens: int
    draft: Draft

    @property
    def completes(self) -> bool:
        """Whether this pass reaches the end of the text, so that a token follows."""
        return self.start + self.num_tokens == len(self.request.tokens)

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.draft)

    def tokens(self) -> list[int]:
        return self.request.tokens[self.start : self.start + self.num_tokens] + self.draft.tokens


class Scheduler:
    def __init__(self, pool: PagePool, max_num_seqs: int, max_batched_tokens: int, max_len: int, lookahead: int) -> None:
        self.pool, self.max_num_seqs, self.max_batched_tokens = pool, max_num_seqs, max_batched_tokens
        self.max_len, self.lookahead = max_len, lookahead
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_preemptions = 0

    def check(self, length: int, max_tokens: int) -> None:
        """Refuses a prompt of `length` tokens that could never be served."""
        if not length:
            raise RequestError("the prompt is empty; give at least one token")
        if length >= self.max_len:
            raise RequestError(
                f"the prompt has {length} tokens and the context holds {self.max_len}, answer included; shorten the prompt"
            )
        longest = min(length + max_tokens, self.max_len) + self.lookahead
        capacity = self.pool.num_pages * self.pool.page_size
        if self.pool.pages_for(longest) > self.pool.num_pages:
            raise RequestError(
                f"the request may need {longest} tokens of cache (prompt {length}, answer up to {max_tokens}, "
                f"draft {self.lookahead}) and the cache holds {capacity}; lower max_tokens or enlarge the cache"
            )

    def add(self, request: Request) -> None:
        self.check(len(request.prompt), request.params.max_tokens)
        self.waiting.append(request)

    def schedule(self) -> list[Scheduled]:
        budget = self.max_batched_tokens
        batch: list[Scheduled] = []
        preempted: list[Request] = []
        for request in list(self.running):
            if request in preempted or budget <= 0:
                continue
            item = self._fit(request, budget)
            while not self.pool.grow(request.pages, item.start + item.num_rows + self.lookahead):
                victim = self.running[-1]
                self._preempt(victim)
                preempted.append(victim)
                if victim is request:
                    break
                batch = [other for other in batch if other.request is not victim]
            if request not in preempted:
                batch.append(item)
                budget -= item.num_rows
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting[0]
            request.num_computed = self.pool.take(request.pages, self.pool.find(request.page_keys), request.page_keys)
            item = self._fit(request, budget)
            if not self.pool.grow(request.pages, item.start + item.num_rows + self.lookahead):
                self.pool.release(request.pages)
                request.num_computed = 0
                break
            self.entered(request)
            self.running.append(self.waiting.popleft())
            batch.append(item)
            budget -= item.num_rows
        return batch

    def _fit(self, request: Request, budget: int) -> Scheduled:
        num_tokens = min(len(request.tokens) - request.num_computed, budget)
        draft = request.draft if num_tokens + len(request.draft) <= budget else Draft()
        return Scheduled(request, request.num_computed, num_tokens, draft)

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        request.num_computed, request.draft = 0, Draft()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(request)

    def entered(self, request: Request) -> None:
        """Counts what the cache had of a new text; a preempted one that finds itself again is not news."""
        if request.page_keys is not None and request.num_cached is None:
            request.num_cached = request.num_computed
            self.pool.num_queried += len(request.tokens)
            self.pool.num_found += request.num_cached

    def share(self, request: Request, num_computed: int) -> None:
        """Others find the request's pages as far as they are computed, by the drafter as well if it speculates."""
        self.pool.share(request.pages, request.page_keys, num_computed)

    def remove(self, request: Request) -> None:
        """A finished or cancelled request leaves; its pages are free at once."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        self.pool.release(request.pages)

    def check_integrity(self) -> None:
        self.pool.check_integrity([request.pages for request in [*self.running, *self.waiting]])
