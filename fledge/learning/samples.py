"""Samples of served traffic in memory, limited by bytes, by age and by each client's share; high priority stays longest.

finished request ──▶ admit ──▶ ring        drawn for training: from a random client, the highest priority of a few samples
                          └──▶ held out    one prompt in eight, by its hash: never trained on, even if it is repeated
"""

from __future__ import annotations

import itertools
import math
import random
import time
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fledge.bench.loops import loop_start
from fledge.drift.metrics import Count
from fledge.drift.texts import TargetText

HELD_OUT_EVERY = 8
CANDIDATES = 8  # samples that an eviction or a draw chooses from
USE_DECAY = 0.7  # factor on a sample's priority per use in training
MAX_USES = 8  # a sample is not drawn more often, so that idle time does not overfit a few texts
LEAST_ANSWER = 8  # tokens; shorter answers are not kept
# Share of the ring and of the held-out texts that one client may hold if there are others.
CLIENT_SHARE = 0.25


@dataclass(eq=False)
class Sample:
    tokens: list[int]
    answer_start: int
    client: str = ""
    domain: int = 0
    priority: float = 0.5  # share of drafts that were rejected, more for novel texts and for those the drift guard shortened
    arrival: float = field(default_factory=time.monotonic)
    text: TargetText | None = None  # with the target's hidden states; None: computed at the first use
    max_states: int | None = None  # hidden states are kept for at most this many tokens: the first one and the last ones
    num_skipped: int = 0  # tokens after the first one that were left out
    key: int = 0  # hash of the whole text
    uses: int = 0
    counts: dict[int, Count] = field(default_factory=dict)  # held-out samples: what each generation's drafter accepts

    @property
    def current_priority(self) -> float:
        return self.priority * USE_DECAY**self.uses

    @property
    def num_states(self) -> int:
        """Number of tokens whose hidden states are kept."""
        return len(self.tokens) if self.max_states is None else min(len(self.tokens), self.max_states)

    def keep(self, text: TargetText, num_skipped: int = 0) -> None:
        """Stores the states of `text`, which already lacks `num_skipped` tokens after the first; cuts it to `max_states`."""
        cut = max(0, len(text.tokens_T) - (self.max_states or len(text.tokens_T)))
        if cut:
            # The first token is the attention sink; without it a drafter would not draft as it does in serving.
            assert text.hidden_TD is not None, "samples have the head's states too"
            parts = [text.tokens_T, *text.taps, text.hidden_TD]
            tokens_T, *taps, hidden_TD = (torch.cat([part[:1], part[1 + cut :]]) for part in parts)
            text = TargetText(tokens_T, max(1, text.answer_start - cut), taps, hidden_TD)
        self.num_skipped = num_skipped + cut
        self.tokens, self.answer_start, self.text = text.tokens_T.tolist(), text.answer_start, text


