"""Collects from finished requests: samples to learn from, and live acceptance by domain and client."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from fledge.engine.engine import Engine
from fledge.engine.request import Delta, Request
from fledge.learning.config import LearnConfig
from fledge.learning.journal import Journal
from fledge.learning.micro_steps import Budget
from fledge.learning.samples import CLIENT_SHARE, Sample, SampleRing
from fledge.learning.served import ServedDrafter
from fledge.learning.target import ServedTarget

LATELY = 256  # clients' shares are counted over about this many recent requests
NOVEL_PRIORITY, SHORTENED_PRIORITY = 0.5, 1.0  # added to a sample's priority
PROMPT_TOKENS = 64  # the domain is computed from the last tokens of the prompt …
ANSWER_TOKENS = 1024  # … and the first tokens of the answer

BINS = 512  # of a text's histogram of hashed tokens
# A text whose similarity to all centres is lower opens a new cluster, if there is room. Two prompts of one template have a
# similarity of about 0.8, two languages below 0.2.
NOVEL_BELOW = 0.35
FOLLOW = 0.05  # fraction by which a centre moves towards a new text of its cluster
# A cluster unused for this many texts may be replaced by a new one. With a lower number, a client that sends only new words
# would replace clusters that others still use.
RETIRE_AFTER = 512


class Admission:
    """Limits how many finished requests per second are considered. A client above its share leaves room for others."""

    def __init__(self, per_second: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self.per_second, self.clock = per_second, clock
        # Credit that only clients below their share may use, so that one client cannot take all of it.
        self.reserve = CLIENT_SHARE * per_second
        self.credit = self.most_credit = per_second + self.reserve
        self.looked_at: Counter[str] = Counter()  # recently admitted requests by client
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
        """Whether a client has more than its share while there are other clients."""
        return len(self.looked_at) > 1 and self._is_largest(client)

    def _is_largest(self, client: str) -> bool:
        # Only the largest client counts as over its share: of four equal ones, each is slightly above a quarter at times.
        count = self.looked_at[client]
        return count > CLIENT_SHARE * self.looked_at.total() and count == max(self.looked_at.values())


class Domains:
    """Clusters of texts by their words: one-pass leader clustering of token histograms. No text is kept."""

    def __init__(self, max_clusters: int = 8) -> None:
        self.max_clusters = max_clusters
        self.centres_KB = np.zeros((0, BINS), np.float32)
        self.ids: list[int] = []  # of the clusters; a new one gets a new id
        self.last_used: list[int] = []  # number of the last text in each cluster
        self.num_texts = self._next_id = 0

    def assign(self, tokens: Sequence[int]) -> tuple[int, float]:
        """Returns the cluster of a text and its novelty: 0 for a text just like its cluster, 1 for one unlike all before."""
        bins = (np.asarray(tokens, np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(55)  # 9 bits: BINS
        histogram = np.sqrt(np.bincount(bins.astype(np.int64), minlength=BINS)).astype(np.float32)
        histogram /= max(float(np.linalg.norm(histogram)), 1e-9)
        alike = self.centres_KB @ histogram
        best = int(alike.argmax()) if len(alike) else -1
        novelty = 1.0 - (float(alike[best]) if len(alike) else 0.0)
        self.num_texts += 1
        if 1.0 - novelty < NOVEL_BELOW:
            if len(self.ids) == self.max_clusters and not self._retire():
                return self.ids[best], novelty  # nearest cluster; the text is unlike it, so it does not move the centre
            self.centres_KB = np.concatenate([self.centres_KB, histogram[None]])
            self.ids.append(self._next_id)
            self.last_used.append(self.num_texts)
            self._next_id += 1
            return self.ids[-1], 1.0
        centre = self.centres_KB[best] + FOLLOW * (histogram - self.centres_KB[best])
        self.centres_KB[best] = centre / np.linalg.norm(centre)
        self.last_used[best] = self.num_texts
        return self.ids[best], novelty

    def _retire(self) -> bool:
        """Drops the least recently used cluster; returns False if all are in use."""
        least = min(range(len(self.ids)), key=self.last_used.__getitem__)
        if self.num_texts - self.last_used[least] < RETIRE_AFTER:
            return False
        self.centres_KB = np.delete(self.centres_KB, least, axis=0)
        del self.ids[least], self.last_used[least]
        return True


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
        self._salt = secrets.token_bytes(16)  # clients are identified by a hash that is useless outside this process

    def watch(self, deltas: Sequence[Delta]) -> None:
        """Records after each step for which requests the drift guard reduces the depth."""
        guard = self.engine.controller.guard
        if guard is not None and guard.counts.shortened:
            self.shortened &= self.engine.requests.keys() | {d.request.id for d in deltas}  # removes aborted requests
            self.shortened |= {d.request.id for d in deltas if guard.depth(d.request) < guard.limit}

    def take_in(self, requests: Sequence[Request]) -> int:
        """Makes samples of finished requests, and returns how many became one."""
        num_samples = sum(self._take_in(request) for request in requests)
        self.engine.executor.drop_states(requests)  # of the requests that did not become samples
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
        if not self.admission.admits(client):  # at thousands of tokens/s, processing every request would use up the budget
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
        """Adds a request's acceptance to the live figures, and returns the share of its drafts that was rejected."""
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
