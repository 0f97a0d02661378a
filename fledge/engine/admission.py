"""Admission policies: when waiting requests join the running ones, given that there is room.

Serving: a prefill pass delays every running request and takes hardly longer for several prompts than for one. If a request
arrives every `gap` seconds and n are admitted together, the first waits n - 1 gaps, the second n - 2, … and each saves the
running requests an n-th of a pass. Request-seconds lost per new request: (n - 1) / 2 * gap + running * pass / n. One more
pays as long as n (n + 1) gap < 2 * running * pass. With few running requests that is never; with 64 it is about ten.
"""

from __future__ import annotations

from typing import Protocol

LONGEST_WAIT = 0.025  # seconds that a request is held back at most
NEWEST = 0.1  # weight of the latest gap in the mean
# Offline, prompts join when there are so many of them, as a share of the running requests: a pass should be worth its launch.
REFILL_SHARE = 1 / 32


class AdmissionPolicy(Protocol):
    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        """Whether the `waiting` requests that could be admitted now should wait for more. `are_last`: no others wait."""
        ...

    def admitted(self, left: int, now: float) -> None:
        """Some were admitted; `left` that could have been were not."""
        ...


class ArrivalBatching:
    """For serving: balances the wait of new requests against what a prefill pass costs the running ones."""

    def __init__(self) -> None:
        self.gap = 0.0  # mean seconds between arrivals
        self.seen = 0  # waiting requests at the last call
        self.last_arrival = self.since = 0.0  # of the newest and of the oldest waiting request

    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        if not self.seen:
            self.since = now
        arrived, self.seen = waiting - self.seen, waiting
        if arrived > 0:
            gap = (now - self.last_arrival) / arrived
            self.gap += (gap - self.gap) * NEWEST if self.last_arrival else 0.0
            self.last_arrival = now
        gap = max(self.gap, now - self.last_arrival)  # none has arrived for longer than usual
        return (
            bool(waiting) and now - self.since < LONGEST_WAIT and waiting * (waiting + 1) * gap < 2 * running * prefill_seconds
        )

    def admitted(self, left: int, now: float) -> None:
        self.seen, self.since = left, now


class OfflineRefill:
    """For a set of prompts: keeps the batch full with few, large prefill passes. Latency does not matter."""

    def holds_back(self, *, waiting: int, running: int, prefill_seconds: float, now: float, are_last: bool = False) -> bool:
        return not are_last and waiting < int(running * REFILL_SHARE)

    def admitted(self, left: int, now: float) -> None:
        """Keeps no record."""
