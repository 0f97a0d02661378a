"""The drift guard: lowers the depth of a request whose drafts are clearly worse than usual, until they are normal again.

The normal range (the band) is learnt from the engine's own requests: nothing is judged during calibration (`calibration_steps`
speculative steps, `calibration_probes` probed drafts), and the band adapts slowly afterwards. Only the depth of drafts changes,
which changes no answer. A request's limit is halved, down to 1 but never to 0, so that a recovery can be detected.

    acceptance   by position in the draft, over about the request's last twenty trials, compared with all requests. If the
                 drafter gives its own probabilities, they are subtracted: low confidence on a hard text is no drift
    rms, sink    size of the fed-back state and share of attention on the sink, by draft step, from the sampled probe
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

BAND_DECAY = 0.9995  # of the counts of all requests, per trial
REQUEST_DECAY = 0.95  # of one request's counts, per trial: about twenty trials count
LEAST_TRIALS = 8.0
# A request has left the band when its rate is this far below the usual one, in absolute terms and in standard errors.
# It is back when it is below by no more than half of that.
CLEAR_DROP, STANDARD_ERRORS = 0.25, 3.0
# The same for probed figures; those of the fed-back state are relative.
CLEAR_SHIFT = {"rms": 0.5, "sink_share": 0.25}
RELATIVE = ("rms",)
DEVIATIONS = 4.0
PROBE_DECAY = 0.995
PAUSE = 8  # least steps between two shortenings of a request
# Steps for which a shortened request must be in the band before its limit is doubled. The wait is doubled each time that the
# request leaves the band again, and reset after LONGEST_WAIT steps at the full depth.
FIRST_WAIT, LONGEST_WAIT = 16, 256
REASONS = ("acceptance", "rms", "sink")
REASON_OF = {"rms": "rms", "sink_share": "sink"}


@dataclass
class GuardCounts:
    """The guard's counts since the engine's start. Plain numbers, so that another thread may read them."""

    requests: int = 0  # requests that were shortened at least once
    shortenings: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    recoveries: int = 0  # how often a request returned to the full depth
    shortened: int = 0  # requests that are shortened now
    short_steps: int = 0  # speculative steps of shortened requests


class _Rates:
    """Decayed counts by position in the draft: how often it was reached, accepted, and expected to be by the drafter."""

    def __init__(self, places: int, decay: float) -> None:
        self.decay = decay
        self.tried, self.accepted, self.expected = ([0.0] * places for _ in range(3))

    def add(self, tried: int, accepted: int, confidences: Sequence[float]) -> None:
        for place in range(min(tried, len(self.tried))):
            self.tried[place] = self.tried[place] * self.decay + 1
            self.accepted[place] = self.accepted[place] * self.decay + (place < accepted)
            self.expected[place] = self.expected[place] * self.decay + (confidences[place] if confidences else 0.0)

    def rate(self, place: int) -> float:
        return self.accepted[place] / self.tried[place]

    def surplus(self, place: int) -> float:
        """The acceptance rate minus the rate that the drafter expected."""
        return (self.accepted[place] - self.expected[place]) / self.tried[place]

    def forget_from(self, place: int) -> None:
        for deeper in range(place, len(self.tried)):
            self.tried[deeper] = self.accepted[deeper] = self.expected[deeper] = 0.0


class _Usual(_Rates):
    """The rates of all requests, used for judging only after `calibration_steps` steps."""

    def __init__(self, places: int, calibration_steps: int) -> None:
        super().__init__(places, BAND_DECAY)
        self.steps_left = calibration_steps


class _Spread:
    """The decayed mean and variance of a probed figure."""

    def __init__(self, name: str) -> None:
        self.name, self.probes, self.weight, self.mean, self.variance = name, 0, 0.0, 0.0, 0.0

    @property
    def width(self) -> float:
        clear = CLEAR_SHIFT[self.name] * (abs(self.mean) if self.name in RELATIVE else 1.0)
        return max(clear, DEVIATIONS * math.sqrt(self.variance))

    def add(self, value: float) -> None:
        self.probes += 1
        self.weight = self.weight * PROBE_DECAY + 1
        share, shift = 1 / self.weight, value - self.mean
        self.mean += share * shift
        self.variance = (1 - share) * (self.variance + share * shift * shift)


class _Watched:
    def __init__(self, limit: int) -> None:
        self.rates = _Rates(limit, REQUEST_DECAY)
        self.is_expected = False  # whether its drafts come with probabilities
        self.limit = limit
        self.since = 0  # steps since the limit changed
        self.wait = FIRST_WAIT
        self.drifting: set[str] = set()  # figures that were out of the band at the last probe
        self.unseen = 0  # steps since the last probe
        self.was_short = False
        self.has_grown = False  # whether the last change of the limit was an increase


class DriftGuard:
    def __init__(self, limit: int, *, calibration_steps: int = 256, calibration_probes: int = 16) -> None:
        """`limit`: the depth of drafts without drift."""
        self.limit, self.calibration_steps, self.probes_needed = limit, calibration_steps, calibration_probes
        self.usual = self._calibrate()
        self.bands: dict[str, list[_Spread]] = {name: [] for name in CLEAR_SHIFT}
        self.watched: dict[Hashable, _Watched] = {}
        self.counts = GuardCounts()

    def _calibrate(self) -> dict[bool, _Usual]:
        """Empty rates, separately for drafts with and without probabilities: greedy and drawn drafts are not compared."""
        return {is_expected: _Usual(self.limit, self.calibration_steps) for is_expected in (False, True)}

    def depth(self, request: Hashable) -> int:
        """The depth limit of a request."""
        return self.watched[request].limit if request in self.watched else self.limit

    def forget(self, request: Hashable) -> None:
        watched = self.watched.pop(request, None)
        if watched is not None:
            self.counts.shortened -= watched.limit < self.limit

    def renew(self) -> None:
        """Call it when the drafter's weights change: no request stays shortened, and the band is learnt anew."""
        self.counts.recoveries += self.counts.shortened
        self.counts.shortened = 0
        self.watched.clear()
        self.usual = self._calibrate()
        self.bands = {name: [] for name in CLEAR_SHIFT}

    def record(
        self,
        request: Hashable,
        depth: int,
        accepted: int,
        *,
        nameable: bool = True,
        confidences: Sequence[float] = (),
    ) -> None:
        """Records a step whose draft had `depth` tokens, `accepted` of which were accepted; adjusts the request's limit.

        `confidences`: the drafter's probabilities of its tokens: for all steps of a request, or for none.

        `nameable`: whether the token that the target chose next is in the draft vocabulary. If not, the miss says nothing about
        the drafter and is not counted.
        """
        tried = min(depth, accepted + nameable)
        watched, usual = self._watch(request), self.usual[bool(confidences)]
        watched.is_expected = bool(confidences)
        usual.add(tried, accepted, confidences)
        watched.rates.add(tried, accepted, confidences)
        watched.since += 1
        watched.unseen += 1
        if watched.unseen >= LONGEST_WAIT:
            watched.drifting.clear()  # the next probe may be far off; if the request still drifts, that probe shows it
        self.counts.short_steps += watched.limit < self.limit
        if usual.steps_left:
            usual.steps_left -= 1
        elif watched.since >= PAUSE and self._below_the_band(watched):
            self._shorten(watched, "acceptance")
        elif watched.since >= watched.wait and watched.limit < self.limit and self._is_back(watched):
            self._lengthen(watched)
        elif watched.since >= LONGEST_WAIT and watched.limit == self.limit:
            watched.wait, watched.has_grown = FIRST_WAIT, False

    def record_probe(self, request: Hashable, figures: Mapping[str, Sequence[float | None]]) -> None:
        """Records the probed figures of one draft, by draft step; None where there is no figure."""
        watched = self._watch(request)
        watched.unseen = 0
        for name, bands in self.bands.items():
            values = list(figures.get(name, ()))[: self.limit]
            bands.extend(_Spread(name) for _ in range(len(values) - len(bands)))
            is_out = False
            for band, value in zip(bands, values, strict=False):
                if value is None:
                    continue
                if band.probes < self.probes_needed:
                    band.add(value)
                    continue
                width = band.width
                is_out |= abs(value - band.mean) > width
                band.add(min(max(value, band.mean - width), band.mean + width))  # clipped: outliers must not widen the band
            if is_out:
                watched.drifting.add(name)
                self._shorten(watched, REASON_OF[name])
            elif any(value is not None for value in values):
                watched.drifting.discard(name)

    def _watch(self, request: Hashable) -> _Watched:
        if request not in self.watched:
            self.watched[request] = _Watched(self.limit)
        return self.watched[request]

    def _judged(self, watched: _Watched) -> list[tuple[float, float]]:
        """For each position with enough trials: how far its rate is below the usual one, and how far it may be."""
        rates, usual = watched.rates, self.usual[watched.is_expected]
        judged = []
        for place in range(watched.limit):
            if (trials := rates.tried[place]) >= LEAST_TRIALS:
                error = math.sqrt(usual.rate(place) * (1 - usual.rate(place)) / trials)
                drop = usual.surplus(place) - rates.surplus(place)
                judged.append((drop, max(CLEAR_DROP, STANDARD_ERRORS * error)))
        return judged

    def _below_the_band(self, watched: _Watched) -> bool:
        return any(drop > allowed for drop, allowed in self._judged(watched))

    def _is_back(self, watched: _Watched) -> bool:
        judged = self._judged(watched)
        return not watched.drifting and bool(judged) and all(drop <= allowed / 2 for drop, allowed in judged)

    def _shorten(self, watched: _Watched, reason: str) -> None:
        if watched.limit == 1:
            watched.since = 0
            return
        if watched.limit == self.limit:
            self.counts.shortened += 1
            self.counts.requests += not watched.was_short
            watched.was_short = True
        if watched.has_grown:
            watched.wait, watched.has_grown = min(2 * watched.wait, LONGEST_WAIT), False
        self.counts.shortenings[reason] += 1
        watched.limit, watched.since = max(1, watched.limit // 2), 0

    def _lengthen(self, watched: _Watched) -> None:
        watched.rates.forget_from(watched.limit)  # deeper positions are judged anew
        watched.limit, watched.since, watched.has_grown = min(2 * watched.limit, self.limit), 0, True
        if watched.limit == self.limit:
            self.counts.recoveries += 1
            self.counts.shortened -= 1