class SampleRing:
    """The samples of all clients. `max_tokens`: limit of all samples together. `min_held_out`: held-out texts that must fit,
    however long they are. Of a text longer than `sample_tokens`, the first token and the last ones are kept."""

    def __init__(
        self,
        max_tokens: int,
        max_held_out: int,
        *,
        min_held_out: int = 1,
        sample_tokens: int = 1 << 30,
        max_age: float = 1e9,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # A quarter of the memory is reserved for held-out texts.
        self.max_tokens, self.max_held_out_tokens = 3 * max_tokens // 4, max_tokens // 4
        self.max_held_out, self.max_age, self.clock = max_held_out, max_age, clock
        self.sample_tokens = sample_tokens  # tokens kept of one text
        self.max_held_out_states = min(self.max_held_out_tokens // min_held_out, sample_tokens)
        self.by_client: dict[str, list[Sample]] = {}
        self.tokens_of: Counter[str] = Counter()
        self.held_out: list[Sample] = []
        self.keys: set[int] = set()  # texts in the ring: a repeated one is kept once
        self.dropped: Counter[str] = Counter()  # by reason
        self.num_admitted = 0
        self.expires_at = math.inf  # no sample reaches the maximum age before this time
        self._random = random.Random(seed)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens_of.values())

    def __len__(self) -> int:
        return sum(map(len, self.by_client.values()))

    @property
    def kept(self) -> list[Sample]:
        """All samples: those to train on, then the held-out ones."""
        return [*itertools.chain(*self.by_client.values()), *self.held_out]

    def admit(self, sample: Sample) -> bool:
        """Adds a sample and evicts others if needed. Returns False if it is too short, too long, or already there."""
        if (loop := loop_start(sample.tokens[sample.answer_start :])) is not None:
            # Only the text before the loop is kept: a drafter that learns the loop would look better than it is.
            sample.tokens = sample.tokens[: sample.answer_start + loop]
            sample.text = None
        if len(sample.tokens) - sample.answer_start < LEAST_ANSWER:
            self.dropped["loop" if loop is not None else "short"] += 1
            return False
        sample.key, sample.max_states = hash(tuple(sample.tokens)), self.sample_tokens
        if is_held_out(sample.tokens[: sample.answer_start]):
            sample.max_states = self.max_held_out_states
            self.held_out = [one for one in self.held_out if one.key != sample.key]
            self.held_out.append(sample)
            self._shrink_held_out()
            self.expires_at = min(self.expires_at, sample.arrival + self.max_age)
            return True
        if sample.key in self.keys:
            self.dropped["repeated"] += 1
            return False
        if sample.num_states > self.max_tokens:
            self.dropped["long"] += 1
            return False
        self.keys.add(sample.key)
        self.by_client.setdefault(sample.client, []).append(sample)
        self.tokens_of[sample.client] += sample.num_states
        self.num_admitted += 1
        self.expires_at = min(self.expires_at, sample.arrival + self.max_age)
        while self.num_tokens > self.max_tokens:
            self._evict()
        return True

    def draw(self, room: int) -> list[Sample]:
        """Draws samples of at most `room` tokens together for one training step, each from a randomly chosen client."""
        drawn: list[Sample] = []
        left = {client: [one for one in some if one.uses < MAX_USES] for client, some in sorted(self.by_client.items())}
        while left:
            client = self._random.choice(list(left))
            few = self._random.sample(left[client], min(CANDIDATES, len(left[client])))
            fitting = [one for one in few if one.num_states <= room]
            if not fitting:  # check all of the client's samples; the client is done only if none fits
                left[client] = [one for one in left[client] if one.num_states <= room]
                if not left[client]:
                    del left[client]
                continue
            chosen = max(fitting, key=lambda one: one.current_priority)
            left[client].remove(chosen)
            chosen.uses += 1
            drawn.append(chosen)
            room -= chosen.num_states
        return drawn

    def drop_long(self, sample: Sample) -> None:
        """Drops a sample whose hidden states were not collected and that is too long to compute them."""
        self.dropped["long"] += 1
        if sample in self.held_out:
            self.held_out.remove(sample)
        elif sample in self.by_client.get(sample.client, ()):
            self._drop(sample)

    def check_integrity(self) -> None:
        samples = [one for some in self.by_client.values() for one in some]
        assert self.keys == {one.key for one in samples}
        for client, some in self.by_client.items():
            assert self.tokens_of[client] == sum(one.num_states for one in some), "a sample has changed its length"

    def forget_all(self) -> None:
        self.by_client.clear()
        self.tokens_of.clear()
        self.keys.clear()
        self.held_out.clear()
        self.expires_at = math.inf

    def _evict(self) -> None:
        """Evicts the lowest priority of a few samples: of the largest client if above its share, else of a random client."""
        heaviest, tokens = self.tokens_of.most_common(1)[0]
        over = len(self.by_client) > 1 and tokens > CLIENT_SHARE * self.max_tokens
        client = heaviest if over else self._random.choices(list(self.tokens_of), list(self.tokens_of.values()))[0]
        few = [self._random.choice(self.by_client[client]) for _ in range(CANDIDATES)]
        now = self.clock()
        # Age lowers priority by 0.1 per max_age; ties drop the older sample.
        self._drop(min(few, key=lambda one: one.current_priority - 0.1 * (now - one.arrival) / max(self.max_age, 1.0)))

    def _drop(self, sample: Sample) -> None:
        of_client = self.by_client[sample.client]
        of_client.remove(sample)
        self.tokens_of[sample.client] -= sample.num_states
        self.keys.discard(sample.key)
        if not of_client:
            del self.by_client[sample.client], self.tokens_of[sample.client]

    def _shrink_held_out(self) -> None:
        """Drops the oldest held-out texts until they fit, first those of a client above its share of texts or tokens."""
        while True:
            texts: Counter[str] = Counter()
            tokens: Counter[str] = Counter()
            for one in self.held_out:
                texts[one.client] += 1
                tokens[one.client] += one.num_states
            if texts.total() <= self.max_held_out and tokens.total() <= self.max_held_out_tokens:
                return
            shares = {who: max(texts[who] / self.max_held_out, tokens[who] / self.max_held_out_tokens) for who in texts}
            most = max(shares, key=shares.__getitem__)
            over = len(shares) > 1 and shares[most] > CLIENT_SHARE
            del self.held_out[next(i for i, one in enumerate(self.held_out) if one.client == most) if over else 0]

    def expire(self) -> None:
        """Drops samples that have reached the maximum age."""
        oldest = self.clock() - self.max_age
        self.held_out = [one for one in self.held_out if one.arrival > oldest]
        for sample in self.kept:
            if sample.arrival <= oldest:
                self._drop(sample)
        self.expires_at = min((one.arrival for one in self.kept), default=math.inf) + self.max_age


def is_held_out(prompt: Sequence[int]) -> bool:
    """Whether a prompt is held out, decided by its hash: the same prompt is never both trained on and measured with."""
    return zlib.crc32(array("q", prompt).tobytes()) % HELD_OUT_EVERY == 0
