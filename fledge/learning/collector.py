"""What finished requests leave behind: samples to learn from, and live acceptance by domain and client."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

from fledge.engine.engine import Engine
from fledge.engine.request import Delta, Request
from fledge.learning.budget import Budget
from fledge.learning.config import LearnConfig
from fledge.learning.domains import Domains
from fledge.learning.journal import Journal
from fledge.learning.samples import CLIENT_SHARE, Sample, SampleRing
from fledge.learning.served import ServedDrafter
from fledge.learning.target import ServedTarget

LATELY = 256  # requests that clients' shares are counted over, about
NOVEL_PRIORITY, SHORTENED_PRIORITY = 0.5, 1.0  # added to a sample's priority
PROMPT_TOKENS = 64  # a domain is told by the answer and by so many tokens before it
ANSWER_TOKENS = 1024


class Admission:
    """Which finished requests are looked at: so many a second. A client with more than its share leaves room for others."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.per_second, self.clock = per_second, clock
        # Credit that only clients below their share may use: a client that takes all the rest cannot take this.
        self.reserve = CLIENT_SHARE * per_second
        self.credit = self.most_credit = per_second + self.reserve
        self.looked_at: Counter[str] = Counter()  # lately, by client
        self._at = clock()

    def admits(self, client: str) -> bool:
        now = self.clock()
        self.credit = min(self.credit + self.per_second * (now - self._at), self.most_credit)
        self._at = now
        if self.credit < 1 + (self.reserve if self._is_largest(client) else 0):
            return False
        self.credit -= 1
        self.looked_at[client] += 1
        if self.looked_at.total() >= LATELY:
            self.looked_at = Counter({one: count // 2 for one, count in self.looked_at.items() if count > 1})
        return True

    def is_over_share(self, client: str) -> bool:
        """Whether it has more than its share while others are there."""
        return len(self.looked_at) > 1 and self._is_largest(client)

    def _is_largest(self, client: str) -> bool:
        # The largest client alone: of four alike, each would be a little over a quarter at times.
        count = self.looked_at[client]
        return count > CLIENT_SHARE * self.looked_at.total() and count == max(self.looked_at.values())


class Collector:
    def __init__(
        self,
        engine: Engine,
        config: LearnConfig,
        target: ServedTarget,
        ring: SampleRing,
        served: ServedDrafter,
        journal: Journal,
        budget: Budget,
        clock: Callable[[], float],
    ) -> None:
        self.engine, self.target, self.ring, self.served = engine, target, ring, served
        self.journal, self.budget = journal, budget
        self.admission = Admission(config.samples_per_second, clock)
        self.domains = Domains()
        self.requests = self.opted_out = self.skipped = 0
        self.shortened: set[str] = set()  # ids of running requests that the drift guard shortened
        self.lengths_before: dict[int, float] = {}  # acceptance length by domain, before anything was learnt
        self._salt = secrets.token_bytes(16)  # clients are told apart by a hash that means nothing elsewhere

    def watch(self, deltas: Sequence[Delta]) -> None:
        """After each step: which requests the drift guard shortens."""
        guard = self.engine.controller.guard
        if guard is not None and guard.counts.shortened:
            self.shortened &= self.engine.requests.keys() | {d.request.id for d in deltas}  # not of those that were aborted
            self.shortened |= {d.request.id for d in deltas if guard.depth(d.request) < guard.limit}

    def take_in(self, requests: Sequence[Request]) -> int:
        """How many of these finished requests became samples."""
        num_samples = sum(self._take_in(request) for request in requests)
        self.engine.executor.drop_states(requests)  # of those that were not taken
        return num_samples

    def _take_in(self, request: Request) -> bool:
        shortened = request.id in self.shortened
        self.shortened.discard(request.id)
        if not request.learn:
            self.opted_out += 1
            return False
        if request.finish_reason not in ("stop", "length") or not request.num_answer:
            return False
        self.requests += 1
        client = self.client(request.client)
        if not self.admission.admits(client):  # at thousands of tokens a second, looking at each would take the budget
            self.skipped += 1
            return False
        prompt, tokens = request.prompt, request.tokens
        words = [*prompt[-PROMPT_TOKENS:], *tokens[len(prompt) : len(prompt) + ANSWER_TOKENS]]
        domain, novelty = self.domains.assign(words)
        rejected = self._note_live(request, domain, client)
        if not self.budget.allows_collecting(1 - CLIENT_SHARE if self.admission.is_over_share(client) else 1.0):
            self.skipped += 1
            return False
        priority = rejected + NOVEL_PRIORITY * novelty + SHORTENED_PRIORITY * shortened
        sample = Sample(list(tokens), len(prompt), client, domain, priority)
        if not self.ring.admit(sample):
            return False
        if (states := self.engine.executor.take_states(request)) is not None:
            assert sample.max_states is not None
            found = self.target.collected(sample.tokens, sample.answer_start, *states, sample.max_states)
            if found is not None:
                sample.keep(*found)
        return True

    def client(self, name: str) -> str:
        return hashlib.blake2b(name.encode(), key=self._salt, digest_size=8).hexdigest()

    def _note_live(self, request: Request, domain: int, client: str) -> float:
        """Adds a request's acceptance to the live figures; the share of its drafts that was rejected."""
        stats, live = request.stats, self.served.live
        self.served.note_passes(request.num_answer, stats.accepted)
        if not stats.steps:
            return 0.5
        if domain not in live.by_domain:  # a new cluster may have taken the place of a retired one
            live.keep(self.domains.ids)
            self.lengths_before = {one: length for one, length in self.lengths_before.items() if one in self.domains.ids}
        live.add(domain, client, stats.steps, stats.accepted, stats.accepted_at[0])
        if not self.served.generation and (length := live.length_of(domain)) is not None:
            self.lengths_before[domain] = length
        self.journal.add_request(stats.steps, stats.accepted)
        deeper = zip(stats.accepted_at, stats.drafted_at[1:], strict=False)
        tried = stats.steps + sum(min(reached, drafted) for reached, drafted in deeper)
        return 1 - stats.accepted / tried
