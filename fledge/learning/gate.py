"""The gate: on the same texts, a candidate must beat the serving drafter on recent traffic, and lose nothing on the fixed set.

The roll-back check compares live acceptance after a swap with that before it, within each domain cluster. No single client can
cause a roll-back once the others have four requests in a domain before and after the swap.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from fledge.drift.metrics import Count, acceptance_length, counted, length_ratio
from fledge.drift.rollout import roll_out
from fledge.drift.texts import TargetText
from fledge.learning.config import LearnConfig
from fledge.models.drafter import EagleDrafter

LEAST_TEXTS = 4  # texts that a domain needs to be judged separately
# No domain may lose more than this share of its acceptance length beyond noise, whatever the others gain.
MAX_DOMAIN_LOSS = 0.02
# Roll-back: requests needed since the swap; the fall as a share of acceptance, and in standard errors, that triggers it; and
# requests after which the check ends, because by then the traffic has changed too.
LEAST_REQUESTS, CLEAR_FALL, FALL_ERRORS, COMPARED_REQUESTS = 24, 0.03, 3.0, 400
MAX_CLIENTS = 64  # counted separately in live figures; all others count as one client


@torch.no_grad()
def accepted_counts(drafter: EagleDrafter, texts: Sequence[TargetText], depth: int) -> list[Count]:
    """Returns what greedy drafts of this depth accept on each text."""
    rollout = roll_out(drafter, texts, depth, probe=False)
    rows = torch.bincount(rollout.text_M, minlength=len(texts)).tolist()
    matched = rollout.accept_prob_MJ.long().cumprod(1).sum(1).cpu().split(rows)
    return [counted(one.tolist(), depth) for one in matched]


@dataclass(frozen=True)
class Decision:
    """The decision on one candidate, with its figures."""

    accepted: bool
    reason: str
    recent_before: float = 0.0  # acceptance lengths
    recent_after: float = 0.0
    recent_error: float = 0.0  # standard error of after / before
    fixed_before: float | None = None  # of the first generation or the serving one, whichever is better
    fixed_after: float | None = None
    num_texts: int = 0
    is_worse: bool = False  # worse beyond noise on some group of texts

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def judge(
    config: LearnConfig,
    before: Sequence[Count],
    after: Sequence[Count],
    domains: Sequence[int],
    fixed_before: Sequence[Count] = (),
    fixed_after: Sequence[Count] = (),
    clients: Sequence[str] = (),
) -> Decision:
    """Compares a candidate's counts (`after`) with the serving drafter's (`before`); `domains`, `clients`: of the texts."""
    ratio = length_ratio(after, before)
    error = ratio.error if ratio.error is not None else math.inf
    figures: dict[str, Any] = {
        "recent_before": acceptance_length(before).value,
        "recent_after": acceptance_length(after).value,
        "recent_error": error,
        "num_texts": len(before),
    }
    if fixed_before:
        figures |= {
            "fixed_before": acceptance_length(fixed_before).value,
            "fixed_after": acceptance_length(fixed_after).value,
        }
    if not math.isfinite(ratio.value):
        return Decision(False, "not finite", is_worse=True, **figures)
    if fixed_before:
        kept = length_ratio(fixed_after, fixed_before)
        lost, noise = 1 - kept.value, config.standard_errors * (kept.error or 0.0)
        if lost > max(config.max_fixed_loss, noise):
            is_worse = lost > config.max_fixed_loss + noise
            return Decision(False, f"loses {lost:.1%} on the fixed set", is_worse=is_worse, **figures)
    groups = {f"in domain {domain}": [i for i, one in enumerate(domains) if one == domain] for domain in sorted(set(domains))}
    if clients:  # the gain of one busy client must not hide a loss of all others
        most = max(sorted(set(clients)), key=clients.count)
        groups["for all but one client"] = [i for i, one in enumerate(clients) if one != most]
    for name, mine in groups.items():
        if len(mine) < LEAST_TEXTS:
            continue
        part = length_ratio([after[i] for i in mine], [before[i] for i in mine])
        lost, noise = 1 - part.value, config.standard_errors * (part.error or 0.0)
        if lost > max(MAX_DOMAIN_LOSS, noise):
            is_worse = lost > MAX_DOMAIN_LOSS + noise
            return Decision(False, f"loses {lost:.1%} {name}", is_worse=is_worse, **figures)
    gain = ratio.value - 1
    if gain < max(config.min_gain, config.standard_errors * error):
        return Decision(
            False,
            f"gains {gain:+.1%} on recent traffic: within noise",
            is_worse=gain < -config.standard_errors * error,
            **figures,
        )
    return Decision(True, f"gains {gain:+.1%} on recent traffic", **figures)


NO_SUMS = (0.0, 0.0, 0.0, 0.0, 0.0)  # requests, rates, their squares, steps, accepted tokens


@dataclass
class Live:
    """Acceptance of served requests under one generation: sums for means and variances between requests."""

    requests: int = 0
    steps: int = 0
    accepted: int = 0
    by_domain: dict[int, list[float]] = field(default_factory=dict)
    by_client: dict[str, dict[int, list[float]]] = field(default_factory=dict)  # by client, then domain

    def add(self, domain: int, client: str, steps: int, accepted: int, first_accepted: int) -> None:
        """Adds a request. `first_accepted`: steps whose first draft token was accepted. The roll-back check compares their
        share: later draft positions are harder, and how many there are depends on the load."""
        self.requests += 1
        self.steps += steps
        self.accepted += accepted
        rate = first_accepted / steps
        if client not in self.by_client and len(self.by_client) >= MAX_CLIENTS:
            client = "others"
        for sums in (self.by_domain, self.by_client.setdefault(client, {})):
            pairs = zip(sums.get(domain, NO_SUMS), (1, rate, rate * rate, steps, accepted), strict=True)
            sums[domain] = [sum(pair) for pair in pairs]

    def keep(self, domains: Collection[int]) -> None:
        """Drops the figures of all other domains; the id of a retired cluster is never used again."""
        for sums in (self.by_domain, *self.by_client.values()):
            for retired in sums.keys() - set(domains):
                del sums[retired]

    def without(self, client: str) -> dict[int, list[float]]:
        """Returns the sums by domain of all other clients."""
        mine = self.by_client.get(client, {})
        return {
            domain: [a - b for a, b in zip(sums, mine.get(domain, NO_SUMS), strict=True)]
            for domain, sums in self.by_domain.items()
        }

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 1.0

    def length_of(self, domain: int) -> float | None:
        _, _, _, steps, accepted = self.by_domain.get(domain, NO_SUMS)
        return 1 + accepted / steps if steps else None


def has_fallen(before: Live, after: Live) -> bool:
    """Whether live acceptance is clearly lower than under the generation before, within the domains that both have served.

    It must also be lower without any single client, whose texts may just have become harder. If the other clients have too few
    requests to decide, this second condition is skipped.
    """
    if after.requests < LEAST_REQUESTS or not _is_lower(before.by_domain, after.by_domain):
        return False
    clients = before.by_client.keys() | after.by_client.keys()
    return all(_is_lower(before.without(one), after.without(one)) is not False for one in clients)


def _is_lower(before: dict[int, list[float]], after: dict[int, list[float]]) -> bool | None:
    """Whether acceptance is clearly lower; None if there are too few requests to decide."""
    weight = difference = variance = base = 0.0
    for domain in before.keys() & after.keys():
        if min(before[domain][0], after[domain][0]) < LEAST_TEXTS:
            continue
        (n, rate, spread), (m, other, wide) = (_mean_and_variance(one[domain]) for one in (before, after))
        weight += m
        base += m * rate
        difference += m * (other - rate)
        variance += m * m * (spread / n + wide / m)
    if not weight:
        return None
    return base > 0 and difference / base < -CLEAR_FALL and difference < -FALL_ERRORS * math.sqrt(variance)


def _mean_and_variance(sums: Iterable[float]) -> tuple[float, float, float]:
    count, total, squares, *_ = sums
    mean = total / count
    return count, mean, max(squares / count - mean * mean, 1e-4) * count / max(count - 1, 1)
