"""Admission policies: they decide when waiting requests join the running ones, given free rows and pages.

Serving: a prefill pass delays every running request and takes hardly longer for several prompts than for one. If a request
arrives every `gap` seconds and n are admitted together, the first waits n - 1 gaps, the second n - 2, …, and they share the
delay of one pass. Request-seconds lost per new request: (n - 1) / 2 * gap + running * pass / n. Waiting for one more pays as
long as n (n + 1) gap < 2 * running * pass. With few running requests it never pays; with 64, n is about ten.
"""

from __future__ import annotations

from typing import Protocol

LONGEST_WAIT = 0.025  # seconds that a request is held back at most
NEWEST = 0.1  # weight of the latest gap in the mean
# Offline, waiting prompts are admitted once they number this share of the running requests, so that a prefill pass is large.
REFILL_SHARE = 1 / 32


class AdmissionPolicy(Protocol):
    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        """Whether the `waiting` requests that could be admitted now should wait for more. `are_last`: no others wait."""
        ...

    def admitted(self, left: int, now: float) -> None:
        """Records that requests were admitted; `left`: how many more could be admitted and still wait."""
        ...


class ArrivalBatching:
    """The server's policy: balances the wait of new requests against the delay that a prefill pass causes for running ones."""

    def __init__(self) -> None:
        self.gap = 0.0  # mean seconds between arrivals
        self.seen = 0  # waiting requests at the last call
        self.last_arrival = self.since = 0.0  # arrival times of the newest and of the oldest waiting request

    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        if not self.seen:
            self.since = now
        arrived, self.seen = waiting - self.seen, waiting
        if arrived > 0:
            gap = (now - self.last_arrival) / arrived
            self.gap += (gap - self.gap) * NEWEST if self.last_arrival else 0.0
            self.last_arrival = now
        gap = max(self.gap, now - self.last_arrival)  # the larger one if no request has arrived for longer than the mean gap
        return (
            bool(waiting) and now - self.since < LONGEST_WAIT and waiting * (waiting + 1) * gap < 2 * running * prefill_seconds
        )

    def admitted(self, left: int, now: float) -> None:
        self.seen, self.since = left, now


class OfflineRefill:
    """The policy for a set of prompts: keeps the batch full with few, large prefill passes. Latency does not matter."""

    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        return not are_last and waiting < int(running * REFILL_SHARE)

    def admitted(self, left: int, now: float) -> None:
        """Does nothing: this policy needs no arrival times."""
